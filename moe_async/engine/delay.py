"""Delayed gradients: the mean over ranks of step t's dense gradients is applied at step t + D.

The reduction of a step runs while the next D steps compute. Until the first one is due the dense parameters have no
gradient, so an optimizer leaves their weights and moments alone. Experts are not concerned; their gradients are exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class Pending(Protocol):
    """A reduction on its way, such as `moe_async.comm.Reduction`."""

    def wait(self) -> list[Tensor]:
        """The sums, the same ones at every call. Blocks until they came."""


StartReduction = Callable[[Sequence[Tensor]], Pending]
"""Begins to sum tensors over ranks, and leaves those given to whoever gave them."""


class DelayedGradients:
    """A queue of gradients that are being reduced.

    Args:
        parameters: those whose gradients are late, by name; the same on every rank.
        delay: steps between `start` and the `take` that brings the same gradients back.
        ranks: over which the mean is.
        start_reduction: what reduces; may be replaced between steps, by one that is late for instance.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], delay: int, ranks: int, start_reduction: StartReduction
    ) -> None:
        self.delay = delay
        self.start_reduction = start_reduction
        self.parameters = dict(parameters)
        self._ranks = ranks
        self._flights: deque[_Flight] = deque()

    def __len__(self) -> int:
        """Steps whose gradients are in flight."""
        return len(self._flights)

    def start(self) -> None:
        """Take the parameters' local gradients away and begin to reduce them. Every rank calls it; does not block.

        A parameter without a gradient counts as zeros: another rank may have one, and the sums must match.
        """
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.values()]
        self._flights.append(_Flight(self.start_reduction(gradients), self._ranks))
        self._clear()

    def take(self, keep: int) -> bool:
        """Give the parameters the oldest gradients if more than ``keep`` are in flight, and none otherwise.

        Blocks until the reduction is done.
        """
        self._clear()
        if len(self._flights) <= keep:
            return False
        for parameter, mean in zip(self.parameters.values(), self._flights.popleft().means(), strict=True):
            parameter.grad = mean
        return True

    def state(self) -> list[dict[str, Tensor]]:
        """The gradients in flight by parameter name, newest first; they stay in flight. Blocks until they came.

        Any rank may ask alone; all have the same.
        """
        return [dict(zip(self.parameters, flight.means(), strict=True)) for flight in reversed(self._flights)]

    def load_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what `state` gave, on any number of ranks: means do not depend on it."""
        self._flights = deque(
            _Flight(_Arrived([means[name].to(p.device) for name, p in self.parameters.items()]), 1)
            for means in reversed(state)
        )

    def _clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


class _Flight:
    """One step's gradients, until they are applied."""

    def __init__(self, pending: Pending, ranks: int) -> None:
        self._pending = pending
        self._ranks = ranks
        self._means: list[Tensor] | None = None

    def means(self) -> list[Tensor]:
        """Their mean over ranks. Blocks at the first call."""
        if self._means is None:
            self._means = [total.div_(self._ranks) for total in self._pending.wait()]
        return self._means


class _Arrived:
    """A reduction that is done."""

    def __init__(self, means: Sequence[Tensor]) -> None:
        self._means = list(means)

    def wait(self) -> list[Tensor]:
        return self._means
