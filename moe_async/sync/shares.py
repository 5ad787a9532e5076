"""Which part of a fragment each rank of a learner exchanges: every element once, over the ranks that hold it.

A rank exchanges its own experts, and an equal part of the dense layers: so the link to the syncer carries every element
once per learner. Integers and slices only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_async.sync.fragments import Fragment
from moe_async.topology import Topology


def owners(fragment: Fragment, topology: Topology) -> list[tuple[int, ...]]:
    """For each unit the ranks that hold it, in the order in which they share it."""
    everyone = tuple(range(topology.world_size))
    return [topology.owners(unit.expert_id) if unit.expert else everyone for unit in fragment.units]


def share(fragment: Fragment, topology: Topology, rank: int) -> list[slice]:
    """The part of each unit that a rank exchanges, as a slice of the fragment's flat vector; empty for most experts."""
    slices, start = [], 0
    for unit, ranks in zip(fragment.units, owners(fragment, topology), strict=True):
        a = b = 0
        if rank in ranks:
            place = ranks.index(rank)
            a, b = (unit.elements * edge // len(ranks) for edge in (place, place + 1))
        slices.append(slice(start + a, start + b))
        start += unit.elements
    return slices


def lengths(slices: Sequence[slice]) -> list[int]:
    """Elements of each slice."""
    return [part.stop - part.start for part in slices]


def pick(flat_X: Tensor, slices: Sequence[slice]) -> Tensor:
    """A new vector of the slices of another, one behind the other."""
    return torch.cat([flat_X[part] for part in slices])


def put(flat_X: Tensor, slices: Sequence[slice], part_Y: Tensor) -> None:
    """Write the parts of a vector to their slices of another; the inverse of `pick`."""
    for part, values in zip(slices, part_Y.split(lengths(slices)), strict=True):
        flat_X[part] = values
