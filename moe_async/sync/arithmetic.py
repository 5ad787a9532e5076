"""What decisions do to tensors: the shared values at the syncer, and a learner's own view of one fragment.

Shape letter: X elements of a fragment, or of the part of it that one rank holds. Everything here works element by
element, so that parts of a fragment may be kept apart and give the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_async.ops.outer import outer_step
from moe_async.sync.segments import Segment


class SharedValue:
    """The shared value of one fragment, with the state of its outer optimizers.

    Args:
        value_X: version 0; taken over, not copied.
        unit_sizes: elements of each unit, in order.
        phases: the segments of each policy, in turn, all cut at the same places; their states go over from one to the
            next as they are.
    """

    def __init__(self, value_X: Tensor, unit_sizes: Sequence[int], phases: Sequence[Sequence[Segment]]) -> None:
        self.value_X = value_X
        self.unit_sizes = list(unit_sizes)
        self.phases = tuple(tuple(segments) for segments in phases)
        self.segment_sizes = [segment.elements for segment in self.phases[0]]
        self.outer_states: list[dict[str, Tensor]] = [{} for _ in self.segment_sizes]

    @torch.no_grad()
    def merge(
        self,
        contributions: Sequence[Tensor],
        weights: Sequence[Sequence[float]],
        lr_factor: float = 1.0,
        phase: int = 0,
        portion: float = 1.0,
    ) -> None:
        """Add up contributions [X], each unit with its factor, and move the value by the sum as ``phase`` says.

        A unit without any factor has no contribution in its direction; momentum and weight decay still move it.
        ``portion`` is that of `moe_async.ops.outer.outer_step`.
        """
        self.move(self.direction(contributions, weights), lr_factor, phase, portion)

    @torch.no_grad()
    def direction(self, contributions: Sequence[Tensor], weights: Sequence[Sequence[float]]) -> Tensor:
        """The sum [X] of contributions, each unit with its factor; zero where there is none."""
        direction_X = torch.zeros_like(self.value_X)
        for contribution_X, factors in zip(contributions, weights, strict=True):
            for sum_, part, factor in zip(
                direction_X.split(self.unit_sizes), contribution_X.split(self.unit_sizes), factors, strict=True
            ):
                if factor:
                    sum_.add_(part, alpha=factor)
        return direction_X

    def move(self, direction_X: Tensor, lr_factor: float = 1.0, phase: int = 0, portion: float = 1.0) -> None:
        """Move the value by what was added up, as ``phase`` says; arguments as in `merge`."""
        for segment, value, direction, state in zip(
            self.phases[phase],
            self.value_X.split(self.segment_sizes),
            direction_X.split(self.segment_sizes),
            self.outer_states,
            strict=True,
        ):
            outer_step(segment.outer, value, direction, state, lr_factor, portion)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a later merge depends on, by name."""
        states = {
            f"outer/{place}/{name}": tensor
            for place, state in enumerate(self.outer_states)
            for name, tensor in state.items()
        }
        return {"value": self.value_X, **states}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        self.value_X = tensors["value"].clone()
        self.outer_states = [{} for _ in self.segment_sizes]
        for full_name, tensor in tensors.items():
            if full_name != "value":
                _, place, name = full_name.split("/")
                self.outer_states[int(place)][name] = tensor.clone()


class LocalView:
    """A fragment on its learner: from where the next contribution is measured, and what is under way.

    ``anchor`` is the shared value taken last plus what was sent since and is not settled, so ``anchor - local`` is what
    has been learnt and not sent.

    Args:
        value_X: the local value, which is the shared one at the beginning.
        unit_sizes: elements of each unit.
    """

    def __init__(self, value_X: Tensor, unit_sizes: Sequence[int]) -> None:
        self.anchor_X = value_X.clone()
        self.unit_sizes = list(unit_sizes)
        self.in_flight: list[tuple[int, Tensor]] = []

    @torch.no_grad()
    def contribute(self, local_X: Tensor, sequence: int, tokens: Sequence[int]) -> Tensor:
        """The pseudo-gradient [X] since the last one; zero in units that saw no token, which keep theirs."""
        delta_X = self.anchor_X - local_X
        for part, count in zip(delta_X.split(self.unit_sizes), tokens, strict=True):
            if not count:
                part.zero_()
        for anchor, local, count in zip(
            self.anchor_X.split(self.unit_sizes), local_X.split(self.unit_sizes), tokens, strict=True
        ):
            if count:
                anchor.copy_(local)
        self.in_flight.append((sequence, delta_X))
        return delta_X

    @torch.no_grad()
    def take(self, local_X: Tensor, shared_X: Tensor, settled: int, mix: float | None) -> Tensor:
        """The local value [X] after taking a shared one; see `PolicySettings.mix`."""
        self.in_flight = [entry for entry in self.in_flight if entry[0] > settled]
        if mix is not None:
            self.anchor_X = shared_X.clone()
            return shared_X.clone() if mix == 0 else mix * local_X + (1 - mix) * shared_X
        anchor_X = shared_X.clone()
        for _, delta_X in self.in_flight:
            anchor_X -= delta_X
        local_X = anchor_X + (local_X - self.anchor_X)
        self.anchor_X = anchor_X
        return local_X

    def tensors(self) -> dict[str, Tensor]:
        """Everything that later calls depend on, by name."""
        flights = {f"in_flight/{sequence}": delta_X for sequence, delta_X in self.in_flight}
        return {"anchor": self.anchor_X, **flights}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        self.anchor_X = tensors["anchor"].clone()
        flights = {int(name.rpartition("/")[2]): tensor for name, tensor in tensors.items() if name != "anchor"}
        self.in_flight = [(sequence, flights[sequence].clone()) for sequence in sorted(flights)]
