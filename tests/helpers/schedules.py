"""Random schedules for property tests: unequal learners, links that may be instant, ties, failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from moe_async.ops.outer import Outer
from moe_async.sync import presets
from moe_async.sync.settings import PolicyPlan, PolicySettings, SwitchWhen
from moe_async.sync.timing import Failure, random_failures
from tests.helpers.learners import problem, slices
from tests.helpers.reference_sync import Problem

SGD = Outer("sgd", 0.1, 0.6)
"""The syncer's optimizer where gradients are sent; `tests.helpers.learners.problem` has the same figures."""

PLANS: Mapping[str, tuple[PolicySettings | PolicyPlan, int]] = {
    "bsp": (presets.bsp(SGD), 1),
    "m_sync": (presets.m_sync(SGD, 2), 1),
    "asp": (presets.asp(SGD), 1),
    "asp with max_lag": (presets.asp(SGD, 0.3, 2), 1),
    "ssp": (presets.ssp(SGD, 1), 1),
    "ssp by clock": (presets.ssp(SGD, 2, "clock"), 1),
    "local_sgd": (presets.local_sgd(4), 1),
    "local_sgd by tokens": (presets.local_sgd(3, "tokens"), 1),
    "diloco": (presets.diloco(4), 1),
    "streaming_diloco": (presets.streaming_diloco(6, 3, 2), 3),
    "delayed_nesterov": (presets.delayed_nesterov(3, 2, share=0.25), 1),
    "decoupled": (presets.decoupled(6, 3), 3),
    "decoupled of all": (presets.decoupled(4, 1, 3, 0.3, ahead=0), 1),
    "decoupled with outer": (presets.decoupled(4, 3, 2, 0.5, outer=Outer("nesterov", 0.4, 0.6), ahead=1), 3),
    "decoupled with max_lag": (presets.decoupled(6, 3, 2, 1.0, discount=0.25, max_lag=1), 3),
    "bsp, then asp": (presets.switch(presets.bsp(SGD), presets.asp(SGD), SwitchWhen(step=4)), 1),
    "diloco, then decoupled": (
        presets.switch(presets.diloco(4), presets.decoupled(4, grace=0.4), SwitchWhen(step=7)),
        1,
    ),
}
"""Every preset and two switches, each with the number of fragments that it is for."""

UNITS = {1: [slice(3, 4), slice(4, 6), slice(6, 8)], 2: [slice(8, 11), slice(11, 12)]}
PIECES = [slice(0, 3), slice(3, 8), slice(8, 12)]
"""Three fragments, two of which consist of experts."""


def sparse(learner: int, n: int) -> list[int]:
    """Tokens of five experts: one sees none, another those of one learner alone."""
    return [0, 5 if learner == 1 else 0, n % 3, 4 * learner, 1]


def pieces_of(count: int) -> list[slice]:
    """The whole vector, or the three fragments of `PIECES`."""
    return slices(1) if count == 1 else PIECES


@dataclass(frozen=True)
class Schedule:
    """One case: who is how fast, and who fails when."""

    task: Problem
    failures: tuple[Failure, ...] = ()


@st.composite
def schedules(
    draw: st.DrawFn, most: int = 5, steps: tuple[int, int] = (5, 12), failing: bool = False, fewest: int = 1
) -> Schedule:
    """Times are multiples of a quarter in half of the cases, so that events coincide."""
    learners = draw(st.integers(fewest, most), label="learners")
    ties = draw(st.booleans(), label="ties")
    long = st.sampled_from([0.25, 0.5, 1.0, 2.5]) if ties else st.floats(0.3, 5.0)
    short = st.sampled_from([0.0, 0.25, 1.5]) if ties else st.floats(0.0, 2.0)

    def each(times: st.SearchStrategy[float], label: str) -> list[float]:
        return draw(st.lists(times, min_size=learners, max_size=learners), label=label)

    task = problem(
        learners,
        draw(st.integers(*steps), label="steps"),
        each(long, "seconds"),
        each(short, "up"),
        each(short, "down"),
        unit_tokens=sparse,
    )
    if ties:
        seconds = each(long, "equal seconds")
        task.compute = lambda learner, n: seconds[learner]
    if not failing:
        return Schedule(task)
    rate = draw(st.sampled_from([0.0, 0.03, 0.1]), label="rate")
    back, noticed = draw(st.sampled_from([0.2, 2.0, 6.0])), draw(st.sampled_from([0.0, 0.5, 3.0]))
    failures = random_failures(learners, rate, 30.0, back, noticed, draw(st.integers(0, 99), label="seed"))
    return Schedule(task, tuple(failures))


def cases(count: int) -> settings:
    """The same cases every time."""
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
