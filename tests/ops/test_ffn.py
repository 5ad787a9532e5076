"""The networks of experts: formulas by hand, and the loop over experts against one row at a time."""

import functools
import math
import shutil

import pytest
import torch

from moe_async.ops.ffn import ExpertWeights, activate, compile_problem, expert_loop, feed_forward, input_width
from tests.helpers.numerics import assert_close
from tests.helpers.reference import naive_expert, naive_expert_rows

DIM, HIDDEN = 5, 6
SIZES = [[3, 0, 2, 1], [0, 0, 6, 0], [6, 0, 0, 0], [0, 0, 0, 6], [0, 0, 0, 0]]
float64 = functools.partial(torch.tensor, dtype=torch.float64)


def random_case(experts, rows, kind):
    """Rows and the stacked weights of experts, with gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, DIM), (experts, input_width(kind, HIDDEN), DIM), (experts, DIM, HIDDEN)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_relu2_by_hand():
    assert_close(activate("relu2", float64([2.0, -1.0, 0.0, 3.0])), float64([4.0, 0.0, 0.0, 9.0]))
    assert input_width("relu2", 7) == 7


def test_swiglu_by_hand():
    # The first half is the gate: silu(2) * 3 and silu(-1) * 5.
    expected = float64([2 / (1 + math.exp(-2)) * 3, -1 / (1 + math.exp(1)) * 5])
    assert_close(activate("swiglu", float64([2.0, -1.0, 3.0, 5.0])), expected)
    assert input_width("swiglu", 7) == 14


def test_gelu_by_hand():
    # The exact form: x times the normal distribution function at x, not its approximation by tanh.
    expected = float64([x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in (1.0, -2.0, 0.0)])
    assert_close(activate("gelu", float64([1.0, -2.0, 0.0])), expected)
    assert input_width("gelu", 7) == 7


def test_a_network_by_hand():
    # w_in x = (4, 6): gate 4, up 6. w_out doubles and negates.
    w_in, w_out = float64([[1.0, 1.0], [0.0, 2.0]]), float64([[2.0], [-1.0]])
    actual = feed_forward(float64([1.0, 3.0]), w_in, w_out, "swiglu")
    hidden = 4 / (1 + math.exp(-4)) * 6
    assert_close(actual, float64([2 * hidden, -hidden]))


@pytest.mark.parametrize("kind", ["silu", "SwiGLU", "", None], ids=str)
def test_unknown_kinds_are_refused(kind):
    with pytest.raises(ValueError, match=r"the kind of expert is .*; it must be swiglu, gelu, relu2 or swiglu_clamped"):
        activate(kind, float64([1.0, 2.0]))
    x, w_in, w_out = random_case(1, 2, "gelu")
    with pytest.raises(ValueError, match="the kind of expert is"):
        expert_loop(x, [2], ExpertWeights(w_in, w_out), kind)


@pytest.mark.parametrize("compiler", ["g++", "clang++", "c++", None], ids=str)
def test_a_missing_compiler_is_explained(compiler, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == compiler else None)
    problem = compile_problem(torch.device("cpu"))
    assert problem == "" if compiler else "there is no C++ compiler (g++, clang++) on the path" in problem
    # An accelerator needs none.
    assert compile_problem(torch.device("cuda")) == ""


@pytest.mark.parametrize("kind", ["swiglu", "gelu", "relu2"])
def test_any_leading_shape(kind):
    x, w_in, w_out = random_case(1, 6, kind)
    flat = feed_forward(x, w_in[0], w_out[0], kind)
    assert_close(flat, torch.stack([naive_expert(row, w_in[0], w_out[0], kind) for row in x]))
    assert_close(feed_forward(x.view(2, 3, DIM), w_in[0], w_out[0], kind), flat.view(2, 3, DIM))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["swiglu", "gelu", "relu2"])
def test_the_loop_equals_one_row_at_a_time_including_gradients(kind, sizes):
    case = random_case(len(sizes), sum(sizes), kind)
    twins = [value.detach().clone().requires_grad_() for value in case]
    actual, expected = (
        expert_loop(case[0], sizes, ExpertWeights(*case[1:]), kind),
        naive_expert_rows(twins[0], sizes, *twins[1:], kind),
    )
    assert_close(actual, expected)
    direction = torch.linspace(-1, 1, actual.numel(), dtype=torch.float64).view_as(actual)
    (actual * direction).sum().backward()
    (expected * direction).sum().backward()
    for value, twin in zip(case, twins, strict=True):
        assert_close(value.grad, torch.zeros_like(twin) if twin.grad is None else twin.grad)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_experts_without_rows_get_zeros_and_never_none(sizes):
    x, w_in, w_out = random_case(len(sizes), sum(sizes), "swiglu")
    # One tensor an expert, as leaves: each of them must take part.
    firsts, seconds = ([w.detach().requires_grad_() for w in stack] for stack in (w_in, w_out))
    weights = ExpertWeights(torch.stack(firsts), torch.stack(seconds))
    expert_loop(x, sizes, weights, "swiglu").sum().backward()
    for size, first, second in zip(sizes, firsts, seconds, strict=True):
        for weight in (first, second):
            assert weight.grad is not None and (weight.grad.norm() > 0) == (size > 0)


def test_rows_of_one_expert_do_not_reach_another():
    x, w_in, w_out = random_case(2, 4, "swiglu")
    weights = ExpertWeights(w_in, w_out)
    before = expert_loop(x, [2, 2], weights, "swiglu")
    changed = torch.cat([x[:2], 7 * x[2:]])
    assert torch.equal(expert_loop(changed, [2, 2], weights, "swiglu")[:2], before[:2])


def test_the_dtype_of_rows_is_kept():
    case = [value.detach().bfloat16() for value in random_case(2, 4, "gelu")]
    assert expert_loop(case[0], [1, 3], ExpertWeights(*case[1:]), "gelu").dtype == torch.bfloat16


@pytest.mark.parametrize("sizes", [[1, 2], [2, 2], [4], [1, 1, 2]], ids=str)
def test_sizes_that_do_not_fit_are_refused(sizes):
    x, w_in, w_out = random_case(2, 4, "gelu")
    weights = ExpertWeights(w_in, w_out)
    if sum(sizes) == 4 and len(sizes) == 2:
        assert expert_loop(x, sizes, weights, "gelu").shape == (4, DIM)
    else:
        with pytest.raises(ValueError, match="do not fit 4 rows for 2 experts; give one count for each expert"):
            expert_loop(x, sizes, weights, "gelu")
