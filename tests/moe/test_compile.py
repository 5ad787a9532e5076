"""Experts under torch.compile: the same numbers, for any number of rows without compiling again."""

import functools
import shutil

import pytest
import torch

from moe_async.errors import TopologyError
from moe_async.moe import MoELayer
from moe_async.ops import ffn
from tests.helpers.numerics import assert_close


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Everything of torch.compile but its code generator, which needs a C++ compiler and most of a minute."""
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    ffn.compiled.cache_clear()
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count, fullgraph=True))
    yield compiled
    ffn.compiled.cache_clear()


@pytest.mark.parametrize("products", ["loop", "grouped"])
def test_compiled_experts_give_the_same_numbers(products, traced):
    options = {"expert": "swiglu_clamped", "expert_bias": True, "products": products}
    plain, compiled = MoELayer(16, 4, 2, 8, **options), MoELayer(16, 4, 2, 8, compile=True, **options)
    for tokens in (12, 40, 1, 7, 25, 0, 3):
        grads = []
        x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens))
        outputs = []
        for layer in (plain, compiled):
            layer.zero_grad()
            own = x.clone().requires_grad_()
            outputs.append(layer(own).hidden)
            outputs[-1].square().sum().backward()
            grads.append([own.grad, *(p.grad for p in layer.parameters())])
        assert_close(outputs[1], outputs[0])
        for value, wanted in zip(grads[1], grads[0], strict=True):
            assert_close(value, wanted)
    with torch.no_grad():
        for tokens in (12, 9, 1, 0, 30):
            x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens))
            assert_close(compiled.eval()(x).hidden, plain.eval()(x).hidden)
    # A graph for many rows, few for none and a single one, which torch treats apart, and the same without gradients;
    # there are over ten row counts. From torch's recompile limit on, a function runs as it is.
    assert torch._dynamo.config.recompile_limit == 8
    assert 1 <= len(traced) <= 8


@pytest.mark.parametrize("products", ["loop", "grouped"])
def test_what_lies_between_the_products_is_compiled_and_the_products_are_not(products, traced):
    layer = MoELayer(16, 4, 2, 8, products=products, compile=True, expert_bias=True)
    layer(torch.randn(12, 16, generator=torch.Generator().manual_seed(0))).hidden.sum().backward()
    called = {str(node.target) for graph in traced for node in graph.graph.nodes if node.op.startswith("call")}
    assert any("silu" in name for name in called)
    assert not any(word in name for name in called for word in ("linear", "matmul", "grouped_mm", "addmm"))


def test_a_missing_compiler_is_refused_at_the_first_pass(monkeypatch, traced):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    x = torch.zeros(3, 16)
    with pytest.raises(TopologyError, match=r"moe\.compile is on but .* no C\+\+ compiler .*use compile: false"):
        MoELayer(16, 4, 2, 8, compile=True)(x)
    assert not traced
    assert MoELayer(16, 4, 2, 8)(x).hidden.shape == x.shape
