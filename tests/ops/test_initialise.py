"""Initial values follow from seed, name and shape alone."""

import hashlib

import pytest
import torch

from moe_async.ops.initialise import normal_by_name_


def drawn(name, *shape, std=1.0, seed=0, dtype=torch.float32):
    tensor = torch.empty(*shape, dtype=dtype)
    normal_by_name_(tensor, std=std, seed=seed, name=name)
    return tensor


def test_by_hand():
    # The generator's seed is the first 8 bytes of the hash of "seed/name", without the lowest bit.
    seed = int.from_bytes(hashlib.sha256(b"3/experts.w_in.5").digest()[:8], "little") // 2
    expected = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) * 0.5
    assert torch.equal(drawn("experts.w_in.5", 4, 6, std=0.5, seed=3), expected)


def test_the_same_values_whatever_was_drawn_before():
    expected = drawn("layers.1.ffn", 6, 4)
    torch.manual_seed(99)
    drawn("something else", 50)
    torch.rand(7)
    assert torch.equal(drawn("layers.1.ffn", 6, 4), expected)


def test_no_global_random_state_is_used():
    before = torch.get_rng_state()
    drawn("a", 10)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2,)])
def test_experts_have_the_same_values_in_any_stacking_order(order):
    stacked = torch.empty(len(order), 3, 5)
    for slot, expert in enumerate(order):
        normal_by_name_(stacked[slot], std=1.0, seed=1, name=f"experts.w_in.{expert}")
    for slot, expert in enumerate(order):
        assert torch.equal(stacked[slot], drawn(f"experts.w_in.{expert}", 3, 5, seed=1))


def test_names_and_seeds_tell_tensors_apart():
    tensors = [drawn(name, 8, seed=seed) for name in ("a", "b", "experts.1", "experts.11") for seed in (0, 1)]
    tensors.append(drawn("0/a", 8))
    assert len({tuple(tensor.tolist()) for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize("std", [0.02, 1.0, 3.0])
def test_mean_and_standard_deviation(std):
    tensor = drawn("large", 200, 100, std=std)
    # 20,000 values: four standard errors of the mean are 2.8 % of std, of the deviation 2 %.
    assert abs(tensor.mean().item()) < 0.03 * std and abs(tensor.std().item() / std - 1) < 0.02
    assert tensor.abs().max().item() > 3 * std


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_dtype_gets_the_values_of_float32(dtype):
    assert torch.equal(drawn("a", 7, 3, dtype=dtype), drawn("a", 7, 3).to(dtype))


def test_a_view_is_filled_in_place_without_gradient():
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    normal_by_name_(parameter, std=1.0, seed=0, name="a")
    assert torch.equal(parameter.detach(), drawn("a", 4, 3)) and parameter.is_leaf and parameter.grad_fn is None
    transposed = torch.zeros(3, 4)
    normal_by_name_(transposed.T, std=1.0, seed=0, name="a")
    assert torch.equal(transposed.T, drawn("a", 4, 3))
