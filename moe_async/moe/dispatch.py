"""From tokens to experts and back: plan, send, experts, return, merge.

Shape letters: T tokens, K experts per token, S rows sent from here, D model width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moe_async.comm import Group
from moe_async.moe.exchange import plan_exchange, return_rows, send_rows
from moe_async.moe.experts import Experts
from moe_async.ops.permute import merge_rows, plan_rows, take_rows
from moe_async.ops.routing import Selection


class Dispatcher(Protocol):
    """Brings every live token to its experts and the weighted sum of their outputs back.

    Attributes:
        group: the expert group that it talks in.
    """

    group: Group

    def __call__(self, x_TD: Tensor, selection: Selection, experts: Experts, live_T: Tensor | None) -> Tensor:
        """The merged expert outputs, [T, D] in the dtype of the weights; zeros for tokens that are not live."""
        ...


class DroplessDispatcher:
    """Every assignment travels; nothing is dropped or padded.

    One rank is the base case: with a group of one the same code runs and communicates nothing. Every rank of the
    group makes the same number of calls, also with no tokens of its own.

    Args:
        group: the expert group.
        slots: the slot of each expert, `Topology.slots`.
    """

    def __init__(self, group: Group, slots: tuple[int, ...]) -> None:
        self.group = group
        self.num_slots = len(slots)
        self._slots = None if slots == tuple(range(len(slots))) else slots

    def __call__(self, x_TD: Tensor, selection: Selection, experts: Experts, live_T: Tensor | None) -> Tensor:
        """See `Dispatcher`."""
        top_k = selection.experts_TK.shape[-1]
        rows = plan_rows(self._to_slots(selection.experts_TK), self.num_slots, live_T)
        exchange = plan_exchange(rows.rows_per_slot_E, self.group)
        sent_SD = take_rows(x_TD, rows.assignment_R, top_k, experts.row_dtype)
        here = send_rows(sent_SD, exchange, self.group)
        done = experts(here, exchange.rows_per_expert)
        back_SD = return_rows(done, exchange, self.group)
        return merge_rows(back_SD, rows.assignment_R, selection.weights_TK)

    def _to_slots(self, experts_TK: Tensor) -> Tensor:
        if self._slots is None:
            return experts_TK
        return torch.tensor(self._slots, device=experts_TK.device)[experts_TK]
