"""Collectives over a handed-in group of ranks; a group of one rank communicates nothing.

Shape letters: R rows sent or received, D model width.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_async.errors import CommunicationError

BUCKET_ELEMENTS = 2**24
"""Elements of one flat buffer in `all_reduce_many`. The layout of buckets decides the order of floating-point sums, so
it is fixed here and depends on shapes alone."""


class Meter:
    """What this process has spent on collectives; shared by the groups of one world.

    Attributes:
        seconds: inside blocking collectives on tensors; on an accelerator whose collectives run on a stream, the time
            to launch them.
        bytes_sent: to other ranks, in exchanges between the ranks of expert groups (all-to-alls, all-gathers).
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.bytes_sent = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the body."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


class Reduction:
    """Sums of tensors over a group, on their way since `Group.start_all_reduce_many`."""

    def __init__(
        self, buckets: Sequence[Sequence[Tensor]], flats: Sequence[Tensor], works: Sequence[Any], meter: Meter
    ):
        self._shapes = [[tensor.shape for tensor in bucket] for bucket in buckets]
        self._flats = flats
        self._works = works
        self._meter = meter

    def wait(self) -> list[Tensor]:
        """The sums, in the order and shapes of the tensors; every call gives the same ones. Blocks until they came."""
        for work in self._works:
            with self._meter.running():
                work.wait()
        self._works = ()
        return [
            part.view(shape)
            for flat, shapes in zip(self._flats, self._shapes, strict=True)
            for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True)
        ]


@dataclass(frozen=True)
class Group:
    """Some ranks that communicate with one another, seen from one of them.

    Attributes:
        ranks: global ranks, in the order of the group.
        index: position of this process in ``ranks``.
        handle: the process group; None for the one rank that talks to nobody.
        device: where the tensors lie that the group exchanges.
        meter: counts time and bytes.
    """

    ranks: tuple[int, ...] = (0,)
    index: int = 0
    handle: dist.ProcessGroup | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    meter: Meter = field(default_factory=Meter, compare=False)

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def __getstate__(self) -> dict[str, Any]:
        if self.handle is not None:
            raise TypeError(
                "a group of several ranks cannot be saved or sent to another process; save the state dict of the "
                "module instead of the module."
            )
        return dict(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        # A process group cannot be copied; a copied layer goes on talking to the same ranks.
        return self

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce ``tensor`` in place over the group (``sum``, ``min`` or ``max``) and return it. Every rank of the
        group calls it; blocks."""
        if self.size > 1:
            with self.meter.running():
                dist.all_reduce(tensor, op=_OPS[op], group=self.handle)
        return tensor

    def all_reduce_many(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors of one dtype in place over the group, through flat buffers. Every rank calls it; blocks."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors, BUCKET_ELEMENTS):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self.all_reduce(flat)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def start_all_reduce_many(self, tensors: Sequence[Tensor]) -> Reduction:
        """Begin to sum tensors of one dtype over the group, in the buckets of `all_reduce_many`. Does not block.

        The sums are new tensors; those given may change at once. Several reductions may be on their way; every rank
        of the group starts them in the same order. What else communicates meanwhile belongs into another group.
        """
        buckets = list(_buckets(tensors, BUCKET_ELEMENTS))
        flats = [torch.cat([tensor.reshape(-1) for tensor in bucket]) for bucket in buckets]
        works = [dist.all_reduce(flat, group=self.handle, async_op=True) for flat in flats] if self.size > 1 else []
        return Reduction(buckets, flats, works, self.meter)

    def broadcast_object(self, value: Any) -> Any:
        """The ``value`` that the group's first rank passes, on every rank. Every rank calls it; blocks.

        For small plain objects between the processes of one launch, which trust one another.
        """
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.ranks[0], group=self.handle)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, in group order, on every rank. Every rank calls it; blocks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values

    def barrier(self) -> None:
        """Wait until every rank of the group has come here."""
        self.all_reduce(torch.zeros(1, device=self.device))

    def all_to_all_equal(self, tensor: Tensor) -> Tensor:
        """Send row ``i`` of ``tensor`` [P, ...] to rank ``i`` and return what came, [P, ...]. No gradient."""
        if self.size == 1:
            return tensor
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        self.meter.bytes_sent += sent.nbytes // self.size * (self.size - 1)
        with self.meter.running():
            dist.all_to_all_single(received, sent, group=self.handle)
        return received

    def all_to_all_rows(self, rows_RD: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send ``send[i]`` consecutive rows to rank ``i`` and return the ``sum(receive)`` rows that come back in rank
        order; differentiable. Sizes must have been exchanged before: gloo aborts the process when they disagree."""
        if self.size == 1:
            return rows_RD
        if sum(send) != rows_RD.shape[0] or len(send) != self.size or len(receive) != self.size:
            raise CommunicationError(
                f"all_to_all_rows got {rows_RD.shape[0]} rows with send sizes {list(send)} and receive sizes "
                f"{list(receive)} in a group of {self.size}; each list needs one entry per rank and the send sizes "
                "must add up to the rows."
            )
        received: Tensor = _AllToAllRows.apply(  # type: ignore[no-untyped-call]
            rows_RD, list(send), list(receive), self
        )
        return received

    def all_gather_rows(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks, in rank order: [sum(sizes), ...]; differentiable. Every rank of the group calls it.

        Args:
            rows: this rank's rows.
            sizes: how many rows each rank has.
        """
        if self.size == 1:
            return rows
        if len(sizes) != self.size or sizes[self.index] != rows.shape[0]:
            raise CommunicationError(
                f"all_gather_rows got {rows.shape[0]} rows with sizes {list(sizes)} as rank {self.index} in a group of "
                f"{self.size}; there must be one size per rank, and that of this rank must be its rows."
            )
        gathered: Tensor = _AllGatherRows.apply(rows, list(sizes), self)  # type: ignore[no-untyped-call]
        return gathered


class _AllToAllRows(torch.autograd.Function):
    """Uneven all-to-all; its backward is the all-to-all of the gradients with the sizes exchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.sizes = (send, receive, group)
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        send, receive, group = ctx.sizes
        return _exchange(grads[0], receive, send, group), None, None, None


class _AllGatherRows(torch.autograd.Function):
    """Uneven all-gather; its backward brings every rank the sum of the gradients of its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        longest = max(sizes)
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        group.meter.bytes_sent += padded.nbytes * (group.size - 1)
        with group.meter.running():
            dist.all_gather(parts, padded, group=group.handle)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, own = ctx.group, ctx.sizes[ctx.group.index]
        parts = _exchange(grads[0], ctx.sizes, [own] * group.size, group).view(group.size, own, *grads[0].shape[1:])
        # The sum is made in float32 or wider, in rank order, and rounded once.
        wide = torch.promote_types(parts.dtype, torch.float32)
        return parts.to(wide).sum(dim=0).to(parts.dtype), None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    away = sum(send) - send[group.index]
    group.meter.bytes_sent += away * rows[:1].numel() * rows.element_size() if away else 0
    with group.meter.running():
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group.handle)
    return received


def _buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.numel() > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.numel()
    if bucket:
        yield bucket


_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
