"""A recipe trained by several learners under the virtual clock: one policy, measured at a time and at the end.

The run ends as a launch does, once the learners have made ``train.steps`` steps on average and all of it is merged, and
is looked at twice: at a given time, and at its end. A run that ends before that time is made again without an end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING

import torch

from moe_async.comm import World
from moe_async.engine.simulated import SharedModel, SimulatedLearner, StubLearner, stub_groups
from moe_async.engine.sync_plan import outer_schedule, sync_groups
from moe_async.errors import SyncError
from moe_async.model.build import make_transformer
from moe_async.sync.event_log import EventLog
from moe_async.sync.participant import LearnerModel, Participant
from moe_async.sync.syncer import SyncGroup
from moe_async.sync.timing import Links, StepTimes, random_failures
from moe_async.sync.virtual_clock import VirtualRun
from moe_async.topology import Topology

if TYPE_CHECKING:
    from moe_async.data import Corpus
    from moe_async.recipe import Recipe


@dataclass(frozen=True)
class Machine:
    """What a run is simulated on.

    Attributes:
        times, links: of its learners.
        failure_rate: of each learner that is there, a second.
        downtime: seconds from a failure until the learner asks to join again.
        noticed: seconds until the syncer counts it out.
        seed: of the failures.
    """

    times: StepTimes = field(default_factory=StepTimes)
    links: Links = field(default_factory=Links)
    failure_rate: float = 0.0
    downtime: float = 60.0
    noticed: float = 1.0
    seed: int = 0

    def pace(self, learner: int) -> float:
        """Steps a second that a learner makes when nothing disturbs it; it may be a slow one all the time."""
        if given := self.times.given.get(learner):
            return 1 / mean(given)
        return 1 / (self.times.seconds * self.times.factors.get(learner, 1.0))


@dataclass(frozen=True)
class Measure:
    """A run at one moment.

    Attributes:
        seconds: virtual time.
        steps: made by a learner, on average.
        tokens: label tokens that all learners have computed on.
        loss: held-out bits per byte of the shared values; None for stand-ins.
        tokens_per_second: over all learners.
        utilisation: share of the time of all learners that went into steps that were finished.
        goodput: steps whose contribution is merged, over those that the learners make when nothing ever disturbs them.
        lost: steps whose contribution died with its learner.
        up, down: bytes on the link of a learner in each direction, on average.
        staleness: median, 95th percentile and maximum of each kind, over all learners.
        discards: updates that were not merged.
    """

    seconds: float
    steps: float
    tokens: int
    loss: float | None
    tokens_per_second: float
    utilisation: float
    goodput: float
    lost: int
    up: float
    down: float
    staleness: Mapping[str, Mapping[str, float] | None]
    discards: int


@dataclass(frozen=True)
class Outcome:
    """A run's figures at the given time and at its end, and its course as (seconds, tokens, loss)."""

    at_time: Measure
    at_tokens: Measure
    course: Sequence[tuple[float, int, float]]


