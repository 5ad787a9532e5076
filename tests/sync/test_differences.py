"""Presets differ, and so does every one of their parts: a policy whose bound or weight is ignored would go unnoticed by
tests that only ask whether training works."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from moe_async.ops.outer import Outer
from moe_async.sync import presets
from moe_async.sync.settings import Combine, Gate, PolicyPlan, PolicySettings, SwitchWhen
from tests.helpers.learners import problem, virtual
from tests.helpers.schedules import PLANS, SGD, UNITS, pieces_of, sparse

STEPS = 30
"""Of three learners of unequal speed, with experts where there are several fragments."""


@cache
def path_of(plan: PolicySettings | PolicyPlan):
    """The shared vector after each merge."""
    count = plan.phases[0].fragments if isinstance(plan, PolicyPlan) else plan.fragments
    task = problem(3, STEPS, unit_tokens=sparse)
    return virtual(task, plan, pieces_of(count), UNITS if count == 3 else None)[1].path


def apart(first, second) -> float:
    """How far the shared vectors come from each other after the same number of merges."""
    return max(float((a - b).abs().max()) for a, b in zip(path_of(first), path_of(second), strict=False))


@pytest.mark.parametrize(("one", "other"), list(combinations(PLANS, 2)))
def test_every_two_presets_differ(one, other):
    first, second = PLANS[one][0], PLANS[other][0]
    assert len(path_of(first)) > 5 and len(path_of(second)) > 5
    assert apart(first, second) > 1e-3


DECOUPLED = presets.decoupled(3, 3, 2, 1.0, discount=0.5, ahead=1, outer=Outer("nesterov", 0.7, 0.8))
STREAMING = presets.streaming_diloco(6, 3, 2)
DELAYED = presets.delayed_nesterov(3, 2, share=0.25)
DISCOUNTED = replace(PLANS["asp"][0], combine=Combine(over="members", discount=0.4))


def without_momentum(plan):
    return replace(plan, outer=replace(plan.outer, momentum=0.0))


MUTATIONS = {
    "ssp: no bound": (presets.ssp(SGD, 1), {"clock_bound": None}),
    "ssp: a larger bound": (presets.ssp(SGD, 1), {"clock_bound": 2}),
    "ssp by clock: a larger bound": (presets.ssp(SGD, 1, "clock"), {"clock_bound": 2}),
    "m_sync: count": (presets.m_sync(SGD, 2), {"gate": Gate("first", 1)}),
    "m_sync: late gradients": (presets.m_sync(SGD, 2), {"max_lag": None}),
    "asp: no max_lag": (presets.asp(SGD, 0.0, 1), {"max_lag": None}),
    "asp: no discount": (DISCOUNTED, {"combine": Combine(over="members")}),
    "asp: over arrived": (presets.asp(SGD), {"combine": Combine()}),
    "local_sgd: every": (presets.local_sgd(3), {"every": 4}),
    "local_sgd: equal weights": (presets.local_sgd(3, "tokens"), {"combine": Combine()}),
    "diloco: no momentum": (presets.diloco(3), {"outer": Outer("nesterov", 0.7, 0.0)}),
    "diloco: plain momentum": (presets.diloco(3), {"outer": Outer("sgd", 0.7, 0.9)}),
    "diloco: no outer optimizer": (presets.diloco(3), {"outer": Outer()}),
    "diloco: rate": (presets.diloco(3), {"outer": Outer("nesterov", 0.6, 0.9)}),
    "streaming: no overlap": (STREAMING, {"overlap": 0}),
    "streaming: mix 0": (STREAMING, {"mix": 0.0}),
    "streaming: rebase": (STREAMING, {"mix": None}),
    "delayed: share 0": (DELAYED, {"outer": replace(DELAYED.outer, share=0.0)}),
    "delayed: delay": (DELAYED, {"outer": replace(DELAYED.outer, delay=3)}),
    "delayed: no momentum": (DELAYED, {"outer": replace(DELAYED.outer, momentum=0.0)}),
    "decoupled: grace 0": (DECOUPLED, {"gate": Gate("quorum", 2, 0.0)}),
    "decoupled: quorum": (DECOUPLED, {"gate": Gate("quorum", 1, 1.0)}),
    "decoupled: no max_lag": (presets.decoupled(3, 3, max_lag=0), {"max_lag": None}),
    "decoupled: no bound on what is ahead": (DECOUPLED, {"ahead": None}),
    "decoupled: equal weights": (DECOUPLED, {"combine": replace(DECOUPLED.combine, weight="equal")}),
    "decoupled: over arrived": (DECOUPLED, {"combine": replace(DECOUPLED.combine, over="arrived")}),
    "decoupled: no discount": (DECOUPLED, {"combine": replace(DECOUPLED.combine, discount=0.0)}),
    "decoupled: no momentum": (DECOUPLED, {"outer": replace(DECOUPLED.outer, momentum=0.0)}),
    "decoupled: local values are replaced": (DECOUPLED, {"mix": 0.0}),
    "decoupled: results are waited for": (DECOUPLED, {"overlap": 0}),
    "decoupled: others' merges are not sent": (DECOUPLED, {"shares_merge": False}),
}
"""A policy, and one of its parts turned off or changed."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_part_matters(name):
    plan, change = MUTATIONS[name]
    changed = replace(plan, **change)
    assert changed != plan
    assert apart(plan, changed) > 1e-3


def test_when_a_switch_comes_matters():
    plans = [presets.switch(presets.bsp(SGD), presets.asp(SGD), SwitchWhen(step=step)) for step in (4, 6)]
    assert apart(*plans) > 1e-3
    assert apart(plans[0], presets.bsp(SGD)) > 1e-3
