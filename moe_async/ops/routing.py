"""Choosing experts for tokens.

Shape letters: T tokens, E experts in all, K experts per token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

WeightRule = Literal["normalised", "raw"]


class Selection(NamedTuple):
    """Which experts each token takes, and how much each counts.

    Attributes:
        experts_TK: int64 global expert ids, best first; equal scores pick the lowest id.
        weights_TK: factors of the experts' outputs, with gradient.
        probs_TE: the full router distribution, with gradient (what balance losses use).
    """

    experts_TK: Tensor
    weights_TK: Tensor
    probs_TE: Tensor


def highest_k(scores_TE: Tensor, top_k: int) -> Tensor:
    """Indices of the ``top_k`` highest scores of each row, best first: int64 [T, K].

    A stable descending sort gives the lowest index first among equal scores on every device; ``torch.topk`` gives
    no such guarantee.
    """
    return torch.sort(scores_TE.detach(), dim=-1, descending=True, stable=True).indices[..., :top_k]


def softmax_top_k(
    logits_TE: Tensor, top_k: int, weights: WeightRule = "normalised", experts_TK: Tensor | None = None
) -> Selection:
    """Top-k routing with a softmax over all experts.

    ``p = softmax(z)``; the K largest are taken. The weights are ``p_i`` (``raw``, as OLMoE does) or
    ``p_i / sum_{j taken} p_j`` (``normalised``, as Mixtral and Qwen3 do; the same number as a softmax over the K taken
    logits). For ``top_k == 1`` the weight is always the raw probability: renormalised over one expert it would be the
    constant 1, and the router would get no gradient from the task loss (Fedus et al. 2021, arXiv 2101.03961, eq. 2).

    Args:
        logits_TE: router logits, float32 or wider.
        top_k: experts per token, 1 to E.
        weights: which of the two rules above.
        experts_TK: a recorded choice to replay instead of choosing anew.
    """
    probs_TE = torch.softmax(logits_TE, dim=-1)
    if experts_TK is None:
        experts_TK = highest_k(probs_TE, top_k)
    weights_TK = probs_TE.gather(-1, experts_TK)
    if weights == "normalised" and top_k > 1:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return Selection(experts_TK, weights_TK, probs_TE)
