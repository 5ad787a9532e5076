"""Doing a run again from its event log: no policy is asked and no clock is read, only the arithmetic is done.

The parameters that come out are those of the run, bit for bit, as long as the learners' steps are deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_async.errors import SyncError
from moe_async.sync.arithmetic import LocalView
from moe_async.sync.event_log import Entry, read_merge
from moe_async.sync.fragments import Fragment
from moe_async.sync.learner_policy import Position
from moe_async.sync.merger import Schedule, constant, merge, shared_values
from moe_async.sync.messages import UpdateId
from moe_async.sync.participant import LearnerModel
from moe_async.sync.syncer import SyncGroup
from moe_async.sync.syncer_policy import read_header
from moe_async.sync.virtual_clock import MakeModel


@dataclass
class _Life:
    model: LearnerModel
    views: dict[int, LocalView]
    clock: int
    position: Position


class Replay:
    """Carries out an event log.

    Args:
        groups: those of the run.
        make_model: as in the run.
        entries: the log.
        schedule: of the outer learning rate, as in the run.
    """

    def __init__(
        self,
        groups: Sequence[SyncGroup],
        make_model: MakeModel,
        entries: Sequence[Entry],
        schedule: Schedule = constant,
    ) -> None:
        self._groups = tuple(groups)
        self._fragments: dict[int, Fragment] = {f.number: f for group in groups for f in group.fragments}
        self._grad = self._groups[0].plan.phases[0].contribution == "grad"
        self._make_model, self._schedule = make_model, schedule
        first = make_model(0, 0, 0)
        self.shared = shared_values(groups, {number: first.read(number) for number in self._fragments})
        self.lives: dict[tuple[int, int], _Life] = {}
        self._payloads: dict[UpdateId, Tensor] = {}
        # A version is kept only as long as somebody takes it later.
        self._wanted: Counter[tuple[int, int]] = Counter(
            (entry["fragment"], entry["version"]) for entry in entries if entry["event"] == "take"
        )
        self._versions: dict[tuple[int, int], Tensor] = {}
        for number in self._fragments:
            self._keep(number, 0)
        for entry in entries:
            getattr(self, f"_{entry['event']}", self._nothing)(entry)

    def local(self, learner: int, incarnation: int = 0) -> Mapping[int, Tensor]:
        """The local value of every fragment at the end of a life."""
        life = self.lives[learner, incarnation]
        return {number: life.model.read(number) for number in self._fragments}

    def _nothing(self, entry: Entry) -> None:
        """Entries that change no tensor."""

    def _welcome(self, entry: Entry) -> None:
        model = self._make_model(entry["learner"], entry["incarnation"], entry["clock"])
        views = {n: LocalView(model.read(n), f.unit_sizes) for n, f in self._fragments.items()}
        position = Position(float(entry["clock"]), entry["clock"])
        self.lives[entry["learner"], entry["incarnation"]] = _Life(model, views, entry["clock"], position)

    def _advance(self, life: _Life, clock: int) -> None:
        while life.clock < clock:
            position = life.position.at(life.clock)
            life.clock += 1
            life.model.step(life.clock, position)

    def _send(self, entry: Entry) -> None:
        header = read_header(entry["header"])
        life = self.lives[header.id.learner, header.id.incarnation]
        self._advance(life, header.clock)
        fragment = header.id.fragment
        if self._grad:
            self._payloads[header.id] = life.model.gradient(fragment)
        else:
            local_X = life.model.read(fragment)
            self._payloads[header.id] = life.views[fragment].contribute(local_X, header.id.sequence, header.tokens)

    def _take(self, entry: Entry) -> None:
        life, fragment = self.lives[entry["learner"], entry["incarnation"]], entry["fragment"]
        self._advance(life, entry["clock"])
        value_X = self._version(fragment, entry["version"])
        life.position.hear(entry["progress"], entry["seen"])
        if self._grad:
            life.model.write(fragment, value_X)
        else:
            view, local_X = life.views[fragment], life.model.read(fragment)
            life.model.write(fragment, view.take(local_X, value_X, entry["settled"], entry["mix"]))

    def _merge(self, entry: Entry) -> None:
        decision = read_merge(entry)
        merge(self.shared, decision, self._payloads, self._schedule)
        self._keep(decision.fragment, decision.version)

    def _end(self, entry: Entry) -> None:
        self._advance(self.lives[entry["learner"], entry["incarnation"]], entry["clock"])

    def _keep(self, fragment: int, version: int) -> None:
        if self._wanted[fragment, version]:
            self._versions[fragment, version] = self.shared[fragment].value_X.clone()

    def _version(self, fragment: int, version: int) -> Tensor:
        if (fragment, version) not in self._versions:
            raise SyncError(
                f"the event log says that version {version} of fragment {fragment} was taken before it was made; it is "
                "incomplete or its order was changed."
            )
        value_X = self._versions[fragment, version]
        self._wanted[fragment, version] -= 1
        if not self._wanted[fragment, version]:
            del self._versions[fragment, version]
        return value_X
