"""A run under a virtual clock: real policies, real or stand-in models, given times, one process.

Events happen in the order of their time. At equal times updates arrive first (by learner and fragment), then timers run
out, then publications arrive, then steps end; so a run follows from its arguments alone, to the last bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from moe_async.errors import SyncError
from moe_async.sync.event_log import EventLog
from moe_async.sync.figures import LearnerFigures
from moe_async.sync.merger import Merger, Outgoing, Schedule, constant
from moe_async.sync.messages import Publication, UpdateHeader, Welcome
from moe_async.sync.participant import LearnerModel, Participant
from moe_async.sync.syncer import LearnerSync, SyncGroup
from moe_async.sync.timing import Failure, Link, Links, StepTimes

_ARRIVAL, _TIMER, _DELIVERY, _STEP_END, _FAULT = range(5)

MakeModel = Callable[[int, int, int], LearnerModel]
"""Makes the model of a learner: its number, its incarnation and the number of steps at which it begins. Its values are
those of version 0; a later joiner's are overwritten."""


@dataclass
class _Life:
    """A learner as the clock drives it."""

    number: int
    incarnation: int
    participant: Participant | None = None
    waiting: str = ""
    since: float = 0.0
    done: bool = False
    unsent_steps: int = 0
    awaited: set[int] = field(default_factory=set)
    early: list[Outgoing] = field(default_factory=list)
    clock: int = 0


