"""Moving token rows into the order of experts and back.

A token that takes K experts has K *assignments*; assignment ``a`` belongs to token ``a // K``. Each kept assignment
becomes one row that travels.

Shape letters: T tokens, K experts per token, E experts in all, R rows (kept assignments), D model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class RowPlan(NamedTuple):
    """The order in which assignments are laid out as rows.

    Attributes:
        assignment_R: int64, the assignment in each row, sorted by slot, then by token position.
        rows_per_slot_E: int64, rows of each slot.
    """

    assignment_R: Tensor
    rows_per_slot_E: Tensor


def plan_rows(slots_TK: Tensor, num_slots: int, sent_TK: Tensor | None) -> RowPlan:
    """Sort the assignments that are sent by the slot that they go to.

    Args:
        slots_TK: int64, the slot of each assignment.
        num_slots: slots in all (E).
        sent_TK: bool, False for assignments that are not sent; None when all are.
    """
    flat = slots_TK.reshape(-1)
    if sent_TK is None:
        assignment_R = torch.argsort(flat, stable=True)
    else:
        sent = sent_TK.reshape(-1).nonzero().squeeze(-1)
        assignment_R = sent[torch.argsort(flat[sent], stable=True)]
    return RowPlan(assignment_R, torch.bincount(flat[assignment_R], minlength=num_slots))


def regroup_order(rows_PL: Tensor) -> Tensor:
    """Order that turns rows sorted by (source, expert) into rows sorted by (expert, source): int64 [R].

    Args:
        rows_PL: int64, rows that came from each of P sources for each of L experts here.
    """
    num_sources, num_local = rows_PL.shape
    expert = torch.arange(num_local, device=rows_PL.device).repeat(num_sources)
    return torch.argsort(expert.repeat_interleave(rows_PL.reshape(-1)), stable=True)


class _TakeRows(torch.autograd.Function):
    """Copies each assignment's token into its row, in the dtype of the wire.

    Its own backward because the gradients of a token's K rows must be summed in the token's dtype (the rows may be
    bfloat16), in an order that does not depend on the device.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, assignment_R: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(assignment_R)
        ctx.top_k, ctx.tokens, ctx.dtype = top_k, x_TD.shape[0], x_TD.dtype
        return x_TD.to(dtype).index_select(0, assignment_R.div(top_k, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (assignment_R,) = ctx.saved_tensors
        grad_RD = grads[0]
        spread = grad_RD.new_zeros(ctx.tokens * ctx.top_k, grad_RD.shape[-1], dtype=ctx.dtype)
        spread.index_copy_(0, assignment_R, grad_RD.to(ctx.dtype))
        return spread.view(ctx.tokens, ctx.top_k, grad_RD.shape[-1]).sum(dim=1), None, None, None


def take_rows(x_TD: Tensor, assignment_R: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """Lay out one row per kept assignment: [R, D] in ``dtype``. The gradient of a token is summed in its own dtype."""
    rows: Tensor = _TakeRows.apply(x_TD, assignment_R, top_k, dtype)  # type: ignore[no-untyped-call]
    return rows


def merge_rows(rows_RD: Tensor, assignment_R: Tensor, weights_TK: Tensor) -> Tensor:
    """Sum each token's rows times their weights, in the dtype of the weights (float32 or wider): [T, D].

    A token without rows (masked, or all its assignments dropped) gets zeros.

    Args:
        rows_RD: expert outputs, one row per kept assignment.
        assignment_R: the assignment in each row.
        weights_TK: factors, with gradient.
    """
    tokens, top_k = weights_TK.shape
    spread = rows_RD.new_zeros(tokens * top_k, rows_RD.shape[-1], dtype=weights_TK.dtype)
    spread = spread.index_copy(0, assignment_R, rows_RD.to(weights_TK.dtype))
    # A product and a sum: as an einsum this would be T tiny matrix products.
    return (spread.view(tokens, top_k, rows_RD.shape[-1]) * weights_TK[..., None]).sum(dim=1)
