"""A learner that was counted out and comes back: it goes on if it has missed nothing, and begins anew otherwise."""

from __future__ import annotations

import json

import pytest

from moe_async.sync import presets
from moe_async.sync.messages import Discard, Merge, Publication, UpdateHeader, UpdateId, Welcome
from moe_async.sync.settings import PolicyPlan, PolicySettings, SwitchWhen
from moe_async.sync.syncer import Syncer, SyncGroup
from tests.helpers.learners import group, slices
from tests.helpers.schedules import SGD


def header(learner, clock, sequence=0, *, fragment=0, base=0, incarnation=0):
    return UpdateHeader(UpdateId(learner, incarnation, sequence, fragment), base, clock, 1, (10,), 0.0)


def run_of(*plans, learners=2):
    """A syncer of one fragment under each policy, with all learners in it."""
    plans = [PolicyPlan((plan,)) if isinstance(plan, PolicySettings) else plan for plan in plans]
    fragments = group(plans[0], slices(len(plans))).fragments
    groups = [SyncGroup(f"group {place}", plan, (fragments[place],)) for place, plan in enumerate(plans)]
    syncer = Syncer(groups, learners)
    for learner in range(learners):
        syncer.join(learner, 0, 0.0)
    return syncer


def merges(decisions):
    return [[update.learner for update in entry.updates] for entry in decisions if isinstance(entry, Merge)]


def reopened(syncer):
    """Another syncer with the state of this one, by way of JSON."""
    other = Syncer(syncer.groups, syncer.policies[0].learners)
    other.load_state_dict(json.loads(json.dumps(syncer.state_dict())))
    return other


