"""Causal grouped-query attention with rotary positions, against a loop over heads and positions."""

import functools
import math

import pytest
import torch

from moe_async.model.attention import Attention, rotary_tables, rotate
from moe_async.ops.initialise import Init, normal_by_name_
from tests.helpers.numerics import assert_close
from tests.helpers.reference import naive_attention, naive_rotary

CPU = torch.device("cpu")
DIM, WIDTH, LENGTH = 6, 4, 5
float64 = functools.partial(torch.tensor, dtype=torch.float64)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention_of(heads, kv_heads):
    layer = Attention(DIM, heads, kv_heads, WIDTH, Init(output_scale=0.5), "none", 1e-5).double()
    layer.reset_parameters(seed=1, name="attention")
    return layer


def tables_of(length=LENGTH):
    return rotary_tables(length, WIDTH, 10000.0, CPU)


def test_rotary_angles_by_hand():
    # A head of width 4 has two pairs, which turn by 1 and by theta^(-2/4) at each position.
    cos, sin = rotary_tables(3, 4, 100.0, CPU)
    angles = [[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]]
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape == (3, 2)
    assert_close(cos, float64([[math.cos(angle) for angle in row] for row in angles]))
    assert_close(sin, float64([[math.sin(angle) for angle in row] for row in angles]))


def test_a_quarter_turn_by_hand():
    # The pairs are (1, 3) and (2, 4): the first turns by a quarter, the second by a half.
    tables = float64([[0.0, -1.0]]), float64([[1.0, 0.0]])
    assert rotate(float64([[1.0, 2.0, 3.0, 4.0]]), tables).tolist() == [[-3.0, -2.0, 1.0, -4.0]]


@pytest.mark.parametrize("theta", [10000.0, 50.0])
def test_rotation_equals_the_naive_one_head_by_head(theta):
    x = random(2, 3, LENGTH, WIDTH)
    actual = rotate(x, rotary_tables(LENGTH, WIDTH, theta, CPU))
    expected = torch.stack([torch.stack([naive_rotary(head, theta) for head in heads]) for heads in x])
    assert_close(actual, expected)


def test_rotation_keeps_dtype_and_length_and_the_first_position():
    x = random(2, 3, LENGTH, WIDTH)
    turned = rotate(x, tables_of())
    assert turned.dtype == torch.float64 and rotate(x.bfloat16(), tables_of()).dtype == torch.bfloat16
    assert torch.equal(turned[..., 0, :], x[..., 0, :])
    assert_close(turned.norm(dim=-1), x.norm(dim=-1), torch.float32)


def test_a_score_depends_on_the_distance_alone():
    q, k = (random(1, WIDTH, seed=seed).expand(8, WIDTH) for seed in (1, 2))
    scores = rotate(q, tables_of(8)) @ rotate(k, tables_of(8)).T
    for distance in range(-7, 8):
        along = scores.diagonal(distance)
        assert_close(along, along[:1].expand_as(along), torch.float32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)])
def test_equals_naive_attention_including_gradients(heads, kv_heads):
    layer = attention_of(heads, kv_heads)
    x = random(2, LENGTH, DIM).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    qkv, out = (weight.detach().clone().requires_grad_() for weight in (layer.qkv.weight, layer.out.weight))
    actual = layer(x, tables_of())
    expected = torch.stack([naive_attention(row, qkv, out, heads, kv_heads) for row in twin])
    assert_close(actual, expected)
    direction = random(2, LENGTH, DIM, seed=3)
    (actual * direction).sum().backward()
    (expected * direction).sum().backward()
    assert_close(x.grad, twin.grad)
    assert_close(layer.qkv.weight.grad, qkv.grad, what="qkv")
    assert_close(layer.out.weight.grad, out.grad, what="out")


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_equal_full_ones_with_keys_and_values_repeated(kv_heads):
    grouped, full = attention_of(4, kv_heads), attention_of(4, 4)
    q, k, v = grouped.qkv.weight.detach().split([4 * WIDTH, kv_heads * WIDTH, kv_heads * WIDTH])
    repeated = [
        part.view(kv_heads, WIDTH, DIM).repeat_interleave(4 // kv_heads, dim=0).flatten(0, 1) for part in (k, v)
    ]
    with torch.no_grad():
        full.qkv.weight.copy_(torch.cat([q, *repeated]))
        full.out.weight.copy_(grouped.out.weight)
    x = random(2, LENGTH, DIM)
    assert_close(grouped(x, tables_of()), full(x, tables_of()))


@pytest.mark.parametrize("changed", range(1, LENGTH))
def test_later_tokens_change_no_earlier_output(changed):
    layer, x = attention_of(4, 2), random(2, LENGTH, DIM)
    other = x.clone()
    other[:, changed:] = random(2, LENGTH - changed, DIM, seed=9)
    before, after = layer(x, tables_of()), layer(other, tables_of())
    assert torch.equal(after[:, :changed], before[:, :changed])
    assert not torch.equal(after[:, changed], before[:, changed])


def test_no_gradient_flows_from_an_output_to_a_later_input():
    x = random(1, LENGTH, DIM).requires_grad_()
    attention_of(4, 2)(x, tables_of())[:, 2].sum().backward()
    assert torch.equal(x.grad[:, 3:], torch.zeros_like(x.grad[:, 3:])) and (x.grad[:, :3].norm(dim=-1) > 0).all()


def test_the_first_position_sees_itself_alone():
    layer, x = attention_of(2, 2), random(1, 1, DIM)
    value = layer.qkv(x)[..., -2 * WIDTH :]
    assert_close(layer(x, tables_of(1)), layer.out(value))


def test_sequences_do_not_see_one_another():
    layer, x = attention_of(4, 2), random(3, LENGTH, DIM)
    together = layer(x, tables_of())
    for row in range(3):
        assert_close(layer(x[row : row + 1], tables_of())[0], together[row])


def test_order_matters():
    layer, x = attention_of(4, 2), random(1, LENGTH, DIM)
    swapped = x[:, [1, 0, 2, 3, 4]]
    assert (layer(x, tables_of())[:, 4] - layer(swapped, tables_of())[:, 4]).norm() > 0


def test_initial_weights_follow_from_names():
    layer = Attention(DIM, 4, 2, WIDTH, Init(output_scale=0.5), "none", 1e-5)
    layer.reset_parameters(seed=5, name="layers.3.attention")
    qkv, out = torch.empty(8 * WIDTH, DIM), torch.empty(DIM, 4 * WIDTH)
    normal_by_name_(qkv, std=DIM**-0.5, seed=5, name="layers.3.attention.qkv.weight")
    normal_by_name_(out, std=0.5 * (4 * WIDTH) ** -0.5, seed=5, name="layers.3.attention.out.weight")
    assert torch.equal(layer.qkv.weight, qkv) and torch.equal(layer.out.weight, out)
