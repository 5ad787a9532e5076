"""Slow twins of the package's fast paths, written as loops over tokens. Imports nothing from the package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class NaiveRouting:
    """Sums over live tokens, as plain tensors."""

    counts: list[int]
    prob_sum: Tensor
    z_sum: Tensor
    entropy_sum: float
    tokens: int


def naive_expert(x: Tensor, w_in: Tensor, w_out: Tensor, kind: str) -> Tensor:
    """One token through one expert."""
    hidden = w_in @ x
    if kind == "swiglu":
        half = hidden.shape[0] // 2
        gate, up = hidden[:half], hidden[half:]
        hidden = gate / (1 + torch.exp(-gate)) * up
    else:
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    return w_out @ hidden


def naive_choice(probs: Tensor, top_k: int) -> list[int]:
    """The ``top_k`` largest, lowest index first among equals."""
    values = probs.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:top_k]


def naive_moe(
    x: Tensor,
    weights: Mapping[str, Tensor],
    top_k: int,
    rule: str = "normalised",
    kind: str = "swiglu",
    mask: Tensor | None = None,
) -> tuple[Tensor, NaiveRouting]:
    """A whole MoE layer, token by token, expert by expert.

    ``x`` [T, D]; ``weights`` holds ``router.weight`` [E, D], ``experts.w_in`` [E, F, D], ``experts.w_out``
    [E, D, F] with all experts in global order, and optionally ``shared.w_in`` and ``shared.w_out``.
    """
    router = weights["router.weight"]
    num_experts = router.shape[0]
    routing = NaiveRouting([0] * num_experts, torch.zeros(num_experts, dtype=x.dtype), x.new_zeros(()), 0.0, 0)
    rows = []
    for t in range(x.shape[0]):
        if mask is not None and not mask[t]:
            rows.append(torch.zeros_like(x[t]))
            continue
        logits = router @ x[t]
        probs = torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum()
        chosen = naive_choice(probs, top_k)
        total = sum(probs[e] for e in chosen) if rule == "normalised" and top_k > 1 else 1.0
        y = torch.zeros_like(x[t])
        for e in chosen:
            y = y + probs[e] / total * naive_expert(x[t], weights["experts.w_in"][e], weights["experts.w_out"][e], kind)
            routing.counts[e] += 1
        if "shared.w_in" in weights:
            y = y + naive_expert(x[t], weights["shared.w_in"], weights["shared.w_out"], kind)
        rows.append(y)
        routing.prob_sum = routing.prob_sum + probs
        routing.z_sum = routing.z_sum + torch.log(torch.exp(logits).sum()) ** 2
        routing.entropy_sum -= sum(p * math.log(p) for p in probs.tolist() if p > 0)
        routing.tokens += 1
    return torch.stack(rows) if rows else x, routing


def naive_switch_loss(routing: NaiveRouting, top_k: int) -> Tensor:
    """``E * sum_i f_i P_i`` with ``f_i = c_i / (K T)``; zero without tokens."""
    if routing.tokens == 0:
        return routing.prob_sum.sum() * 0
    loss = routing.prob_sum.new_zeros(())
    for i, count in enumerate(routing.counts):
        loss = loss + count / (top_k * routing.tokens) * routing.prob_sum[i] / routing.tokens
    return len(routing.counts) * loss


def naive_z_loss(routing: NaiveRouting) -> Tensor:
    """Mean of ``logsumexp^2``; zero without tokens."""
    return routing.z_sum / max(routing.tokens, 1)
