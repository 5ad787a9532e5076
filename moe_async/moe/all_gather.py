"""Dispatch by all-gather: every rank of the expert group sees all its tokens and runs its own experts over them.

Shape letters: T tokens here, A tokens of all ranks, K experts per token, P ranks in the expert group, L experts on
each, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_async.comm import Group
from moe_async.moe.dispatch import Assignments, ExpertFunction, packed, run_here
from moe_async.moe.exchange import exchange_sizes, widened


class AllGather:
    """All tokens to all ranks, partial sums back; for few ranks and small batches, where messages cost more than bytes.

    With b bytes a number, a rank sends ``(P - 1) * T_max * (D * b + K * (8 + 4))`` bytes of tokens, places and float32
    weights, T_max being the most tokens of any rank, and ``D * b`` bytes for every token of another rank as its partial
    sum; besides 16 bytes of sizes to every other rank.
    """

    def __init__(self, group: Group, num_local: int) -> None:
        self.group = group
        self.num_local = num_local

    def __call__(self, x_TD: Tensor, assignments: Assignments, run: ExpertFunction, wire: torch.dtype) -> Tensor:
        """See `moe_async.moe.dispatch.Dispatcher`."""
        tokens, dim = x_TD.shape
        own = torch.full((self.group.size,), tokens, device=x_TD.device)
        _, sizes, width = exchange_sizes(own, assignments.slots_TK.shape[-1], self.group)
        slots_TK = assignments.slots_TK
        if assignments.sent_TK is not None:
            slots_TK = torch.where(assignments.sent_TK, slots_TK, -1)
        slots_AK = self.group.all_gather_rows(widened(slots_TK, width, -1), sizes)
        x_AD = self.group.all_gather_rows(x_TD.to(wire), sizes)
        weights_AK = self.group.all_gather_rows(widened(assignments.weights_TK, width, 0), sizes)
        first = self.group.index * self.num_local
        here_AK = (slots_AK >= first) & (slots_AK < first + self.num_local)
        arrived = Assignments(torch.where(here_AK, slots_AK - first, 0), weights_AK, here_AK, assignments.weigh_input)
        partial_AD = run_here(x_AD, packed(arrived), run, wire, self.num_local, sizes)
        parts = self.group.all_to_all_rows(partial_AD.to(wire), sizes, [tokens] * self.group.size)
        return parts.view(self.group.size, tokens, dim).to(assignments.weights_TK.dtype).sum(dim=0)
