"""Capacity: how many tokens of a rank's micro-batch an expert takes at most, agreed over all ranks.

Shape letters: T tokens, K experts per token.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_async.comm import Group
from moe_async.ops.capacity import capacity, drop_order, renormalised, within_capacity
from moe_async.ops.noise import Noise
from moe_async.ops.routing import Selection
from moe_async.recipe.moe import CapacitySection


class CapacityLimit:
    """Takes the assignments out of a selection that their experts have no room for.

    Args:
        rule: the recipe's ``moe.capacity``.
        num_experts: experts; zero experts behind them have room for all.
        top_k: experts per token.
        everyone: all ranks of the learner. In training the capacity follows from the most tokens that any of them has,
            in evaluation from this rank's own: so it is the same at every expert-parallel size, and an evaluation on
            some of the ranks waits for no others.
    """

    def __init__(self, rule: CapacitySection, num_experts: int, top_k: int, everyone: Group) -> None:
        self.rule = rule
        self.num_experts = num_experts
        self.top_k = top_k
        self.everyone = everyone

    def full(self, chosen: Selection, live_T: Tensor | None, noise: Noise | None, training: bool) -> Tensor | None:
        """What experts have no room for, bool [T, K]; None where there is no limit.

        In training every rank of the learner calls it; blocks.
        """
        factor = self.rule.factor if training else self.rule.eval_factor
        if factor is None:
            return None
        experts_TK = chosen.experts_TK
        tokens = experts_TK.shape[0] if live_T is None else int(live_T.sum())
        if training:
            tokens = int(self.everyone.all_reduce(torch.tensor(tokens, device=experts_TK.device), "max"))
        places = capacity(factor, self.top_k, tokens, chosen.probs_TE.shape[-1], self.rule.minimum)
        eligible_TK = taken(chosen) & (experts_TK < self.num_experts)
        if live_T is not None:
            eligible_TK = eligible_TK & live_T[:, None]
        order_A = drop_order(chosen, self.rule.policy, noise)
        return eligible_TK & ~within_capacity(experts_TK, eligible_TK, order_A, places)


def without(chosen: Selection, full_TK: Tensor, normalise: Literal["before", "after"]) -> Selection:
    """The selection that is executed when ``full_TK`` is dropped; ``after``: weights grow to the sum they had."""
    before_TK = taken(chosen)
    kept_TK = before_TK & ~full_TK
    weights_TK = chosen.weights_TK
    if normalise == "after":
        weights_TK = renormalised(weights_TK, before_TK, kept_TK)
    return chosen._replace(weights_TK=weights_TK, taken_TK=kept_TK)


def taken(selection: Selection) -> Tensor:
    """Which places of a selection are taken, bool [T, K]."""
    if selection.taken_TK is None:
        return torch.ones_like(selection.experts_TK, dtype=torch.bool)
    return selection.taken_TK