ROUNDS = {
    "bsp": (presets.bsp(SGD), 1),
    "local_sgd": (presets.local_sgd(3), 3),
    "diloco": (presets.diloco(3), 3),
    "streaming_diloco": (presets.streaming_diloco(3, 1, 1), 3),
    "ssp by clock": (presets.ssp(SGD, 2, "clock"), 1),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_who_has_missed_a_round_begins_anew(name):
    plan, every = ROUNDS[name]
    syncer = run_of(plan)
    syncer.leave(1, 1.0)
    assert not syncer.must_begin_anew(1, 0, {}), "nothing has been merged without it yet"
    assert merges(syncer.arrive(header(0, every), 2.0)) == [[0]]
    for found in (syncer, reopened(syncer)):
        assert found.must_begin_anew(1, 0, {}) and not found.must_begin_anew(0, 0, {})
    assert Welcome(1, 1, every) in syncer.join(1, 1, 3.0)
    assert not syncer.must_begin_anew(1, 1, {}), "its new life has missed nothing"
    assert merges(syncer.arrive(header(0, 2 * every, 1, base=1), 4.0)) == []
    assert merges(syncer.arrive(header(1, 2 * every, base=1, incarnation=1), 5.0)) == [[0, 1]]


@pytest.mark.parametrize("name", ["bsp", "local_sgd", "diloco", "streaming_diloco"])
def test_who_has_missed_nothing_is_waited_for(name):
    plan, every = ROUNDS[name]
    syncer = run_of(plan, learners=3)
    syncer.leave(1, 1.0)
    assert merges(syncer.arrive(header(0, every), 2.0)) == []
    assert not syncer.must_begin_anew(1, 0, {})
    decisions = reopened(syncer).join(1, 0, 3.0, clock=every)
    assert decisions == syncer.join(1, 0, 3.0, clock=every)
    assert [type(entry) for entry in decisions] == [Welcome, Publication], "it made the steps of the round while away"
    assert merges(syncer.arrive(header(2, every), 4.0)) == []
    assert merges(syncer.arrive(header(1, every), 5.0)) == [[0, 1, 2]]


@pytest.mark.parametrize("name", ROUNDS)
def test_nobody_waits_for_what_it_had_sent(name):
    plan, every = ROUNDS[name]
    syncer = run_of(plan)
    syncer.arrive(header(1, every), 1.0)
    syncer.leave(1, 2.0)
    assert not syncer.must_begin_anew(1, 0, {})
    syncer.join(1, 0, 3.0, clock=every)
    assert merges(syncer.arrive(header(0, every), 4.0)) == [[0, 1]]


def test_what_it_had_sent_is_merged_while_it_is_away():
    syncer = run_of(presets.local_sgd(3))
    syncer.arrive(header(1, 3), 1.0)
    syncer.leave(1, 2.0)
    assert merges(syncer.arrive(header(0, 3), 3.0)) == [[0, 1]]
    assert not syncer.must_begin_anew(1, 0, {})
    settled = [entry.settled for entry in syncer.join(1, 0, 4.0, clock=3) if isinstance(entry, Publication)]
    assert settled == [0]
    assert merges(syncer.arrive(header(0, 6, 1, base=1), 5.0)) == []
    assert merges(syncer.arrive(header(1, 6, 1, base=1), 6.0)) == [[0, 1]]


def test_each_fragment_has_rounds_of_its_own():
    syncer = run_of(presets.local_sgd(3), presets.diloco(3))
    syncer.arrive(header(1, 3), 1.0)
    syncer.leave(1, 2.0)
    assert merges(syncer.arrive(header(0, 3), 3.0)) == [[0, 1]]
    assert not syncer.must_begin_anew(1, 0, {})
    assert merges(syncer.arrive(header(0, 3, fragment=1), 4.0)) == [[0]]
    assert syncer.must_begin_anew(1, 0, {})


def test_a_newcomer_has_not_missed_what_was_before_it():
    syncer = run_of(presets.local_sgd(3), learners=3)
    for learner in (0, 1, 2):
        syncer.arrive(header(learner, 3), 1.0)
    syncer.arrive(header(0, 6, 1, base=1), 2.0)
    syncer.join(2, 1, 3.0)
    syncer.leave(2, 4.0)
    assert merges(syncer.arrive(header(1, 6, 1, base=1), 5.0)) == [[0, 1]]
    assert not syncer.must_begin_anew(2, 1, {}), "it had joined after that round had begun"


@pytest.mark.parametrize("plan", [presets.decoupled(2), presets.delayed_nesterov(2, 2), presets.asp(SGD),
                                  presets.m_sync(SGD, 1)])  # fmt: skip
def test_without_rounds_nothing_can_be_missed(plan):
    syncer = run_of(plan)
    syncer.leave(1, 1.0)
    assert merges(syncer.arrive(header(0, 2), 2.0)) == [[0]]
    assert not syncer.must_begin_anew(1, 0, {})


@pytest.mark.parametrize("aggregate", ["push", "clock"])
def test_a_bound_is_kept_by_who_comes_back(aggregate):
    syncer = run_of(presets.ssp(SGD, 0, aggregate))
    syncer.arrive(header(0, 1), 1.0)
    syncer.leave(0, 2.0)
    assert not syncer.must_begin_anew(0, 0, {})
    assert syncer.join(0, 0, 4.0, clock=1) == [Welcome(0, 0, 1)], "it is one step ahead, and has to wait"
    released = [e.learner for e in syncer.arrive(header(1, 1), 5.0) if isinstance(e, Publication)]
    assert sorted(set(released)) == [0, 1]


def test_a_bound_does_not_wait_for_who_stood_still():
    syncer = run_of(presets.ssp(SGD, 3))
    syncer.arrive(header(0, 1), 1.0)
    syncer.arrive(header(1, 1), 1.0)
    syncer.leave(1, 2.0)
    assert not syncer.must_begin_anew(1, 0, {})
    syncer.arrive(header(0, 2, 1), 3.0)
    assert syncer.must_begin_anew(1, 0, {})
    assert Welcome(1, 1, 2) in syncer.join(1, 1, 4.0)


def test_a_barrier_after_a_switch_counts():
    syncer = run_of(presets.switch(presets.decoupled(2), presets.local_sgd(2), SwitchWhen(step=1)))
    syncer.leave(1, 1.0)
    assert merges(syncer.arrive(header(0, 2), 2.0)) == [[0]]
    assert not syncer.must_begin_anew(1, 0, {}), "that merge was the other policy's"
    assert merges(syncer.arrive(header(0, 4, 1, base=1), 3.0)) == [[0]]
    assert syncer.must_begin_anew(1, 0, {})


def test_what_a_former_life_sends_late_is_dropped():
    syncer = run_of(presets.local_sgd(3))
    syncer.leave(1, 1.0)
    syncer.arrive(header(0, 3), 2.0)
    syncer.join(1, 1, 3.0)
    assert [type(entry) for entry in syncer.arrive(header(1, 3), 4.0)] == [Discard]
