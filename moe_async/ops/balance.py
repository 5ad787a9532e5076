"""What balance losses are made of, as sums over tokens, and the losses over those sums.

Sums, never means: they add up over micro-batches, ranks and layers without weights.

Shape letters: T tokens, E experts in all, K experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RoutingSums(NamedTuple):
    """Sums over the tokens of one layer and micro-batch on one rank; masked tokens are not in them.

    Attributes:
        counts_E: int64, assignments to each expert before any drop; sums to ``K * tokens``.
        prob_sum_E: sum of the full router distribution, with gradient.
        z_sum: sum of ``logsumexp(logits)^2``, with gradient.
        entropy_sum: sum of the router distribution's entropy in nats, without gradient.
        tokens: int64, tokens routed.
        dropped: int64, assignments dropped.
    """

    counts_E: Tensor
    prob_sum_E: Tensor
    z_sum: Tensor
    entropy_sum: Tensor
    tokens: Tensor
    dropped: Tensor


def routing_sums(logits_TE: Tensor, probs_TE: Tensor, experts_TK: Tensor, live_T: Tensor | None) -> RoutingSums:
    """Sum what balance losses and the load profile need over the live tokens.

    Args:
        logits_TE: router logits.
        probs_TE: their softmax.
        experts_TK: chosen experts, int64.
        live_T: bool, False for tokens that count nowhere; None when all count.
    """
    num_experts = logits_TE.shape[-1]
    z_T = torch.logsumexp(logits_TE, dim=-1).square()
    with torch.no_grad():
        entropy_T = -torch.xlogy(probs_TE, probs_TE).sum(dim=-1)
        chosen_TK = experts_TK if live_T is None else experts_TK[live_T]
        counts_E = torch.bincount(chosen_TK.reshape(-1), minlength=num_experts)
        tokens = torch.tensor(chosen_TK.shape[0], device=logits_TE.device)
    if live_T is not None:
        # torch.where rather than a product: a masked token may hold anything, also infinities.
        probs_TE = torch.where(live_T[:, None], probs_TE, 0)
        z_T = torch.where(live_T, z_T, 0)
        entropy_T = torch.where(live_T, entropy_T, 0)
    return RoutingSums(
        counts_E=counts_E,
        prob_sum_E=probs_TE.sum(dim=0),
        z_sum=z_T.sum(),
        entropy_sum=entropy_T.sum(),
        tokens=tokens,
        dropped=torch.zeros_like(tokens),
    )


def switch_loss_sum(sums: RoutingSums, fractions_E: Tensor | None = None) -> Tensor:
    """Switch balance loss times the number of tokens: ``tokens * E * sum_i f_i P_i`` (a scalar with gradient).

    ``f_i = c_i / (K T)`` is the fraction of assignments that went to expert i (counts before drop, no gradient) and
    ``P_i`` the mean of the *full* router distribution. The loss ``E * sum_i f_i P_i`` is 1 at perfect balance for
    every E and K, and E/K when K experts take everything.

    Divided by the tokens of the whole step and summed over its micro-batches and ranks, this is the token-weighted
    mean of the micro-batches' losses (scope ``micro_batch``); with ``fractions_E`` of the whole step in every call
    it is exactly the loss of the step as one batch (scope ``step``).

    Args:
        sums: of one layer and micro-batch.
        fractions_E: f of a wider scope, instead of this micro-batch's own.

    Reference: Fedus, Zoph and Shazeer 2021, arXiv 2101.03961, eq. 4 to 6, with f divided by K.
    """
    if fractions_E is None:
        fractions_E = load_fractions(sums.counts_E)
    return sums.counts_E.numel() * (fractions_E.to(sums.prob_sum_E.dtype) * sums.prob_sum_E).sum()


def load_fractions(counts_E: Tensor) -> Tensor:
    """``f_i = c_i / sum_j c_j``, float64 [E]; zeros when no token was routed."""
    return counts_E.double() / counts_E.sum().clamp(min=1)


def z_loss_sum(sums: RoutingSums) -> Tensor:
    """Router z-loss times the number of tokens: ``sum_t logsumexp(z_t)^2`` (a scalar with gradient).

    It keeps router logits small. Reference: Zoph et al. 2022, arXiv 2202.08906, eq. 5.
    """
    return sums.z_sum
