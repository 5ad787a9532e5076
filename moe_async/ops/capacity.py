"""Which assignments fit when an expert takes only so many tokens of a micro-batch.

Shape letters: T tokens, K experts per token, E choices of the router, A assignments (T * K; assignment ``a`` is place
``a % K`` of token ``a // K``).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from moe_async.ops.noise import Noise
from moe_async.ops.routing import Selection

Policy = Literal["position", "probability", "random", "batch_prioritised"]


def capacity(factor: float, top_k: int, tokens: int, choices: int, minimum: int) -> int:
    """``max(minimum, ceil(factor * K * T / E))`` (Lepikhin et al. 2020, arXiv 2006.16668, 2.2).

    Args:
        factor: 1 is room for an even load and no more.
        top_k: experts per token.
        tokens: T.
        choices: E.
        minimum: the least.
    """
    # The factor's decimal value: 1.1 * 10 is 11, and not the next float above it.
    return max(minimum, math.ceil(Fraction(str(factor)) * top_k * tokens / choices))


def drop_order(selection: Selection, policy: Policy, noise: Noise | None) -> Tensor:
    """The order in which assignments are given a place, int64 [A].

    ``position``: all first choices before all second ones, each by the token's position (GShard); ``probability``: the
    highest router probability first; ``random``: as drawn; ``batch_prioritised``: all first choices before all second
    ones, each by the token's highest probability (Riquelme et al. 2021, arXiv 2106.05974, 4.1). Equals keep the order
    of ``position``. ``random`` without noise (evaluation) is ``position``.
    """
    tokens, top_k = selection.experts_TK.shape
    device = selection.experts_TK.device
    by_rank_A = torch.arange(tokens * top_k, device=device).view(tokens, top_k).T.reshape(-1)
    if policy == "position" or (policy == "random" and noise is None):
        return by_rank_A
    probs_TK = selection.probs_TE.detach().gather(-1, selection.experts_TK)
    if policy == "probability":
        return by_rank_A[_descending(probs_TK.reshape(-1)[by_rank_A])]
    if policy == "random":
        assert noise is not None
        return torch.argsort(noise.uniform("drop", (tokens * top_k,), device), stable=True)
    best_T = selection.probs_TE.detach().amax(dim=-1)
    token_order_T = _descending(best_T)
    return (token_order_T[None] * top_k + torch.arange(top_k, device=device)[:, None]).reshape(-1)


def within_capacity(experts_TK: Tensor, eligible_TK: Tensor, order_A: Tensor, limit: int) -> Tensor:
    """The eligible assignments that find a place when each expert has ``limit`` of them: bool [T, K].

    Args:
        experts_TK: int64.
        eligible_TK: bool, False for what takes no place (masked tokens, empty places, zero experts).
        order_A: who comes first, `drop_order`.
        limit: places of each expert.
    """
    order_A = order_A[eligible_TK.reshape(-1)[order_A]]
    expert_A = experts_TK.reshape(-1)[order_A]
    by_expert_A = torch.argsort(expert_A, stable=True)
    sorted_A = expert_A[by_expert_A]
    # The place of an assignment is its distance from the first one of its expert.
    first_A = torch.searchsorted(sorted_A, sorted_A)
    fits_A = torch.arange(sorted_A.numel(), device=sorted_A.device) - first_A < limit
    kept = torch.zeros_like(eligible_TK).reshape(-1)
    kept[order_A[by_expert_A[fits_A]]] = True
    return kept.view_as(eligible_TK)


def renormalised(weights_TK: Tensor, before_TK: Tensor, kept_TK: Tensor) -> Tensor:
    """Weights of the kept assignments, scaled to the sum that the token's weights had before; others keep theirs."""
    whole_T1 = torch.where(before_TK, weights_TK, 0).sum(dim=-1, keepdim=True)
    left_T1 = torch.where(kept_TK, weights_TK, 0).sum(dim=-1, keepdim=True)
    some_T1 = left_T1 > 0
    return torch.where(some_T1, weights_TK * whole_T1 / torch.where(some_T1, left_T1, 1), weights_TK)


def _descending(values: Tensor) -> Tensor:
    return torch.sort(values, descending=True, stable=True).indices
