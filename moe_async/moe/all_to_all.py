"""Dispatch by all-to-all: each token's row goes to the ranks of its experts, and only there.

Shape letters: T tokens, K experts per token, P ranks in the expert group, L experts on each, S rows sent from here, R
rows received here, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_async.comm import Group
from moe_async.moe.dispatch import Assignments, ExpertFunction, lay_out, merge_weights, run_here
from moe_async.moe.exchange import exchange_sizes, plan_exchange, return_rows, send_rows, widened
from moe_async.ops.permute import merge_rows, plan_rows


class AllToAll:
    """One row per assignment there and one back; the sender merges.

    With b bytes a number, a rank sends ``S_away * D * b`` bytes of rows and as many results for what it receives, and
    the same in the backward pass; besides ``8 * L`` bytes of sizes to every other rank.
    """

    def __init__(self, group: Group, num_local: int) -> None:
        self.group = group
        self.num_slots = group.size * num_local

    def __call__(self, x_TD: Tensor, assignments: Assignments, run: ExpertFunction, wire: torch.dtype) -> Tensor:
        """See `moe_async.moe.dispatch.Dispatcher`."""
        plan = plan_rows(assignments.slots_TK, self.num_slots, assignments.sent_TK)
        exchange = plan_exchange(plan.rows_per_slot_E, self.group)
        sent_SD = lay_out(x_TD, plan.assignment_R, assignments, wire)
        here_RD = send_rows(sent_SD, exchange, self.group)
        back_SD = return_rows(run(here_RD, exchange.rows_PL), exchange, self.group)
        return merge_rows(back_SD, plan.assignment_R, merge_weights(assignments))


class DeduplicatedAllToAll:
    """One row per token and rank there, with the places and weights of its experts, and one sum back.

    The sum over the experts of a rank is made there, in the dtype of the weights, and rounded once to the dtype of the
    wire. With b bytes a number a rank sends ``S_away * D * b`` bytes of tokens, S being pairs of token and rank, and as
    many sums for what it receives; besides ``K * (8 + 4)`` bytes a row for places and float32 weights, and 16 bytes
    of sizes to every other rank.
    """

    def __init__(self, group: Group, num_local: int) -> None:
        self.group = group
        self.num_local = num_local

    def __call__(self, x_TD: Tensor, assignments: Assignments, run: ExpertFunction, wire: torch.dtype) -> Tensor:
        """See `moe_async.moe.dispatch.Dispatcher`."""
        ranks, tokens = self.group.size, x_TD.shape[0]
        rank_TK = assignments.slots_TK.div(self.num_local, rounding_mode="floor")
        place_TK = assignments.slots_TK % self.num_local
        going_TK = torch.ones_like(rank_TK, dtype=torch.bool) if assignments.sent_TK is None else assignments.sent_TK
        needed_TP = torch.zeros(tokens, ranks, dtype=torch.int64, device=x_TD.device)
        needed_TP.scatter_reduce_(-1, rank_TK, going_TK.long(), "amax")
        rank_S, token_S = needed_TP.T.nonzero(as_tuple=True)
        send, receive, width = exchange_sizes(needed_TP.sum(dim=0), rank_TK.shape[-1], self.group)
        sizes = send, receive

        there_SK = going_TK[token_S] & (rank_TK[token_S] == rank_S[:, None])
        places_SK = torch.where(there_SK, place_TK[token_S], -1)
        x_RD = self.group.all_to_all_rows(x_TD.to(wire)[token_S], *sizes)
        places_RK = self.group.all_to_all_rows(widened(places_SK, width, -1), *sizes)
        weights_RK = self.group.all_to_all_rows(widened(assignments.weights_TK[token_S], width, 0), *sizes)
        arrived = Assignments(places_RK.clamp(min=0), weights_RK, places_RK >= 0, assignments.weigh_input)
        merged_RD = run_here(x_RD, arrived, run, wire, self.num_local, sizes[1])
        back_SD = self.group.all_to_all_rows(merged_RD.to(wire), sizes[1], sizes[0])
        return merge_rows(back_SD, token_S * ranks + rank_S, assignments.weights_TK.new_ones(tokens, ranks))
