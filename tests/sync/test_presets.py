"""Each preset equals, at every event of a schedule, a loop written from its paper: values and times."""

from __future__ import annotations

import pytest
import torch

from moe_async.ops.outer import Outer
from moe_async.sync import presets
from moe_async.sync.settings import SwitchWhen
from tests.helpers import reference_sync as reference
from tests.helpers.learners import Noted, problem, slices, virtual

SGD = Outer("sgd", 0.1, 0.6)
"""The syncer's optimizer; `problem` has the same figures."""


def compare(found: Noted, wanted: reference.Trace, until: float = float("inf")) -> None:
    """Same starts (time and values), same versions, same ends; with ``until`` only what comes before that time."""
    early = {key for key, (time, _) in wanted.started.items() if time < until}
    assert early == {key for key, (time, _) in found.started.items() if time < until}
    for key in early:
        assert found.started[key][0] == pytest.approx(wanted.started[key][0], abs=1e-9), key
        close(found.started[key][1], wanted.started[key][1], f"start of {key}")
    if until == float("inf"):
        assert found.shared.keys() == wanted.shared.keys()
        assert found.ended.keys() == wanted.ended.keys()
        for learner, theta in wanted.ended.items():
            close(found.ended[learner], theta, f"end of {learner}")
    made = {key for key in found.shared if found.merged.get(key, 0.0) < until}
    assert made <= wanted.shared.keys()
    for key in made:
        close(found.shared[key], wanted.shared[key], f"version {key}")


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12, msg=lambda text: f"{what}: {text}")


def first_end(task: reference.Problem, trace: reference.Trace) -> float:
    """When the first learner has made its last step: from then on a gate that counts learners counts one less, where
    the papers' loops wait for ever."""
    last = task.steps
    times = [trace.started[learner, last][0] for learner in range(task.learners) if (learner, last) in trace.started]
    return min(time + task.compute(learner, last) for learner, time in enumerate(times))


GRADIENT = {
    "bsp": (presets.bsp(SGD), lambda p: reference.bsp(p)),
    "m_sync 1": (presets.m_sync(SGD, 1), lambda p: reference.m_sync(p, 1)),
    "m_sync 2": (presets.m_sync(SGD, 2), lambda p: reference.m_sync(p, 2)),
    "asp": (presets.asp(SGD), lambda p: reference.asp(p)),
    "ssp 0": (presets.ssp(SGD, 0), lambda p: reference.ssp(p, 0)),
    "ssp 1": (presets.ssp(SGD, 1), lambda p: reference.ssp(p, 1)),
    "ssp 3": (presets.ssp(SGD, 3), lambda p: reference.ssp(p, 3)),
    "ssp 0 clock": (presets.ssp(SGD, 0, "clock"), lambda p: reference.ssp(p, 0, "clock")),
    "ssp 2 clock": (presets.ssp(SGD, 2, "clock"), lambda p: reference.ssp(p, 2, "clock")),
}


# With one learner the paper's loop would wait for a second one for ever.
@pytest.mark.parametrize(
    ("name", "learners"), [(name, n) for name in GRADIENT for n in (1, 3, 4) if (name, n) != ("m_sync 2", 1)]
)
def test_gradients(name, learners):
    plan, loop = GRADIENT[name]
    task = problem(learners)
    _, found = virtual(task, plan)
    wanted = loop(task)
    compare(found, wanted, first_end(task, found) if "m_sync" in name else float("inf"))


DELTA = {
    "local_sgd 1": (presets.local_sgd(1), lambda p: reference.local_sgd(p, 1)),
    "local_sgd 4": (presets.local_sgd(4), lambda p: reference.local_sgd(p, 4)),
    "diloco 4": (presets.diloco(4), lambda p: reference.diloco(p, 4, 0.7, 0.9)),
    "diloco 5": (presets.diloco(5, 0.4, 0.5), lambda p: reference.diloco(p, 5, 0.4, 0.5)),
    "delayed 1": (presets.delayed_nesterov(3, 1), lambda p: reference.delayed_nesterov(p, 3, 1, 0.0, 0.7, 0.9)),
    "delayed 3": (presets.delayed_nesterov(3, 3), lambda p: reference.delayed_nesterov(p, 3, 3, 0.0, 0.7, 0.9)),
    "delayed 3 shared": (
        presets.delayed_nesterov(2, 3, 0.5, 0.8, 0.25),
        lambda p: reference.delayed_nesterov(p, 2, 3, 0.25, 0.5, 0.8),
    ),
}


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("learners", [1, 3])
def test_deltas(name, learners):
    plan, loop = DELTA[name]
    task = problem(learners, steps=21)
    compare(virtual(task, plan)[1], loop(task))


