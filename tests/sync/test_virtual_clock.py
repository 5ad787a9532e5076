"""What the virtual clock makes of stragglers, links, failures and ends; times are computed by hand."""

from __future__ import annotations

from itertools import permutations

import pytest

from moe_async.ops.outer import Outer
from moe_async.sync import presets
from moe_async.sync.settings import SwitchWhen
from moe_async.sync.timing import random_failures
from tests.helpers.learners import problem, slices, virtual

SGD = Outer("sgd", 0.1, 0.6)

PRESETS = {
    "bsp": (presets.bsp(SGD), 1),
    "m_sync": (presets.m_sync(SGD, 2), 1),
    "asp": (presets.asp(SGD), 1),
    "asp with max_lag": (presets.asp(SGD, 0.3, 2), 1),
    "ssp": (presets.ssp(SGD, 1), 1),
    "ssp by clock": (presets.ssp(SGD, 2, "clock"), 1),
    "local_sgd": (presets.local_sgd(4), 1),
    "diloco": (presets.diloco(4), 1),
    "streaming_diloco": (presets.streaming_diloco(6, 3, 2), 3),
    "delayed_nesterov": (presets.delayed_nesterov(3, 2), 1),
    "decoupled": (presets.decoupled(6, 3), 3),
    "decoupled of all": (presets.decoupled(4, 1, 3, 0.3, ahead=0), 1),
    "decoupled with max_lag": (presets.decoupled(6, 3, 2, 1.0, max_lag=1), 3),
}
"""Every preset, and the number of fragments it is for."""


# Learners that die


@pytest.mark.parametrize("name", ["bsp", "ssp by clock", "local_sgd", "diloco", "streaming_diloco"])
@pytest.mark.parametrize("noticed", [0.0, 0.5, 3.0])
def test_nobody_waits_for_a_former_life(name, noticed):
    # A learner that comes back within a round has sent of it in its former life, or owes an update of it now.
    plan, count = PRESETS[name]
    for seed in range(12):
        failures = random_failures(3, 0.06, 40, (0.2, 2.0, 6.0)[seed % 3], noticed, seed)
        run, _ = virtual(problem(3, steps=16), plan, slices(count), failures=failures)
        assert all(run.participant(learner).sync.clock == 16 for learner in range(3)), seed


# Changes of policy


SWITCHES = {
    f"{first} to {then}": presets.switch(PRESETS[first][0], PRESETS[then][0], SwitchWhen(step=5))
    for names in (
        ("bsp", "m_sync", "asp", "ssp", "ssp by clock", "asp with max_lag"),
        ("local_sgd", "diloco", "delayed_nesterov", "decoupled of all"),
        ("streaming_diloco", "decoupled", "decoupled with max_lag"),
    )
    for first, then in permutations(names, 2)
}


@pytest.mark.parametrize("name", SWITCHES)
def test_everybody_finishes_after_a_change_of_policy(name):
    pieces = slices(max(phase.fragments for phase in SWITCHES[name].phases))
    for learners in (1, 3):
        run, _ = virtual(problem(learners, steps=18), SWITCHES[name], pieces)
        assert all(run.participant(learner).sync.clock == 18 for learner in range(learners))
        assert sum(entry["event"] == "switch" for entry in run.log.entries) == 1
        times = [entry["time"] for entry in run.log.entries]
        assert times == sorted(times)
