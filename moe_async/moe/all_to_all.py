"""Dispatch by all-to-all: each token's row goes to the ranks of its experts, and only there.

Shape letters: T tokens, K experts per token, P ranks in the expert group, L experts on each, S rows sent from here, R
rows received here, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_async.comm import Group
from moe_async.moe.dispatch import Assignments, ExpertFunction, lay_out, merge_weights, packed, run_here
from moe_async.moe.exchange import exchange_sizes, plan_exchange, return_rows, send_rows, widened
from moe_async.ops.permute import merge_rows, plan_rows, take_rows


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
        tokens, width = assignments.slots_TK.shape
        rank_TK = assignments.slots_TK.div(self.num_local, rounding_mode="floor")
        place_TK = assignments.slots_TK % self.num_local
        going_TK = torch.ones_like(rank_TK, dtype=torch.bool) if assignments.sent_TK is None else assignments.sent_TK
        needed_TP = torch.zeros(tokens, self.group.size, dtype=torch.int64, device=x_TD.device)
        needed_TP.scatter_reduce_(-1, rank_TK, going_TK.long(), "amax")
        rank_S, token_S = needed_TP.T.nonzero(as_tuple=True)
        send, receive, widest = exchange_sizes(needed_TP.sum(dim=0), width, self.group)
        sizes = send, receive
        # A token goes to at most K ranks; its journeys are numbered from 0, so that they fill K places and not P.
        journey_S = token_S * width + needed_TP.cumsum(dim=-1)[token_S, rank_S] - 1

        there_SK = going_TK[token_S] & (rank_TK[token_S] == rank_S[:, None])
        places_SK = torch.where(there_SK, place_TK[token_S], -1)
        x_RD = self.group.all_to_all_rows(take_rows(x_TD, journey_S, width, wire), *sizes)
        places_RK = self.group.all_to_all_rows(widened(places_SK, widest, -1), *sizes)
        weights_RK = self.group.all_to_all_rows(widened(assignments.weights_TK[token_S], widest, 0), *sizes)
        arrived = Assignments(places_RK.clamp(min=0), weights_RK, places_RK >= 0, assignments.weigh_input)
        merged_RD = run_here(x_RD, packed(arrived), run, wire, self.num_local, receive)
        back_SD = self.group.all_to_all_rows(merged_RD.to(wire), receive, send)
        return merge_rows(back_SD, journey_S, torch.ones_like(assignments.weights_TK))
