"""One rank of each learner in one group: what learners add up among themselves, without a process in between.

The group is a gloo group of its own, on host memory, made through a store that the syncer hosts. A collective blocks
until all peers have entered it, and its time limit is for peers that are there: whoever calls it knows from elsewhere
that all are about to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from moe_async.comm.session import connect_store, first_line, gloo_options
from moe_async.errors import CommunicationError

PIECE_ELEMENTS = 2**22
"""Tensors are added up in pieces, and the time limit is that of a piece: on a slow link a large one takes longer. The
pieces decide the order of floating-point sums over three learners or more, so they are fixed here."""


class PeerGroup:
    """The peers, seen from one of them; every method is called by all of them, in the same order.

    Args:
        group: the gloo group.
        size: peers in it.
        timeout: seconds after which a collective fails in which nothing moves.

    Attributes:
        bytes: that a ring sends from one peer, and brings to it, for what was added up so far: 2 (n - 1) / n of it.
    """

    def __init__(self, group: Any, size: int, timeout: float) -> None:
        self._group: Any = group
        self.size = size
        self._timeout = timedelta(seconds=timeout)
        self.bytes = 0

    def add_up(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor on host memory over the peers, in place. Blocks.

        Raises:
            CommunicationError: a peer is gone or silent.
        """
        for piece in tensor.view(-1).split(PIECE_ELEMENTS) if tensor.numel() else ():
            self._wait(partial(self._group.allreduce, [piece]))
        self.bytes += 2 * tensor.nbytes * (self.size - 1) // self.size

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all peers, in their order. Blocks; for small values.

        Raises:
            CommunicationError: a peer is gone or silent, or what it sends is not JSON.
        """
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([text.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: text.numel()] = text
        texts = self._all_gather(padded)
        try:
            return [json.loads(entry[:size].numpy().tobytes()) for entry, size in zip(texts, sizes, strict=True)]
        except ValueError as error:
            raise CommunicationError(f"another learner sends what cannot be read ({first_line(error)}).") from error

    def _all_gather(self, tensor: Tensor) -> Sequence[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(partial(self._group.allgather, [found], [tensor]))
        return found

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait(self._timeout)
        except RuntimeError as error:
            raise CommunicationError(f"another learner is gone or silent ({first_line(error)})") from error


def meet_peers(host: str, port: int, name: str, index: int, size: int, timeout: float) -> PeerGroup:
    """Make the group. All peers call it, once; blocks until they have.

    Args:
        host, port: of the `moe_async.comm.session.Door` whose store they meet in.
        name: of the group.
        index, size: place of this peer, and how many there are.
        timeout: seconds after which a missing peer is an error, here and in collectives.

    Raises:
        CommunicationError: a peer does not come, or nobody listens.
    """
    store, address = connect_store(host, port, timeout)
    try:
        group = ProcessGroupGloo(PrefixStore(f"peers/{name}", store), index, size, gloo_options(address, timeout))
    except RuntimeError as error:
        raise CommunicationError(f"the learners did not find one another ({first_line(error)})") from error
    return PeerGroup(group, size, timeout)
