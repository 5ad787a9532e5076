"""Norms of queries and keys: of each head, as Qwen3 has them, and of all heads together, as OLMoE."""

import pytest
import torch

from moe_async.model.attention import Attention, rotary_tables
from moe_async.ops.initialise import Init
from tests.helpers.numerics import assert_close
from tests.helpers.reference import naive_rms_norm, naive_rotary

HEADS, KV_HEADS, WIDTH, DIM, LENGTH = 4, 2, 6, 8, 5


def attention_of(kind):
    attention = Attention(DIM, HEADS, KV_HEADS, WIDTH, Init(), kind, 1e-6).double()
    attention.reset_parameters(0, "attention")
    for index, parameter in enumerate(attention.parameters()):
        if parameter.ndim == 1:
            parameter.data = torch.linspace(0.5, 1.5 + index / 10, parameter.numel(), dtype=torch.float64)
    return attention


def naive(attention, x, kind):
    q, k, v = (x @ attention.qkv.weight.T).split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], dim=-1)
    if kind == "full":
        q = torch.stack([naive_rms_norm(row, attention.q_norm.weight, 1e-6) for row in q])
        k = torch.stack([naive_rms_norm(row, attention.k_norm.weight, 1e-6) for row in k])
    heads = []
    for h in range(HEADS):
        g = h // (HEADS // KV_HEADS)
        own_q, own_k = q[:, h * WIDTH : (h + 1) * WIDTH], k[:, g * WIDTH : (g + 1) * WIDTH]
        if kind == "head":
            own_q = naive_rms_norm(own_q, attention.q_norm.weight, 1e-6)
            own_k = naive_rms_norm(own_k, attention.k_norm.weight, 1e-6)
        own_q, own_k = naive_rotary(own_q), naive_rotary(own_k)
        rows = []
        for t in range(LENGTH):
            share = torch.softmax(own_k[: t + 1] @ own_q[t] / WIDTH**0.5, 0)
            rows.append(share @ v[: t + 1, g * WIDTH : (g + 1) * WIDTH])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1) @ attention.out.weight.T


@pytest.mark.parametrize("kind", ["none", "head", "full"])
def test_equals_the_loop_over_heads_with_gradients(kind):
    attention, twin = attention_of(kind), attention_of(kind)
    x = torch.randn(LENGTH, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tables = rotary_tables(LENGTH, WIDTH, 10000.0, x.device)
    actual, expected = attention(x[None], tables)[0], naive(twin, x, kind)
    assert_close(actual, expected)
    actual.square().sum().backward()
    expected.square().sum().backward()
    for (name, parameter), other in zip(attention.named_parameters(), twin.parameters(), strict=True):
        assert_close(parameter.grad, other.grad, what=name)
    assert {name for name, _ in attention.named_parameters()} >= ({"q_norm.weight"} if kind != "none" else set())
