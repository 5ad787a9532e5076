"""Grouped matrix products give the numbers of the loop over experts; and the loop with biases and masks."""

import functools
import re

import pytest
import torch

from moe_async.errors import TopologyError
from moe_async.moe import MoELayer
from moe_async.ops.ffn import (
    ExpertWeights,
    activate,
    expert_grouped,
    expert_loop,
    grouped_problem,
    input_width,
)
from tests.helpers.numerics import assert_close
from tests.helpers.reference_routing import naive_network

DIM, HIDDEN = 16, 8
SIZES = [[3, 0, 2, 1], [0, 0, 6, 0], [6, 0, 0, 0], [0, 0, 0, 6], [0, 0, 0, 0], [1, 40, 3, 0]]
KINDS = ["swiglu", "gelu", "relu2", "swiglu_clamped"]
float64 = functools.partial(torch.tensor, dtype=torch.float64)


def case(sizes, kind, dtype, biases=True, masked=True):
    """Rows, weights and a dropout mask; leaves with gradient but for the mask."""
    generator, experts, rows = torch.Generator().manual_seed(0), len(sizes), sum(sizes)
    width = input_width(kind, HIDDEN)
    shapes = [(rows, DIM), (experts, width, DIM), (experts, DIM, HIDDEN)]
    shapes += [(experts, width), (experts, DIM)] if biases else []
    # Small, so that sums of bfloat16 numbers stay near each other.
    leaves = [0.3 * torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    mask = (torch.rand(rows, HIDDEN, generator=generator) < 0.75).to(dtype) / 0.75 if masked else None
    return [leaf.requires_grad_() for leaf in leaves], mask


def results(run, sizes, kind, leaves, mask):
    """The output and all gradients."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    output = run(leaves[0], sizes, ExpertWeights(*leaves[1:]), kind, mask)
    direction = torch.linspace(-0.5, 0.5, output.numel()).to(output.dtype).view_as(output)
    (output * direction).sum().backward()
    return [output, *(leaf.grad for leaf in leaves)]


def test_the_clamped_kind_by_hand():
    # Gates 8 (limited to 7), -1 and 0.5, ups 3, -9 (limited to -7) and 9 (limited to 7).
    def gated(gate, up):
        return gate * torch.sigmoid(1.702 * float64(gate)) * (up + 1)

    actual = activate("swiglu_clamped", float64([8.0, -1.0, 0.5, 3.0, -9.0, 9.0]))
    assert_close(actual, torch.stack([gated(7.0, 3.0), gated(-1.0, -7.0), gated(0.5, 7.0)]))
    # A gate has no lower limit.
    assert_close(activate("swiglu_clamped", float64([-20.0, 0.0])), gated(-20.0, 0.0)[None])
    assert input_width("swiglu_clamped", 7) == 14


@pytest.mark.parametrize("sizes", SIZES[:5], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [(True, False), (False, True)], ids=["biases", "dropout"])
def test_the_loop_equals_one_row_at_a_time_including_gradients(kind, sizes, options):
    leaves, mask = case(sizes, kind, torch.float64, *options)
    with torch.no_grad():
        # Far enough out for the limits of the clamped kind.
        leaves[1].mul_(20)

    def row_by_row(rows, sizes, weights, kind, mask):
        owners = [expert for expert, size in enumerate(sizes) for _ in range(size)]
        own = [[None if w is None else w[e] for w in weights] for e in owners]
        masks = [None] * len(owners) if mask is None else mask
        outputs = [
            naive_network(row, w[0], w[1], kind, w[2], w[3], factors)
            for row, w, factors in zip(rows, own, masks, strict=True)
        ]
        # Experts without rows get zeros.
        nothing = sum(0 * w.sum() for w in weights if w is not None)
        return (torch.stack(outputs) if outputs else rows) + nothing

    actual, expected = (results(run, sizes, kind, leaves, mask) for run in (expert_loop, row_by_row))
    for value, twin in zip(actual, expected, strict=True):
        assert_close(value, twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [(False, False), (True, True)], ids=["plain", "biases and dropout"])
def test_grouped_equals_the_loop_including_gradients(kind, sizes, dtype, options):
    leaves, mask = case(sizes, kind, dtype, *options)
    loop, grouped = (results(run, sizes, kind, leaves, mask) for run in (expert_loop, expert_grouped))
    for value, twin in zip(grouped, loop, strict=True):
        assert value.dtype == dtype
        assert_close(value, twin)
    for empty in (expert for expert, size in enumerate(sizes) if size == 0):
        assert all(torch.equal(grad[empty], torch.zeros_like(grad[empty])) for grad in grouped[2:])


@pytest.mark.parametrize("run", [expert_loop, expert_grouped])
def test_the_gradient_of_a_plain_sum(run):
    """Which is one number expanded; the kernel's backward refuses that as it comes."""
    leaves, _ = case([2, 3], "gelu", torch.float32, biases=False)
    run(leaves[0], [2, 3], ExpertWeights(*leaves[1:]), "gelu").sum().backward()
    expected, _ = case([2, 3], "gelu", torch.float32, biases=False)
    ones = torch.ones(5, DIM)
    (expert_loop(expected[0], [2, 3], ExpertWeights(*expected[1:]), "gelu") * ones).sum().backward()
    for value, twin in zip(leaves, expected, strict=True):
        assert_close(value.grad, twin.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_do_not_lie_one_after_another(dtype):
    leaves, _ = case([3, 3], "swiglu", dtype, biases=False)
    weights, rows = ExpertWeights(*leaves[1:]), leaves[0].detach()
    for spread in (torch.stack([rows, rows], dim=1)[:, 0], rows.T.contiguous().T, rows[:1].expand(6, DIM)):
        assert not spread.is_contiguous()
        actual = expert_grouped(spread, [3, 3], weights, "swiglu")
        assert_close(actual, expert_loop(spread, [3, 3], weights, "swiglu"))


# Where grouped products cannot be used


@pytest.mark.parametrize(
    ("dtype", "widths", "problem"),
    [
        (torch.float32, (16, 8), ""),
        (torch.float32, (4, 12), ""),
        (torch.float32, (16, 6), r"a row of 6 numbers of torch\.float32 is 24 bytes and must be a multiple of 16"),
        (torch.float32, (9, 8), r"a row of 9 numbers of torch\.float32 is 36 bytes"),
        (torch.bfloat16, (16, 8), ""),
        (torch.bfloat16, (16, 12), r"a row of 12 numbers of torch\.bfloat16 is 24 bytes"),
        (torch.float64, (16, 8), r"and not in torch\.float64"),
        (torch.int8, (16, 16), r"and not in torch\.int8"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_explained(dtype, widths, problem):
    found = grouped_problem(dtype, *widths)
    assert re.search(problem, found) and bool(found) == bool(problem)


def test_an_old_torch_is_explained(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert "has no torch.nn.functional.grouped_mm" in grouped_problem(torch.float32, 16)


def layer_of(products, dim=16, expert_dim=8, **options):
    return MoELayer(dim, 4, 2, expert_dim, products=products, seed=1, **options)


@pytest.mark.parametrize("options", [{}, {"expert": "swiglu_clamped", "expert_bias": True}], ids=["plain", "gpt-oss"])
def test_a_layer_with_grouped_products_equals_one_with_the_loop(options):
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    outputs = []
    for products in ("loop", "grouped"):
        layer = layer_of(products, **options)
        hidden = layer(x).hidden
        hidden.square().sum().backward()
        outputs.append([hidden, *(parameter.grad for parameter in layer.parameters())])
    for loop, grouped in zip(*outputs, strict=True):
        assert_close(grouped, loop)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dim": 18}, "a row of 18 numbers"),
        ({"expert_dim": 6}, "a row of 6 numbers"),
        ({"expert_dim": 12, "compute_dtype": torch.bfloat16}, "a row of 12 numbers"),
        ({"compute_dtype": torch.float64}, r"not in torch\.float64"),
    ],
    ids=str,
)
def test_a_layer_whose_widths_do_not_fit_refuses_grouped_products(options, problem):
    x = torch.zeros(3, options.get("dim", 16))
    with pytest.raises(TopologyError, match=rf"grouped matrix products do not work here: .*{problem}.*products: auto"):
        layer_of("grouped", **options)
    # And `auto` does without.
    assert layer_of("auto", **options)(x).hidden.shape == x.shape


def test_a_layer_that_was_cast_later_refuses_grouped_products_at_its_first_pass():
    layer = layer_of("grouped").double()
    with pytest.raises(TopologyError, match=r"grouped matrix products do not work here: .*not in torch\.float64"):
        layer(torch.zeros(3, 16, dtype=torch.float64))
    assert layer_of("auto").double()(torch.zeros(3, 16, dtype=torch.float64)).hidden.dtype == torch.float64


def test_auto_is_the_loop_on_a_cpu_and_grouped_on_accelerators_that_can():
    experts = layer_of("auto").experts
    assert [experts._products(torch.device(kind)) for kind in ("cpu", "cuda")] == ["loop", "grouped"]
    assert layer_of("auto", expert_dim=6).experts._products(torch.device("cuda")) == "loop"
    assert layer_of("loop").experts._products(torch.device("cuda")) == "loop"