class Simulation:
    """Runs of one recipe with one policy.

    Args:
        recipe: with ``sync.between`` and ``sync.learners``.
        machine: what it runs on.
        corpus: the text; None: stand-ins in place of models, and no loss.
        points: how often the held-out loss is looked at on the way.
        progress: called with the share of the run that is done.

    Raises:
        SyncError: the recipe says nothing of several learners.
    """

    def __init__(
        self,
        recipe: Recipe,
        machine: Machine,
        corpus: Corpus | None = None,
        points: int = 0,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        if recipe.sync.between is None:
            raise SyncError("sync.between is null, so learners share nothing. Add a policy for each class to it.")
        self.recipe, self.machine = recipe, machine
        self.learners, self.steps = recipe.sync.learners, recipe.train.steps
        self.sends_gradients = recipe.sync.between.sends_gradients
        self._corpus, self._points, self._progress = corpus, points if corpus else 0, progress
        with torch.device("meta"):
            world = World(Topology(num_experts=recipe.moe.num_experts if recipe.moe else 1))
            model = make_transformer(recipe, world)
        groups = sync_groups(recipe, model)
        self._groups: list[SyncGroup] = groups
        self._unit_bytes: dict[int, list[int]] | None = None
        if corpus is None:
            size = 8 if recipe.train.precision == "float64" else 4
            self._groups, self._unit_bytes = stub_groups(groups, size)
        self._fragments = [fragment for group in self._groups for fragment in group.fragments]
        self._shared: SharedModel | None = None
        self._run: VirtualRun | None = None
        self._course: list[tuple[float, int, float]] = []

    def run(self, seconds: float) -> Outcome:
        """Run, and measure after that time and at the end."""
        self._run = None
        if self._corpus is not None and self._shared is None:
            self._shared = SharedModel(self.recipe, self._corpus, self._fragments)
        self._course = [(0.0, 0, self._loss())] if self._points else []
        run = self._run = self._start(float(self.steps), seconds, watched=True)
        run.run(seconds, only_work=True)
        if not run.finished:
            at_time = self._measure()
            run.run(only_work=True)
            return self._outcome(at_time, self._measure())
        at_tokens = at_time = self._measure()
        # Times are sums of steps, which round.
        if run.now < seconds * (1 - 1e-9):
            self._run = self._start(math.inf, seconds, watched=False)
            self._run.run(seconds)
            at_time = self._measure()
        return self._outcome(at_time, at_tokens)

    def _outcome(self, at_time: Measure, at_tokens: Measure) -> Outcome:
        if self._points and at_tokens.loss is not None:
            self._course.append((at_tokens.seconds, at_tokens.tokens, at_tokens.loss))
        return Outcome(at_time, at_tokens, self._course)

    def _start(self, steps: float, seconds: float, watched: bool) -> VirtualRun:
        machine = self.machine
        slowest = min(machine.pace(learner) for learner in range(self.learners))
        horizon = 10 * max(seconds, self.steps / slowest)
        failures = random_failures(
            self.learners, machine.failure_rate, horizon, machine.downtime, machine.noticed, machine.seed
        )
        return VirtualRun(
            self._groups,
            self._make_learner,
            self.learners,
            times=machine.times,
            links=machine.links,
            failures=failures,
            log=EventLog(keep=False),
            schedule=outer_schedule(self.recipe),
            until_progress=steps,
            observe=self._watcher() if watched else None,
            flush=True,
            unit_bytes=self._unit_bytes,
        )

    def _make_learner(self, learner: int, incarnation: int, clock: int) -> LearnerModel:
        if self._corpus is None:
            tokens = self.recipe.train.global_batch * self.recipe.data.seq_len
            return StubLearner([fragment.number for fragment in self._fragments], tokens)
        return SimulatedLearner(
            self.recipe, self._corpus, self._fragments, learner, self.learners, self.sends_gradients, clock
        )

    def _watcher(self) -> Callable[[float, int, Participant], None]:
        """Notes progress, and the held-out loss whenever another part of the tokens is used up."""
        step_tokens = self.recipe.train.global_batch * self.recipe.data.seq_len
        total, begun, looked = self.learners * self.steps, 0, 0

        def watch(time: float, learner: int, participant: Participant) -> None:
            nonlocal begun, looked
            # Steps begun are steps done but for one of each learner at most.
            done = max(begun - self.learners + 1, 0)
            begun += 1
            if self._progress is not None:
                self._progress(min(done / total, 1.0))
            if self._points and done * self._points >= (looked + 1) * total:
                looked += 1
                self._course.append((time, done * step_tokens, self._loss()))

        return watch

    def _loss(self) -> float:
        """Held-out bits per byte of the shared values now."""
        assert self._shared is not None
        values = {} if self._run is None else self._run.merger.values
        return self._shared.bits_per_byte({number: shared.value_X for number, shared in values.items()})

    def _measure(self) -> Measure:
        run = self._run
        assert run is not None
        figures = run.figures.values()
        learners, now = self.learners, run.now
        steps, tokens = sum(one.steps for one in figures), sum(one.tokens for one in figures)
        undisturbed = now * sum(self.machine.pace(learner) for learner in range(learners))
        staleness = run.merger.staleness
        merged = staleness.merged_steps() / len(self._fragments)
        return Measure(
            seconds=now,
            steps=steps / learners,
            tokens=tokens,
            loss=None if self._shared is None else self._loss(),
            tokens_per_second=tokens / now if now else 0.0,
            utilisation=sum(one.busy for one in figures) / (learners * now) if now else 0.0,
            goodput=merged / undisturbed if now else 0.0,
            lost=sum(one.lost_steps for one in figures),
            up=mean(one.sent for one in figures),
            down=mean(one.received for one in figures),
            staleness=staleness.overall(),
            discards=sum(staleness.discards.values()),
        )