class VirtualRun:
    """A run of several learners and a syncer.

    Args:
        groups: what is exchanged under which policy.
        make_model: makes each learner's model.
        learners: how many there are at the beginning.
        steps: each learner stops after that many steps; None: never by itself.
        times, links, failures: the machine.
        log: the event log.
        schedule: of the outer learning rate.
        until_progress: a learner stops once the mean number of steps, as it knows it, has come to this; None: never.
        observe: called with the time, the learner and its participant whenever a learner starts a step.
        flush: whether a learner sends what it has not sent yet when it stops.
        unit_bytes: bytes of each unit of each fragment on a link, where models stand for larger ones; None: their own.
    """

    def __init__(
        self,
        groups: Sequence[SyncGroup],
        make_model: MakeModel,
        learners: int,
        steps: int | None = None,
        times: StepTimes | None = None,
        links: Links | None = None,
        failures: Sequence[Failure] = (),
        log: EventLog | None = None,
        schedule: Schedule = constant,
        until_progress: float | None = None,
        observe: Callable[[float, int, Participant], None] | None = None,
        flush: bool = False,
        unit_bytes: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        if steps is None and until_progress is None:
            raise SyncError("a virtual run needs an end: give steps or until_progress.")
        self.groups = tuple(groups)
        self.log = log or EventLog()
        self.now = 0.0
        self.steps = steps
        self.figures = {learner: LearnerFigures() for learner in range(learners)}
        self._make_model = make_model
        self._until = until_progress
        self._times, self._links = times or StepTimes(), links or Links()
        self._observe, self._flush = observe, flush
        self._queue: list[tuple[float, int, int, int, int, Callable[[], None]]] = []
        self._count = 0
        self._free: dict[tuple[int, bool], float] = {}
        self._timers: set[float] = set()
        self._lives: dict[int, _Life] = {}
        models = {learner: make_model(learner, 0, 0) for learner in range(learners)}
        fragments = [fragment for group in groups for fragment in group.fragments]
        initial = {fragment.number: models[0].read(fragment.number) for fragment in fragments}
        self._unit_bytes = unit_bytes or {
            fragment.number: [size * initial[fragment.number].element_size() for size in fragment.unit_sizes]
            for fragment in fragments
        }
        self.merger = Merger(groups, initial, learners, self.log, schedule)
        for failure in failures:
            self._at(failure.at, _FAULT, failure.learner, 0, partial(self._fail, failure))
        for learner in range(learners):
            self.merger.join(learner, 0, 0.0)
            life = _Life(learner, 0, Participant(LearnerSync(groups, learner), models[learner]))
            self._lives[learner] = life
        for life in list(self._lives.values()):
            self._start_step(life)

    def run(self, until: float | None = None, only_work: bool = False) -> None:
        """Let time pass until nothing happens any more, or to a time (seconds).

        With ``only_work`` it ends once `finished`, whatever failures are still to come.

        Raises:
            SyncError: learners wait for something that cannot come.
        """
        while self._queue and (until is None or self._queue[0][0] <= until):
            self.now, *_, action = heapq.heappop(self._queue)
            action()
            if only_work and self.finished:
                return
        if until is not None:
            self.now = max(self.now, until)
        lives = self._lives.values()
        stuck = [life.number for life in lives if life.participant is None or life.waiting not in ("", "end")]
        if until is None and stuck:
            raise SyncError(f"learners {stuck} wait for what never comes; the policy and the learners do not fit.")

    @property
    def finished(self) -> bool:
        """Whether no member makes a further step, and all that they sent is merged."""
        return self.merger.syncer.finished and not self.merger.syncer.pending()

    def participant(self, learner: int) -> Participant | None:
        """A learner's current life; None while it is away."""
        life = self._lives.get(learner)
        return life.participant if life else None

    def _at(self, time: float, kind: int, learner: int, fragment: int, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, kind, learner, fragment, self._count, action))

    # A learner's course: a step, its boundary, perhaps waiting, the next step.

    def _start_step(self, life: _Life) -> None:
        participant = life.participant
        assert participant is not None
        sync = participant.sync
        over = self.steps is not None and sync.clock >= self.steps
        if over or (self._until is not None and sync.position() >= self._until):
            self._stop(life)
            return
        if self._observe is not None:
            self._observe(self.now, life.number, participant)
        seconds = self._times.of(life.number, sync.clock + 1)
        self._at(self.now + seconds, _STEP_END, life.number, 0, lambda: self._end_step(life, seconds))

    def _end_step(self, life: _Life, seconds: float) -> None:
        if self._lives.get(life.number) is not life:
            return
        assert life.participant is not None
        step = life.participant.step()
        figures = self.figures[life.number]
        figures.steps += 1
        figures.tokens += step.dense_tokens
        figures.busy += seconds
        life.unsent_steps += 1
        self._boundary(life, "before sending")

    def _boundary(self, life: _Life, stage: str) -> None:
        """Go through the boundary between two steps, from a stage on, until something has to be waited for."""
        participant = life.participant
        assert participant is not None
        self._take(life)
        if participant.sync.must_wait():
            self._wait(life, stage)
            return
        if stage == "before sending":
            self._send(life, participant.contribute())
            self._boundary(life, "after sending")
            return
        self._start_step(life)

    def _wait(self, life: _Life, stage: str) -> None:
        if not life.waiting:
            life.since = self.now
        life.waiting = stage

    def _stop(self, life: _Life) -> None:
        """A learner makes no further step."""
        participant = life.participant
        assert participant is not None
        life.waiting = "end"
        clock = participant.sync.clock
        if self._flush:
            self._send(life, participant.contribute(last=True))
        self.log.end(life.number, life.incarnation, clock, self.now)
        delay = self._links.to_syncer(life.number)
        arrives = self._passage(life.number, True, delay, 0)
        self._at(arrives, _ARRIVAL, life.number, 1 << 30, lambda: self._finish(life))

    def _finish(self, life: _Life) -> None:
        if self._lives.get(life.number) is life:
            life.done = True
            self._pass_on(self.merger.finish(life.number, self.now))

    def _take(self, life: _Life, adopt: bool = False) -> None:
        assert life.participant is not None
        for taken in life.participant.take(adopt):
            self.log.take(taken.publication, taken.mix, life.participant.sync.clock, self.now)
            for age in taken.ages:
                self.merger.staleness.add_age(life.number, age)

    # Messages.

    def _send(self, life: _Life, updates: Sequence[tuple[UpdateHeader, Tensor]]) -> None:
        figures = self.figures[life.number]
        for header, payload_X in updates:
            self.log.send(header, self.now)
            size = self._bytes(header)
            figures.sent += size
            figures.rounds += 1
            life.unsent_steps = 0
            arrives = self._passage(life.number, True, self._links.to_syncer(life.number), size)
            self._at(arrives, _ARRIVAL, life.number, header.id.fragment, partial(self._arrive, header, payload_X))

    def _arrive(self, header: UpdateHeader, payload_X: Tensor) -> None:
        self._pass_on(self.merger.arrive(header, payload_X, self.now))

    def _bytes(self, header: UpdateHeader) -> int:
        """Units without tokens do not travel."""
        sizes = self._unit_bytes[header.id.fragment]
        return self._links.header_bytes + sum(size for size, n in zip(sizes, header.tokens, strict=True) if n)

    def _passage(self, learner: int, up: bool, link: Link, size: int) -> float:
        """When a message that is handed to a link now arrives."""
        start = max(self.now, self._free.get((learner, up), 0.0))
        free = start + size / link.bandwidth
        self._free[learner, up] = free
        return free + link.latency

    def _pass_on(self, outgoing: Sequence[Outgoing]) -> None:
        """Send what the syncer decided, and see to its next timer."""
        for entry in outgoing:
            learner = entry.message.learner
            fragment = entry.message.fragment if isinstance(entry.message, Publication) else -1
            size = self._links.header_bytes + sum(self._unit_bytes.get(fragment, ()))
            arrives = self._passage(learner, False, self._links.to_learner(learner), size)
            self._at(arrives, _DELIVERY, learner, fragment, partial(self._deliver, entry, size))
        due = self.merger.syncer.due()
        if due is not None and due not in self._timers:
            self._timers.add(due)
            self._at(due, _TIMER, 0, 0, lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        self._timers.discard(due)
        self._pass_on(self.merger.tick(self.now))

    def _deliver(self, entry: Outgoing, size: int) -> None:
        message = entry.message
        life = self._lives.get(message.learner)
        if life is None or life.incarnation != message.incarnation:
            return
        self.figures[life.number].received += size
        if isinstance(message, Welcome):
            life.clock = message.clock
            return
        if life.participant is None:
            life.early.append(entry)
            life.awaited.discard(message.fragment)
            if not life.awaited:
                self._begin(life)
            return
        assert entry.value_X is not None
        life.participant.receive(message, entry.value_X)
        if life.waiting and life.waiting != "end":
            stage, life.waiting = life.waiting, ""
            before = life.since
            self._boundary(life, stage)
            if life.waiting and life.waiting != "end":
                life.since = before
            else:
                self.figures[life.number].waited += self.now - before

    # Failures.

    def _fail(self, failure: Failure) -> None:
        life = self._lives.pop(failure.learner, None)
        if life is None:
            return
        if life.participant is not None:
            self.log.end(life.number, life.incarnation, life.participant.sync.clock, self.now)
        self.figures[failure.learner].lost_steps += life.unsent_steps
        gone = self.now

        def leave() -> None:
            if failure.learner not in self._lives:
                self._pass_on(self.merger.leave(failure.learner, self.now))

        def back() -> None:
            self.figures[failure.learner].away += self.now - gone
            self._join(failure.learner, life.incarnation + 1)

        link = self._links.to_syncer(failure.learner)
        drained = self._free.get((failure.learner, True), 0.0) + link.latency
        self._at(max(self.now + failure.noticed, drained), _FAULT, failure.learner, 0, leave)
        if failure.back is not None:
            self._at(max(self.now + failure.back, drained), _FAULT, failure.learner, 1, back)

    def _join(self, learner: int, incarnation: int) -> None:
        fragments = {fragment.number for group in self.groups for fragment in group.fragments}
        self._lives[learner] = _Life(learner, incarnation, awaited=fragments, since=self.now)
        self._pass_on(self.merger.join(learner, incarnation, self.now))

    def _begin(self, life: _Life) -> None:
        """A newcomer has all shared values."""
        model = self._make_model(life.number, life.incarnation, life.clock)
        sync = LearnerSync(self.groups, life.number, life.incarnation, life.clock)
        life.participant = Participant(sync, model)
        for entry in life.early:
            assert isinstance(entry.message, Publication) and entry.value_X is not None
            life.participant.receive(entry.message, entry.value_X)
        life.early = []
        self._take(life, adopt=True)
        self._start_step(life)

    def summary(self) -> Mapping[int, dict[str, Any]]:
        """Of each learner, what summary.json says of it."""
        staleness = self.merger.staleness
        return {
            learner: figures.summary(self.now, staleness.summary(learner), staleness.discards[learner])
            for learner, figures in self.figures.items()
        }
