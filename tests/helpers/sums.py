"""Routing sums to try losses and statistics on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_async.ops.routing import Selection, top_k_routing
from moe_async.ops.sums import RoutingSums, routing_sums

EXPERTS, TOP_K = 5, 2


def logits_of(tokens: int, seed: int = 0) -> Tensor:
    """Uneven routing: the first expert is ahead."""
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits + torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64)


def choosing(experts_TK: Tensor, probs_TE: Tensor) -> Selection:
    """The given experts, with their probabilities as weights."""
    return Selection(experts_TK, probs_TE.gather(-1, experts_TK), probs_TE)


def sums_of(logits: Tensor, mask: Tensor | None = None, top_k: int = TOP_K) -> RoutingSums:
    """The totals of all tokens under top-k routing."""
    return routing_sums(logits, top_k_routing(logits, top_k), live_T=mask).total()


def sums_of_choice(logits: Tensor, experts_TK: Tensor) -> RoutingSums:
    """The totals of all tokens that take the given experts."""
    return routing_sums(logits, choosing(experts_TK, torch.softmax(logits, -1))).total()


def balanced(num_experts: int, top_k: int) -> RoutingSums:
    """Sums of E tokens that each take the next K experts in turn, with a uniform distribution."""
    logits = torch.zeros(num_experts, num_experts, dtype=torch.float64)
    return sums_of_choice(logits, (torch.arange(num_experts)[:, None] + torch.arange(top_k)) % num_experts)


def collapsed(num_experts: int, top_k: int, tokens: int = 6) -> RoutingSums:
    """Sums of tokens that all take the first K experts, which share all the probability."""
    logits = torch.full((tokens, num_experts), -math.inf, dtype=torch.float64)
    logits[:, :top_k] = 0.0
    return sums_of_choice(logits, torch.arange(top_k).expand(tokens, top_k))


def added(parts: list[RoutingSums]) -> RoutingSums:
    """The total of several totals, without gradient."""
    return RoutingSums(*(sum(value.detach() for value in values) for values in zip(*parts, strict=True)))