@pytest.mark.parametrize(("count", "overlap", "mix"), [(1, 0, 0.0), (2, 0, 0.5), (3, 2, 0.5), (3, 3, 0.0), (2, 1, 1.0)])
def test_streaming(count, overlap, mix):
    task, pieces = problem(3, steps=26), slices(count)
    plan = presets.streaming_diloco(6, count, overlap, mix, 0.7, 0.9)
    compare(virtual(task, plan, pieces)[1], reference.streaming_diloco(task, 6, pieces, overlap, mix, 0.7, 0.9))


DECOUPLED = {
    "alone": {"quorum": 1},
    "grace": {"quorum": 1, "grace": 1.3},
    "quorum": {"quorum": 2, "grace": 0.4},
    "arrived": {"quorum": 2, "grace": 0.9, "over": "arrived"},
    "equal": {"quorum": 1, "grace": 0.5, "weight": "equal"},
    "equal over arrived": {"quorum": 2, "weight": "equal", "over": "arrived"},
    "discount": {"quorum": 1, "discount": 0.25},
    "discount over arrived": {"quorum": 2, "grace": 0.7, "discount": 0.4, "over": "arrived"},
    "max_lag": {"quorum": 1, "max_lag": 1},
    "ahead 0": {"quorum": 2, "ahead": 0},
    "ahead 1": {"quorum": 3, "ahead": 1},
    "outer": {"quorum": 2, "grace": 0.3, "over": "arrived", "outer": (0.4, 0.6)},
}  # fmt: skip


def both_decoupled(name, task, pieces, units=None, every=4):
    options = {"weight": "tokens", "ahead": 4, **DECOUPLED[name]}
    outer = options.pop("outer", None)
    plan = presets.decoupled(every, len(pieces), outer=Outer("nesterov", *outer) if outer else None, **options)
    found = virtual(task, plan, pieces, units)[1]
    return found, reference.decoupled(task, every, pieces, outer=outer, units=units, **options)


# Refused: see the test of settings.
@pytest.mark.parametrize(
    ("name", "count"), [(name, count) for name in DECOUPLED for count in (1, 3) if (name, count) != ("ahead 0", 3)]
)
def test_decoupled(name, count):
    task = problem(3, steps=40)
    found, wanted = both_decoupled(name, task, slices(count))
    compare(found, wanted, first_end(task, wanted))


def sparse(learner: int, n: int) -> list[int]:
    """Tokens of five experts: one sees none, another those of one learner alone."""
    return [0, 5 if learner == 1 else 0, n % 3, 4 * learner, 1]


@pytest.mark.parametrize("name", sorted(DECOUPLED.keys() - {"ahead 0"}))
def test_experts(name):
    pieces = [slice(0, 3), slice(3, 8), slice(8, 12)]
    units = {1: [slice(3, 4), slice(4, 6), slice(6, 8)], 2: [slice(8, 11), slice(11, 12)]}
    task = problem(3, steps=40, unit_tokens=sparse)
    found, wanted = both_decoupled(name, task, pieces, units, every=3)
    compare(found, wanted, first_end(task, wanted))


def at_step(first, then, step):
    return presets.switch(first, then, SwitchWhen(step=step))


SWITCHES = {
    "bsp to asp": (at_step(presets.bsp(SGD), presets.asp(SGD), 7), lambda p: reference.switch_bsp_asp(p, 7)),
    "bsp to m_sync": (
        at_step(presets.bsp(SGD), presets.m_sync(SGD, 2), 5),
        lambda p: reference.switch_bsp_m_sync(p, 2, 5),
    ),
    "local_sgd": (
        at_step(presets.local_sgd(3), presets.local_sgd(5), 9),
        lambda p: reference.switch_local_sgd(p, 3, 5, 9),
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switch(name):
    plan, loop = SWITCHES[name]
    task = problem(3)
    _, found = virtual(task, plan)
    compare(found, loop(task), first_end(task, found) if "m_sync" in name else float("inf"))
