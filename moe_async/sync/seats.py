"""Who takes part in a run, as the syncer sees it: learners, the connections of their ranks, and parts of updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_async.comm.connection import Connection
from moe_async.comm.session import Header
from moe_async.sync.fragments import Fragment
from moe_async.sync.messages import UpdateHeader, UpdateId
from moe_async.sync.shares import lengths, pick, share
from moe_async.topology import Topology


@dataclass
class Seat:
    """One life of a learner at the syncer.

    Attributes:
        learner, incarnation: who.
        topology: of its ranks.
        clock: its steps when it comes back after its connection was lost; None: it begins.
        connections: of its ranks, by rank.
        parts: of updates that have not come from all ranks yet.
        early: parts of updates that came before the learner takes part: rank, header and payload.
        ready: it has loaded its text and built its model.
        joined: it takes part.
        paused: it leaves in order to come back.
        finished: ranks that have sent all they had.
        left: ranks that have said goodbye.
    """

    learner: int
    incarnation: int
    topology: Topology
    clock: int | None = None
    connections: dict[int, Connection] = field(default_factory=dict)
    parts: dict[UpdateId, dict[int, Tensor]] = field(default_factory=dict)
    early: list[tuple[int, Header, Tensor]] = field(default_factory=list)
    ready: bool = False
    joined: bool = False
    paused: bool = False
    finished: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether all ranks are connected and want to begin."""
        return self.ready and len(self.connections) == self.topology.world_size

    def missing(self) -> set[int]:
        """Ranks that are not connected."""
        return set(range(self.topology.world_size)) - self.connections.keys()

    def send(self, header: Mapping[str, Any]) -> None:
        """Send a message to every rank."""
        for connection in self.connections.values():
            connection.send(header)

    def send_value(self, header: Mapping[str, Any], fragment: Fragment, value_X: Tensor) -> None:
        """Send every rank its part of a shared value."""
        for rank, connection in self.connections.items():
            connection.send(header, pick(value_X, share(fragment, self.topology, rank)))

    def gather(self, header: UpdateHeader, rank: int, part: Tensor, fragment: Fragment) -> Tensor | None:
        """Put a rank's part of an update to those of the others; the whole [X] once all are there.

        Raises:
            ValueError: the part has another size than this rank's share of the units that saw tokens.
        """
        slices = live_share(fragment, self.topology, rank, header.tokens)
        if part.numel() != sum(lengths(slices)):
            raise ValueError(
                f"rank {rank} of learner {self.learner} sent {part.numel()} elements of fragment {fragment.number}, "
                f"but its share has {sum(lengths(slices))}"
            )
        parts = self.parts.setdefault(header.id, {})
        parts[rank] = part
        if len(parts) < self.topology.world_size:
            return None
        whole_X = torch.zeros(fragment.elements, dtype=part.dtype)
        for owner, values in self.parts.pop(header.id).items():
            slices = live_share(fragment, self.topology, owner, header.tokens)
            for target, value in zip(slices, values.split(lengths(slices)), strict=True):
                whole_X[target] = value
        return whole_X

    def close(self, wait: bool = True) -> None:
        """End all connections; see `Connection.close`."""
        for connection in self.connections.values():
            connection.close(wait)


def live_share(fragment: Fragment, topology: Topology, rank: int, tokens: Sequence[int]) -> list[slice]:
    """A rank's share of the units that saw tokens: what it sends of an update."""
    slices = share(fragment, topology, rank)
    return [part for part, count in zip(slices, tokens, strict=True) if count]
