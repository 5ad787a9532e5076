"""How much two ways to compute router logits disagree about experts.

Shape letters: T tokens, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_async.ops.routing import highest_k


class Agreement(NamedTuple):
    """Counts over tokens.

    Attributes:
        tokens: tokens looked at.
        differing: tokens for which the two ways take different sets of experts.
        ties: tokens whose last expert taken and first one left out have exactly equal logits in the first way.
    """

    tokens: int
    differing: int
    ties: int


def routing_agreement(logits_TE: Tensor, reference_TE: Tensor, top_k: int) -> Agreement:
    """Compare the experts that two sets of logits choose, the K highest each.

    Args:
        logits_TE: the way in question, in its own type.
        reference_TE: the way to compare with.
        top_k: experts per token, fewer than E.
    """
    chosen = torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(-1, highest_k(logits_TE, top_k), True)
    wanted = torch.zeros_like(chosen).scatter_(-1, highest_k(reference_TE, top_k), True)
    ranked_TE = torch.sort(logits_TE, dim=-1, descending=True).values
    ties = ranked_TE[:, top_k - 1] == ranked_TE[:, top_k]
    return Agreement(logits_TE.shape[0], int((chosen != wanted).any(dim=-1).sum()), int(ties.sum()))
