"""Carrying rows between the ranks of an expert group: sizes first, then rows, then the results back.

With one rank the rows stay where they are; everything else is the same.

Shape letters: P ranks in the expert group, L experts on each, S rows sent from here, R rows received here, D model
width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_async.comm import Group
from moe_async.ops.permute import regroup_order


@dataclass(frozen=True)
class ExchangePlan:
    """Who sends how many rows to whom, and the order in which experts here want what arrives.

    Attributes:
        send: rows to each of the P ranks.
        receive: rows from each of the P ranks.
        rows_PL: rows from each of the P ranks for each of the L experts here.
        order_R: int64, turns rows sorted by (source, expert) into rows sorted by expert.
        inverse_R: int64, the way back.
    """

    send: list[int]
    receive: list[int]
    rows_PL: list[list[int]]
    order_R: Tensor
    inverse_R: Tensor


def plan_exchange(rows_per_slot: Tensor, group: Group) -> ExchangePlan:
    """Tell every rank of ``group`` how many rows come to each of its experts.

    Every rank of the group calls it; blocks, and reads the sizes back to the host.

    Args:
        rows_per_slot: int64 [P * L], rows from here to each slot.
        group: the expert group.
    """
    send_PL = rows_per_slot.view(group.size, -1)
    receive_PL = group.all_to_all_equal(send_PL)
    order_R = regroup_order(receive_PL)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return ExchangePlan(
        send=send_PL.sum(1).tolist(),
        receive=receive_PL.sum(1).tolist(),
        rows_PL=receive_PL.tolist(),
        order_R=order_R,
        inverse_R=inverse_R,
    )


def send_rows(rows_SD: Tensor, plan: ExchangePlan, group: Group) -> Tensor:
    """Carry rows to the ranks of their experts: [R, D] sorted by expert. Every rank of the group calls it."""
    return group.all_to_all_rows(rows_SD, plan.send, plan.receive).index_select(0, plan.order_R)


def return_rows(rows_RD: Tensor, plan: ExchangePlan, group: Group) -> Tensor:
    """Carry results back to where their rows came from, in the order sent: [S, D]. Every rank of the group calls it."""
    return group.all_to_all_rows(rows_RD.index_select(0, plan.inverse_R), plan.receive, plan.send)


def exchange_sizes(send_P: Tensor, width: int, group: Group) -> tuple[list[int], list[int], int]:
    """Rows that go to and come from each rank, and the widest rank's number of places for experts in a row.

    Every rank of the group calls it; blocks, and reads the sizes back to the host. Ranks differ in width when experts
    choose tokens.

    Args:
        send_P: int64, rows to each rank.
        width: K of this rank.
        group: the expert group.
    """
    both_P2 = group.all_to_all_equal(torch.stack([send_P, torch.full_like(send_P, width)], dim=-1))
    return send_P.tolist(), both_P2[:, 0].tolist(), int(both_P2[:, 1].max())


def widened(values_SK: Tensor, width: int, fill: int) -> Tensor:
    """``values_SK`` with places of ``fill`` behind, up to ``width`` of them."""
    return functional.pad(values_SK, (0, width - values_SK.shape[-1]), value=fill)
