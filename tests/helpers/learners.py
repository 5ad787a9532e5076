"""Small problems for the tests of synchronisation: vectors with made-up gradients, under the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from moe_async.sync.event_log import EventLog
from moe_async.sync.fragments import Fragment, Key, Unit
from moe_async.sync.participant import LearnerStep
from moe_async.sync.settings import PolicyPlan, PolicySettings
from moe_async.sync.syncer import SyncGroup
from moe_async.sync.timing import Failure, Link, Links, StepTimes
from moe_async.sync.virtual_clock import VirtualRun
from tests.helpers.reference_sync import Problem, Trace

SIZE = 12
"""Elements of the parameter vector."""


def gradient(learner: int, n: int, theta: Tensor) -> Tensor:
    """A gradient that is not linear, and another one for every learner and step."""
    draw = torch.Generator().manual_seed(1000 * learner + n)
    target = torch.randn(theta.shape, generator=draw, dtype=theta.dtype) + 0.3 * learner
    return torch.tanh(theta - target) + 0.1 * theta


def problem(
    learners: int = 3,
    steps: int = 24,
    seconds: Sequence[float] = (1.0, 1.37, 2.91, 0.77),
    up: Sequence[float] = (0.11, 0.07, 0.23, 0.05),
    down: Sequence[float] = (0.13, 0.19, 0.03, 0.29),
    lr: float = 0.1,
    momentum: float = 0.6,
    tokens: Callable[[int, int], int] = lambda learner, n: 10 + 3 * learner + n % 4,
    unit_tokens: Callable[[int, int], list[int]] = lambda learner, n: [],
) -> Problem:
    """Learners of unequal speed whose events never coincide."""
    return Problem(
        learners=learners,
        steps=steps,
        initial=torch.randn(SIZE, generator=torch.Generator().manual_seed(7), dtype=torch.float64),
        gradient=gradient,
        compute=lambda learner, n: seconds[learner] * (1 + 0.013 * ((7 * n + 3 * learner) % 11)),
        up=lambda learner: up[learner],
        down=lambda learner: down[learner],
        lr=lr,
        momentum=momentum,
        tokens=tokens,
        unit_tokens=unit_tokens,
    )


def slices(count: int, size: int = SIZE) -> list[slice]:
    """Slices of unequal length that cover a vector."""
    cuts = [round(size * (place / count) ** 1.2) for place in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(cuts)]


def group(
    plan: PolicySettings | PolicyPlan, pieces: Sequence[slice], units: Mapping[int, Sequence[slice]] | None = None
) -> SyncGroup:
    """A group whose fragments are slices of a vector; those in ``units`` consist of experts ``e0``, ``e1`` ..."""
    fragments, expert = [], 0
    for number, piece in enumerate(pieces):
        parts = []
        for part in (units or {}).get(number, ()):
            name = f"e{expert}"
            parts.append(Unit(name, (Key(name, part.stop - part.start, name),)))
            expert += 1
        whole = Unit("", (Key(f"piece {number}", piece.stop - piece.start),))
        fragments.append(Fragment(number, tuple(parts) or (whole,)))
    return SyncGroup("all", plan if isinstance(plan, PolicyPlan) else PolicyPlan((plan,)), tuple(fragments))


@dataclass
class VectorModel:
    """A vector under SGD with momentum, or, where gradients are sent, one that only computes them."""

    problem: Problem
    learner: int
    pieces: Sequence[slice]
    sends_gradients: bool
    theta: Tensor = field(init=False)
    velocity: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.theta = self.problem.initial.clone()
        self.velocity = torch.zeros_like(self.theta)
        self.last = torch.zeros_like(self.theta)

    def step(self, number: int, position: float) -> LearnerStep:
        self.last = self.problem.gradient(self.learner, number, self.theta.clone())
        if not self.sends_gradients:
            self.velocity = self.problem.momentum * self.velocity + self.last
            self.theta = self.theta - self.problem.lr * self.velocity
        experts = {f"e{e}": count for e, count in enumerate(self.problem.unit_tokens(self.learner, number))}
        return LearnerStep(self.problem.tokens(self.learner, number), experts, float(self.last.square().mean()))

    def read(self, fragment: int) -> Tensor:
        return self.theta[self.pieces[fragment]].clone()

    def write(self, fragment: int, value_X: Tensor) -> None:
        self.theta[self.pieces[fragment]] = value_X

    def gradient(self, fragment: int) -> Tensor:
        return self.last[self.pieces[fragment]].clone()


@dataclass
class Noted(Trace):
    """What the reference notes, when each version was made, the shared vector after each merge, and the models."""

    merged: dict[tuple[int, int], float] = field(default_factory=dict)
    path: list[Tensor] = field(default_factory=list)
    models: dict[tuple[int, int], VectorModel] = field(default_factory=dict)


def virtual(
    problem: Problem,
    plan: PolicySettings | PolicyPlan,
    pieces: Sequence[slice] | None = None,
    units: Mapping[int, Sequence[slice]] | None = None,
    failures: Sequence[Failure] = (),
    observe: Callable[[float, int, object], None] | None = None,
    kind: type[VectorModel] = VectorModel,
    **options,
) -> tuple[VirtualRun, Noted]:
    """Run a problem under the virtual clock and note what the reference notes."""
    run, trace = prepared(problem, plan, pieces, units, failures, observe, kind, **options)
    run.run()
    trace.ended = {learner: trace.models[learner, life].theta.clone() for learner, life in sorted(trace.models)}
    return run, trace


def prepared(
    problem: Problem,
    plan: PolicySettings | PolicyPlan,
    pieces: Sequence[slice] | None = None,
    units: Mapping[int, Sequence[slice]] | None = None,
    failures: Sequence[Failure] = (),
    observe: Callable[[float, int, object], None] | None = None,
    kind: type[VectorModel] = VectorModel,
    **options,
) -> tuple[VirtualRun, Noted]:
    """A run that is about to begin; ``options`` are those of `VirtualRun`."""
    pieces = pieces or [slice(0, len(problem.initial))]
    groups = [group(plan, pieces, units)]
    sends = groups[0].plan.phases[0].contribution == "grad"
    trace = Noted()

    def make_model(learner: int, incarnation: int, clock: int) -> VectorModel:
        trace.models[learner, incarnation] = kind(problem, learner, pieces, sends)
        return trace.models[learner, incarnation]

    def watch(time: float, learner: int, participant) -> None:
        trace.started[learner, participant.sync.clock + 1] = (time, participant.model.theta.clone())
        if observe is not None:
            observe(time, learner, participant)

    run = VirtualRun(
        groups,
        make_model,
        problem.learners,
        steps=problem.steps,
        times=StepTimes(given={
            learner: [problem.compute(learner, n) for n in range(1, problem.steps + 1)]
            for learner in range(problem.learners)
        }),
        links=Links(
            ups={learner: Link(latency=problem.up(learner)) for learner in range(problem.learners)},
            downs={learner: Link(latency=problem.down(learner)) for learner in range(problem.learners)},
        ),
        failures=failures,
        observe=watch,
        **{"log": EventLog(), **options},
    )  # fmt: skip
    note_versions(run, trace)
    return run, trace


def note_versions(run: VirtualRun, trace: Noted) -> None:
    """Copy every version of every fragment as it is made."""
    for number, shared in run.merger.values.items():
        trace.shared[number, 0] = shared.value_X.clone()
        merge = shared.merge

        def noting(*args, number=number, shared=shared, merge=merge, **kwargs):
            merge(*args, **kwargs)
            version = 1 + max(version for fragment, version in trace.shared if fragment == number)
            trace.shared[number, version] = shared.value_X.clone()
            trace.merged[number, version] = run.now
            trace.path.append(torch.cat([run.merger.values[n].value_X for n in sorted(run.merger.values)]))

        shared.merge = noting
