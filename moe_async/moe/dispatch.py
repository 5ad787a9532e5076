"""From tokens to experts and back: the seam behind which tokens travel.

A dispatcher is one class with one method. Another way to travel (hierarchical, in chunks, over a kernel library) is one
more class in a file of its own, and an entry in `moe_async.moe.dispatchers`.

Shape letters: T tokens, K experts per token, R rows, P sources of rows, L experts on this rank, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_async.comm import Group
from moe_async.ops.permute import merge_rows, plan_rows, take_rows


class Assignments(NamedTuple):
    """Which rows travel, and what weighs them.

    Attributes:
        slots_TK: int64, where each assignment's expert lives: rank of the group times L plus place there.
        weights_TK: factors, with gradient, float32 or wider.
        sent_TK: bool, False for what does not travel (masked, dropped, not taken); None when all does.
        weigh_input: the weights multiply what goes into experts instead of what comes out.
    """

    slots_TK: Tensor
    weights_TK: Tensor
    sent_TK: Tensor | None = None
    weigh_input: bool = False


class ExpertFunction(Protocol):
    """Runs the experts of this rank: rows [R, D], sorted by expert, then by source, to outputs in the same order.

    ``rows_PL`` counts them by source and expert.
    """

    def __call__(self, rows_RD: Tensor, rows_PL: Sequence[Sequence[int]]) -> Tensor:
        """The outputs, [R, D] in the dtype of the rows."""
        ...


class Dispatcher(Protocol):
    """Brings every sent assignment's token to its expert and the weighted sum of the outputs back.

    Attributes:
        group: the expert group that it talks in.
    """

    group: Group

    def __call__(self, x_TD: Tensor, assignments: Assignments, run: ExpertFunction, wire: torch.dtype) -> Tensor:
        """The merged expert outputs, [T, D] in the dtype of the weights; zeros for tokens that send nothing.

        Every rank of the group calls it equally often, also with no tokens of its own; blocks.

        Args:
            x_TD: tokens.
            assignments: where they go.
            run: the experts here.
            wire: dtype in which rows travel.
        """
        ...


def run_here(
    x_TD: Tensor,
    assignments: Assignments,
    run: ExpertFunction,
    row_dtype: torch.dtype,
    num_local: int,
    tokens_per_source: Sequence[int],
) -> Tensor:
    """Run the experts of this rank over tokens that are here, and merge: [T, D] in the dtype of the weights.

    Args:
        x_TD: tokens, sorted by source.
        assignments: their slots count from 0 to L - 1 here.
        run: the experts.
        row_dtype: dtype of the rows.
        num_local: L.
        tokens_per_source: how many of the tokens come from each source.
    """
    plan = plan_rows(assignments.slots_TK, num_local, assignments.sent_TK)
    rows_RD = lay_out(x_TD, plan.assignment_R, assignments, row_dtype)
    if len(tokens_per_source) == 1:
        rows_PL = [plan.rows_per_slot_E.tolist()]
    else:
        rows_PL = _rows_by_source(plan.assignment_R, assignments.slots_TK, num_local, tokens_per_source)
    return merge_rows(run(rows_RD, rows_PL), plan.assignment_R, merge_weights(assignments))


def packed(assignments: Assignments) -> Assignments:
    """The same with the sent assignments of each token in front, and no more places than the fullest token needs.

    Where most experts are on other ranks, what is merged here shrinks by as much. Reads that width back to the host.
    """
    if assignments.sent_TK is None or assignments.sent_TK.shape[0] == 0:
        return assignments
    width = max(1, int(assignments.sent_TK.sum(dim=-1).max()))
    order_TK = torch.sort(assignments.sent_TK, dim=-1, descending=True, stable=True).indices[:, :width]
    return assignments._replace(
        slots_TK=assignments.slots_TK.gather(-1, order_TK),
        weights_TK=assignments.weights_TK.gather(-1, order_TK),
        sent_TK=assignments.sent_TK.gather(-1, order_TK),
    )


def lay_out(x_TD: Tensor, assignment_R: Tensor, assignments: Assignments, dtype: torch.dtype) -> Tensor:
    """The rows of assignments, [R, D] in ``dtype``, weighted where the weights multiply the input."""
    top_k = assignments.slots_TK.shape[-1]
    if not assignments.weigh_input:
        return take_rows(x_TD, assignment_R, top_k, dtype)
    wide = torch.promote_types(x_TD.dtype, assignments.weights_TK.dtype)
    rows_RD = take_rows(x_TD.to(wide), assignment_R, top_k, wide)
    return (rows_RD * assignments.weights_TK.reshape(-1)[assignment_R, None]).to(dtype)


def merge_weights(assignments: Assignments) -> Tensor:
    """The factors of the outputs: 1 where the weights multiply the input."""
    if assignments.weigh_input:
        return torch.ones_like(assignments.weights_TK)
    return assignments.weights_TK


def _rows_by_source(
    assignment_R: Tensor, slots_TK: Tensor, num_local: int, tokens_per_source: Sequence[int]
) -> list[list[int]]:
    sizes = torch.tensor(list(tokens_per_source), device=slots_TK.device)
    source_T = torch.arange(len(sizes), device=slots_TK.device).repeat_interleave(sizes)
    source_R = source_T[assignment_R.div(slots_TK.shape[-1], rounding_mode="floor")]
    places_R = source_R * num_local + slots_TK.reshape(-1)[assignment_R]
    counts = torch.bincount(places_R, minlength=len(sizes) * num_local).view(-1, num_local)
    rows: list[list[int]] = counts.tolist()
    return rows
