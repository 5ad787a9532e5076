"""Fragments: the parts of a model that are exchanged, each at its own turn.

A fragment is a list of units, a unit a list of keys (a parameter's name, with the global expert id behind an expert's).
All dense and router keys of a fragment are one unit, because the same tokens trained them; each expert is a unit of its
own, because tokens choose it. A fragment travels as one flat vector: its units in order, the keys of each in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_async.errors import SyncError


@dataclass(frozen=True)
class Key:
    """A tensor that is exchanged as a whole.

    Attributes:
        name: of the parameter or buffer, with ``.<expert id>`` behind an expert's.
        elements: in it.
        expert: the expert it belongs to, such as ``layers.0.moe.experts.5``; empty for dense layers and routers.
        expert_id: the global id of that expert in its layer; -1 without one.
    """

    name: str
    elements: int
    expert: str = ""
    expert_id: int = -1


@dataclass(frozen=True)
class Unit:
    """Keys whose contributions get one weight; ``expert`` is empty for those of dense layers and routers."""

    expert: str
    keys: tuple[Key, ...]

    @property
    def expert_id(self) -> int:
        """The global id of the expert in its layer; -1 for dense layers and routers."""
        return self.keys[0].expert_id

    @property
    def elements(self) -> int:
        """In all keys together."""
        return sum(key.elements for key in self.keys)


@dataclass(frozen=True)
class Fragment:
    """What is exchanged at one time.

    Attributes:
        number: unique in the run.
        units: in the order in which they travel.
    """

    number: int
    units: tuple[Unit, ...]

    @property
    def keys(self) -> tuple[Key, ...]:
        """All keys, in the order in which they travel."""
        return tuple(key for unit in self.units for key in unit.keys)

    @property
    def unit_sizes(self) -> list[int]:
        """Elements of each unit."""
        return [unit.elements for unit in self.units]

    @property
    def elements(self) -> int:
        """In all units together."""
        return sum(self.unit_sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new vector [X] of the tensors of all keys."""
        return torch.cat([tensors[key.name].detach().reshape(-1) for key in self.keys])

    def split(self, flat_X: Tensor) -> dict[str, Tensor]:
        """Views of a vector [X], by key; each is flat."""
        sizes = [key.elements for key in self.keys]
        return dict(zip((key.name for key in self.keys), flat_X.split(sizes), strict=True))


def cut(keys: Sequence[Key], count: int, first_number: int = 0) -> tuple[Fragment, ...]:
    """Cut keys into ``count`` fragments of as equal a size as whole tensors (and whole experts) allow.

    The largest part goes first, always into the smallest fragment so far; inside one the order of ``keys`` stays.

    Raises:
        SyncError: there are fewer parts than fragments.
    """
    parts: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        parts.setdefault(key.expert or f"key {place}", []).append(place)
    if not 1 <= count <= len(parts):
        raise SyncError(
            f"{count} fragments were asked for, but there are {len(parts)} tensors and experts to share among them; "
            f"use 1 to {len(parts)} fragments."
        )
    bins: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    for places in sorted(parts.values(), key=lambda places: (-sum(keys[p].elements for p in places), places[0])):
        smallest = sizes.index(min(sizes))
        bins[smallest].extend(places)
        sizes[smallest] += sum(keys[p].elements for p in places)
    return tuple(
        Fragment(first_number + number, _units([keys[place] for place in sorted(places)]))
        for number, places in enumerate(bins)
    )


def _units(keys: Sequence[Key]) -> tuple[Unit, ...]:
    owners: dict[str, list[Key]] = {}
    for key in keys:
        owners.setdefault(key.expert, []).append(key)
    # Sorting is stable: the dense unit comes first, experts follow in the order of their keys.
    return tuple(Unit(expert, tuple(owned)) for expert, owned in sorted(owners.items(), key=lambda item: item[0] != ""))
