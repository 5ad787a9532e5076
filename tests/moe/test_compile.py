"""Experts under torch.compile: the same numbers, for any number of rows without compiling again."""

import functools

import pytest
import torch

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
    # One graph for many rows, few for none and a single one, which torch treats apart; there are over ten row counts.
    assert 1 <= len(traced) <= 6
