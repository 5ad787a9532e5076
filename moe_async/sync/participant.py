"""A learner without its surroundings: its policies, its views of the fragments, and its model.

Whoever drives it tells it what came and when a boundary between steps is; it says what to send and whether to wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe_async.sync.arithmetic import LocalView
from moe_async.sync.messages import Publication, UpdateHeader
from moe_async.sync.syncer import LearnerSync


@dataclass(frozen=True)
class LearnerStep:
    """What one step of a learner was.

    Attributes:
        dense_tokens: its label tokens.
        expert_tokens: its routed tokens by expert, as in `moe_async.sync.fragments.Unit.expert`.
        loss: its mean language-model loss.
    """

    dense_tokens: int
    expert_tokens: Mapping[str, int]
    loss: float


class LearnerModel(Protocol):
    """A model that a learner trains, fragment by fragment."""

    def step(self, number: int, position: float) -> LearnerStep:
        """Make the ``number``-th step (from 1): update the weights, or compute a gradient where those are sent.

        ``position`` is the place in the schedule of the run, in steps (from 0).
        """
        ...

    def read(self, fragment: int) -> Tensor:
        """The local value [X] of a fragment; not to be changed."""
        ...

    def write(self, fragment: int, value_X: Tensor) -> None:
        """Set the local value of a fragment."""
        ...

    def gradient(self, fragment: int) -> Tensor:
        """The gradient [X] of the last step, where those are sent; not to be changed later by the model."""
        ...


@dataclass(frozen=True)
class Taken:
    """A shared value that a learner took.

    Attributes:
        publication: what came.
        mix: how it was mixed with the local value, see `moe_async.sync.settings.PolicySettings.mix`.
        ages: data ages of the learner's own updates that it settles.
    """

    publication: Publication
    mix: float | None
    ages: Sequence[int]


class Participant:
    """One life of a learner.

    Args:
        sync: its policies.
        model: its model, with the shared values in it.
        unit_sizes: elements of each unit of each fragment, where the model holds parts of fragments; None: the whole.
    """

    def __init__(
        self, sync: LearnerSync, model: LearnerModel, unit_sizes: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.sync = sync
        self.model = model
        sizes = unit_sizes or {number: fragment.unit_sizes for number, fragment in sync.fragments.items()}
        # A gradient is measured from nothing.
        seen = sync.fragments if sync.contribution == "delta" else ()
        self.views = {number: LocalView(model.read(number), sizes[number]) for number in seen}
        self._values: dict[tuple[int, int], Tensor] = {}

    def step(self) -> LearnerStep:
        """Make a step."""
        step = self.model.step(self.sync.clock + 1, self.sync.position())
        self.sync.step_done(step.dense_tokens, step.expert_tokens, step.loss)
        return step

    def receive(self, publication: Publication, value_X: Tensor) -> None:
        """A shared value has come; it is taken at a boundary."""
        self._values[publication.fragment, publication.version] = value_X
        self.sync.receive([publication])

    def take(self, adopt: bool = False) -> list[Taken]:
        """Take what may be taken at this boundary; with ``adopt`` instead of the local values, as a newcomer does."""
        before = {number: self._ages(number) for number in self.sync.fragments}
        taken = []
        for entry in self.sync.takes(adopt):
            mix = 0.0 if adopt else self.sync.mix(entry.fragment)
            self._write(entry, mix)
            ages = [age for sequence, age in before[entry.fragment] if sequence <= entry.settled]
            before[entry.fragment] = [flight for flight in before[entry.fragment] if flight[0] > entry.settled]
            taken.append(Taken(entry, mix, ages))
        kept = self.sync.inbox()
        self._values = {key: value for key, value in self._values.items() if key in kept}
        return taken

    def _ages(self, fragment: int) -> list[tuple[int, int]]:
        return [(sequence, self.sync.clock - sent) for sequence, sent in self.sync.flights(fragment)]

    def _write(self, entry: Publication, mix: float | None) -> None:
        value_X = self._values[entry.fragment, entry.version]
        if self.sync.contribution == "grad":
            self.model.write(entry.fragment, value_X)
        else:
            local_X = self.model.read(entry.fragment)
            view = self.views[entry.fragment]
            self.model.write(entry.fragment, view.take(local_X, value_X, entry.settled, mix))

    def contribute(self, last: bool = False) -> list[tuple[UpdateHeader, Tensor]]:
        """Updates [X] that are to be sent at this boundary; with ``last`` all that has not been sent yet."""
        headers = self.sync.last_updates() if last else self.sync.due_updates()
        return [(header, self._contribution(header)) for header in headers]

    def tensors(self) -> dict[str, Tensor]:
        """Everything besides the model and the state of ``sync`` that later calls depend on, by name."""
        views = {
            f"view/{number}/{name}": tensor
            for number, view in self.views.items()
            for name, tensor in view.tensors().items()
        }
        return views | {f"inbox/{fragment}/{version}": value for (fragment, version), value in self._values.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        for number, view in self.views.items():
            prefix = f"view/{number}/"
            view.load_tensors(
                {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            )
        self._values = {}
        for name, tensor in tensors.items():
            if name.startswith("inbox/"):
                _, fragment, version = name.split("/")
                self._values[int(fragment), int(version)] = tensor.clone()

    def _contribution(self, header: UpdateHeader) -> Tensor:
        fragment = header.id.fragment
        if self.sync.contribution == "grad":
            return self.model.gradient(fragment)
        return self.views[fragment].contribute(self.model.read(fragment), header.id.sequence, header.tokens)
