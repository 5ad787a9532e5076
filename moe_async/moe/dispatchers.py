"""The dispatchers by name, and the simplest of them.

Shape letters: T tokens, D model width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_async.comm import Group
from moe_async.errors import TopologyError
from moe_async.moe.all_gather import AllGather
from moe_async.moe.all_to_all import AllToAll, DeduplicatedAllToAll
from moe_async.moe.dispatch import Assignments, Dispatcher, ExpertFunction, run_here

DispatchKind = Literal["auto", "local", "all_to_all", "all_gather"]


class Local:
    """All experts are here; nothing travels."""

    def __init__(self, group: Group, num_local: int) -> None:
        self.group = group
        self.num_local = num_local

    def __call__(self, x_TD: Tensor, assignments: Assignments, run: ExpertFunction, wire: torch.dtype) -> Tensor:
        """See `Dispatcher`."""
        return run_here(x_TD, assignments, run, wire, self.num_local, [x_TD.shape[0]])


def make_dispatcher(kind: DispatchKind, deduplicate: bool, group: Group, num_local: int) -> Dispatcher:
    """The dispatcher of an expert group.

    Args:
        kind: ``auto`` is ``local`` for a group of one and ``all_to_all`` for others; a group of one is always local.
        deduplicate: with ``all_to_all``, a token with several experts on one rank travels there once.
        group: the expert group.
        num_local: experts on each rank.

    Raises:
        TopologyError: ``local`` for a group of several ranks.
    """
    if group.size == 1:
        return Local(group, num_local)
    if kind == "local":
        raise TopologyError(
            f"the dispatcher is local but the expert group has {group.size} ranks, so most experts are elsewhere. Use "
            "dispatcher: auto, or expert-parallel size 1."
        )
    if kind == "all_gather":
        return AllGather(group, num_local)
    return (DeduplicatedAllToAll if deduplicate else AllToAll)(group, num_local)
