"""The parts by themselves: gates, factors, presets, settings, fragments, tallies, positions, the log; by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_async.errors import SyncError
from moe_async.ops.outer import Outer
from moe_async.sync import presets
from moe_async.sync.arithmetic import LocalView
from moe_async.sync.combine import combine_weights
from moe_async.sync.event_log import EventLog, read_entries
from moe_async.sync.fragments import Key, cut
from moe_async.sync.gates import Arrival, Member, Opening, opening
from moe_async.sync.learner_policy import LearnerPolicy, Position
from moe_async.sync.merger import Merger
from moe_async.sync.messages import Discard, Farewell, Merge, Publication, Switch, UpdateHeader, UpdateId, Welcome
from moe_async.sync.participant import Participant
from moe_async.sync.settings import Combine, Gate, PolicyPlan, PolicySettings, SwitchWhen
from moe_async.sync.staleness import StalenessTally, quantile
from moe_async.sync.syncer import LearnerSync, Syncer, SyncGroup
from moe_async.sync.syncer_policy import SyncerPolicy
from tests.helpers.learners import VectorModel, group, problem, slices
from tests.helpers.schedules import PLANS, SGD, cases


def header(learner, clock=1, sequence=0, *, base=0, incarnation=0, fragment=0, tokens=(10,), final=False, loss=0.0):
    return UpdateHeader(UpdateId(learner, incarnation, sequence, fragment), base, clock, 1, tokens, loss, final)


def policy_of(plan, learners=3, fragments=1):
    plan = plan if isinstance(plan, PolicyPlan) else PolicyPlan((plan,))
    policy = SyncerPolicy(plan, range(fragments), learners)
    for learner in range(learners):
        policy.join(learner, 0, 0, 0.0)
    return policy


def only(kind, decisions):
    return [decision for decision in decisions if isinstance(decision, kind)]


# Combining


def test_a_sender_that_left_counts_in_the_sum_of_weights():
    # 30 tokens of 0, which left; 10 of 1: over members they are 3/4 and 1/4 of what is known, 2 not heard of counts as
    # the mean of 20, so the sum is 60.
    policy = policy_of(presets.decoupled(1, quorum=2, grace=5.0))
    policy.arrive(header(0, tokens=(30,)), 1.0)
    assert not only(Merge, policy.leave(0, 2.0))
    policy.arrive(header(1, tokens=(10,)), 3.0)
    (merge,) = only(Merge, policy.tick(8.0))
    assert [row[0] for row in merge.weights] == pytest.approx([30 / 60, 10 / 60])


def test_the_only_sender_has_left():
    policy = policy_of(presets.decoupled(1, quorum=1, grace=5.0))
    policy.arrive(header(0), 1.0)
    policy.leave(0, 2.0)
    (merge,) = only(Merge, policy.tick(6.0))
    assert merge.weights == ((pytest.approx(1 / 3),),)


# Plans


def test_policies_that_cannot_follow_one_another_are_refused():
    when = SwitchWhen(step=5)
    with pytest.raises(SyncError, match=r"exchanges grad in 1 fragments .* by one that exchanges delta in 1"):
        presets.switch(presets.bsp(SGD), presets.local_sgd(4), when)
    with pytest.raises(SyncError, match=r"in 3 fragments .* in 2"):
        presets.switch(presets.streaming_diloco(6, 3), presets.decoupled(6, 2), when)
    with pytest.raises(SyncError, match="every 4 steps and then, by a policy that waits for all learners, every 6"):
        presets.switch(presets.decoupled(4, 3), presets.streaming_diloco(6, 3), when)
    # Lockstep learners hear of the change at the same step; one fragment is owed by all.
    presets.switch(presets.streaming_diloco(6, 3), presets.decoupled(4, 3), when)
    presets.switch(presets.decoupled(4), presets.local_sgd(6), when)


# Event log


def test_the_log_survives_a_crash_within_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.end(0, 0, 3, 1.5)
    log.end(1, 0, 4, 2.5)
    log.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert list(read_entries(path)) == log.entries[: (size >= first) + (size == len(whole))]
        # Whoever goes on writing does not continue the line that was cut.
        again = EventLog(path, keep=False)
        again.end(2, 0, 5, 3.5)
        again.close()
        found = list(read_entries(path))
        assert [entry["learner"] for entry in found] == [*[0, 1][: len(found) - 1], 2] and not again.entries
        assert len(found) == 1 + (size >= first) + (size == len(whole))


@pytest.mark.parametrize("line", [0, 1])
def test_a_damaged_line_is_an_error(tmp_path, line):
    path = tmp_path / "events.jsonl"
    lines = ['{"event": "end"}', '{"event": "end"}']
    lines[line] = '{"event": "en'
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(SyncError, match=rf"line {line + 1} of .*events.jsonl is damaged \(.*restore the file"):
        list(read_entries(path))


# Position


def test_a_position_follows_the_news():
    position = Position(0.0, 0)
    assert [position.at(clock) for clock in (0, 1, 2)] == [0.0, 1.0, 2.0]
    # The others were slower: when this learner had made 4 steps the mean was 3.
    position.hear(3.0, 4)
    assert [position.at(clock) for clock in (4, 5, 8)] == [3.0, 3.75, 6.0]
    # Then they were faster.
    position.hear(9.0, 6)
    assert [position.at(clock) for clock in (6, 7)] == [9.0, 10.5]
    # Older news change nothing.
    position.hear(8.0, 5)
    assert position.at(7) == 10.5
    assert Position(**asdict(position)).at(7) == 10.5


def test_a_position_is_the_clock_where_all_keep_step():
    position = Position(5.0, 5)
    for clock in range(5, 30, 5):
        position.hear(float(clock), clock)
        assert [position.at(clock + more) for more in range(5)] == [clock + more for more in range(5)]


# Gates


def arrival(learner, at, clock=1, **rest):
    return Arrival(header(learner, clock, **rest), at)


def members(count=3, **changes):
    """Learners of life 0 that began at 0; ``changes`` of one are given as ``_0={...}``."""
    return {n: Member(0, **changes.get(f"_{n}", {})) for n in range(count)}


def opened(gate, pending, who=None, sent=None):
    """Time of the opening and learners in it; ``sent`` follows from what is pending where nothing else is said."""
    latest = {one.header.id.learner: one.header.clock for one in pending}
    found = opening(gate, pending, members() if who is None else who, latest if sent is None else sent)
    return None if found is None else (found.at, [one.id.learner for one in found.in_order()])


@pytest.mark.parametrize("kind", ["barrier", "first", "each", "quorum"])
def test_no_gate_opens_without_updates(kind):
    assert opening(Gate(kind), [], members(), {}) is None
    assert opening(Gate(kind), [], {}, {}) is None


def test_a_barrier_waits_for_all_of_one_number_of_steps():
    gate, pending = Gate(), [arrival(2, 1.0), arrival(0, 2.0), arrival(2, 2.5, 2, sequence=1)]
    assert opened(gate, pending) is None
    pending.append(arrival(1, 3.0))
    assert opened(gate, pending) == (3.0, [0, 1, 2])


def test_whom_a_barrier_does_not_wait_for():
    gate, pending = Gate(), [arrival(2, 1.0, 5), arrival(0, 2.0, 5)]
    sent = {0: 5, 2: 5}
    assert opened(gate, pending, sent=sent) is None
    assert opened(gate, pending, sent={**sent, 1: 4}) is None
    # It has sent of a later step, it began there, it stopped before, it is gone.
    assert opened(gate, pending, sent={**sent, 1: 6}) == (2.0, [0, 2])
    assert opened(gate, pending, members(_1={"joined_clock": 5, "seen": 5}), sent) == (2.0, [0, 2])
    assert opened(gate, pending, members(_1={"joined_clock": 4, "seen": 4}), sent) is None
    assert opened(gate, pending, members(_1={"seen": 4, "final": True}), sent) == (2.0, [0, 2])
    assert opened(gate, pending, members(_1={"seen": 5, "final": True}), sent) is None, "its update is on its way"
    assert opened(gate, pending, {0: Member(0), 2: Member(0)}, sent) == (2.0, [0, 2])
    assert opened(gate, pending, {}, {}) == (2.0, [0, 2])
    # What a former life sent does not stand for this one.
    assert opened(gate, pending, {0: Member(0), 2: Member(1, joined_clock=4, seen=4)}, {0: 5}) is None


def test_the_first_ones_open():
    gate = Gate("first", 2)
    assert opened(gate, [arrival(2, 1.0)]) is None
    assert opened(gate, [arrival(2, 1.0), arrival(1, 4.0)]) == (4.0, [1, 2])
    # No more than there are at work.
    final = {"final": True}
    assert opened(gate, [arrival(2, 1.0)], members(_0=final, _1=final)) == (1.0, [2])
    assert opened(gate, [arrival(2, 1.0)], members(_0=final)) is None
    assert opened(gate, [arrival(2, 1.0)], members(_2=final, _1=final)) is None, "0 is still at work"


def test_each_opens_by_itself():
    assert opened(Gate("each", 7, 3.0), [arrival(2, 1.0), arrival(1, 4.0)]) == (1.0, [2])


@pytest.mark.parametrize(("grace", "wait"), [(0.0, 0.0), (-3.0, 0.0), (1.5, 1.5)])
def test_a_quorum_counts_learners_and_then_waits(grace, wait):
    gate = Gate("quorum", 2, grace)
    pending = [arrival(2, 1.0), arrival(2, 2.0, 2, sequence=1)]
    assert opened(gate, pending) is None
    pending.append(arrival(0, 4.0))
    assert opened(gate, pending) == (4.0 + wait, [0, 2, 2])
    pending.append(arrival(1, 5.0))
    assert opened(gate, pending) == (4.0 + wait, [0, 1, 2, 2]), "the second learner counts, not the last"
    final = {"final": True}
    assert opened(gate, pending[:2], members(_0=final, _1=final)) == (1.0 + wait, [2, 2])
    assert opened(gate, pending[:2], members(_0=final)) is None


def test_updates_of_one_learner_are_merged_in_order():
    came = [{"sequence": 2}, {"sequence": 1}]
    found = Opening(
        0.0,
        [
            arrival(1, 0.0, **came[0]),
            arrival(0, 0.0, incarnation=1),
            arrival(1, 0.0, **came[1]),
            arrival(0, 0.0, sequence=5),
        ],
    )
    ids = [one.id for one in found.in_order()]
    assert [(one.learner, one.incarnation, one.sequence) for one in ids] == [(0, 0, 5), (0, 1, 0), (1, 0, 1), (1, 0, 2)]


# Combining by hand


def weights(combine, updates, version=0, latest=None, count=3):
    latest = latest if latest is not None else {update.id.learner: update.tokens for update in updates}
    return combine_weights(combine, updates, version, latest, count)


UPDATES = [header(0, tokens=(30, 0, 5), base=4), header(1, tokens=(10, 0, 0), base=2)]


def test_factors_over_arrived():
    assert weights(Combine(), UPDATES) == ((0.5, 0.0, 1.0), (0.5, 0.0, 0.0))
    assert weights(Combine("tokens"), UPDATES) == ((0.75, 0.0, 1.0), (0.25, 0.0, 0.0))
    # Version 5: 0 lags 1 and counts 1 / (1 + 0.5), 1 lags 3 and counts 1 / (1 + 1.5).
    found = weights(Combine("tokens", discount=0.5), UPDATES, version=5)
    total = 30 / 1.5 + 10 / 2.5
    assert found[0] == pytest.approx((20 / total, 0.0, 1.0)) and found[1] == pytest.approx((4 / total, 0.0, 0.0))


def test_factors_over_members():
    # A third one has not been heard of: it counts as the mean of the others, zeros included.
    assert weights(Combine("equal", "members"), UPDATES)[0] == pytest.approx((1 / 3, 0.0, 1 / 1.5))
    assert weights(Combine("tokens", "members"), UPDATES)[0] == pytest.approx((30 / 60, 0.0, 5 / 7.5))
    latest = {0: (30, 0, 5), 1: (10, 0, 0), 2: (40, 8, 0)}
    assert weights(Combine("tokens", "members"), UPDATES, latest=latest) == ((30 / 80, 0.0, 1.0), (10 / 80, 0.0, 0.0))
    # The discount is not made up for by the others.
    found = weights(Combine("equal", "members", 1.0), UPDATES, version=5, latest=latest)
    assert found[0] == pytest.approx((1 / 2 / 3, 0.0, 1 / 2)) and found[1] == pytest.approx((1 / 4 / 3, 0.0, 0.0))


def test_gradients_of_idle_units_are_zeros_in_the_mean():
    assert weights(Combine(counts_idle=True), UPDATES) == ((0.5, 0.0, 0.5), (0.5, 0.0, 0.0))
    over = weights(Combine("equal", "members", counts_idle=True), UPDATES)
    assert over[0] == pytest.approx((1 / 3, 0.0, 1 / 3)) and over[1] == pytest.approx((1 / 3, 0.0, 0.0))
    for policy in (presets.bsp(SGD), presets.m_sync(SGD, 2), presets.asp(SGD), presets.ssp(SGD, 2),
                   presets.ssp(SGD, 2, "clock")):  # fmt: skip
        assert policy.combine.counts_idle


def test_a_lag_below_zero_is_none():
    assert weights(Combine(discount=0.25), [header(0, base=7), header(1, base=5)], version=5) == ((0.5,), (0.5,))


@given(
    tokens=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4),
    weight=st.sampled_from(["equal", "tokens"]),
    discount=st.sampled_from([0.0, 0.7]),
)
@cases(60)
def test_sums_of_factors(tokens, weight, discount):
    """Over arrived they are 1 in each unit that has tokens; over members no more than that, and the same in whatever
    groups updates come."""
    updates = [header(n, tokens=tuple(row), base=n) for n, row in enumerate(tokens)]
    arrived = weights(Combine(weight, "arrived", discount), updates, 4)
    over = weights(Combine(weight, "members", discount), updates, 4, count=6)
    latest = {update.id.learner: update.tokens for update in updates}
    alone = [weights(Combine(weight, "members", discount), [update], 4, latest, 6)[0] for update in updates]
    for unit in range(3):
        seen = any(row[unit] for row in tokens)
        assert sum(row[unit] for row in arrived) == pytest.approx(1.0 if seen else 0.0)
        assert sum(row[unit] for row in over) <= 1 + 1e-12
        assert all(not row[unit] for row, counts in zip([*arrived, *over], tokens * 2, strict=True) if not counts[unit])
    assert [pytest.approx(row) for row in alone] == list(over)


# Settings


def test_when_fragments_are_due():
    settings = PolicySettings(every=6, fragments=3)
    due = {n: [clock for clock in range(13) if settings.due(n, clock)] for n in range(3)}
    assert due == {0: [6, 12], 1: [2, 8], 2: [4, 10]}
    assert [clock for clock in range(4) if PolicySettings().due(0, clock)] == [1, 2, 3]
    # More fragments than steps: several at one step.
    crowded = PolicySettings(every=2, fragments=4)
    assert [[n for n in range(4) if crowded.due(n, clock)] for clock in (1, 2, 3)] == [[2, 3], [0, 1], [2, 3]]


def test_settings_that_would_wait_for_ever_are_refused():
    with pytest.raises(SyncError, match=r"ahead is 0 with 3 fragments and a quorum of 2: .* Use ahead: 1 or more"):
        presets.decoupled(4, 3, 2, ahead=0)
    for allowed in ((4, 3, 1, 0), (4, 1, 2, 0), (4, 3, 2, 1)):
        every, fragments, quorum, ahead = allowed
        presets.decoupled(every, fragments, quorum, ahead=ahead)


@pytest.mark.parametrize(
    ("match", "values"),
    [
        ("every of a policy is 0; it must be at least 1", {"every": 0}),
        ("fragments of a policy is 0; it must be at least 1", {"fragments": 0}),
        ("gate.count of a policy is 0; it must be at least 1", {"gate": Gate("first", 0)}),
        ("gate.grace of a policy is -1; it must be at least 0", {"gate": Gate("quorum", 1, -1)}),
        ("combine.discount of a policy is -0.5; it must be at least 0", {"combine": Combine(discount=-0.5)}),
        ("max_lag of a policy is -1; it must be at least 0", {"max_lag": -1}),
        ("clock_bound of a policy is -1; it must be at least 0", {"clock_bound": -1}),
        ("ahead of a policy is -1; it must be at least 0", {"ahead": -1}),
        ("mix of a policy is 1.5; it must be a share from 0 to 1, or None", {"mix": 1.5}),
    ],
)
def test_settings_out_of_range_are_refused(match, values):
    with pytest.raises(SyncError, match=match):
        PolicySettings(**values)


@pytest.mark.parametrize("aggregate", ["push", "clock"])
def test_one_that_is_held_back_stays_so_when_only_its_connection_was_lost(aggregate):
    plan = PolicyPlan((presets.ssp(SGD, 0, aggregate),))
    syncer = Syncer([group(plan, [slice(0, 1)])], 2)
    for learner in (0, 1):
        syncer.join(learner, 0, 0.0)
    syncer.arrive(header(0, clock=1), 1.0)
    assert syncer.join(0, 0, 2.0, clock=1) == [Welcome(0, 0, 1)]
    decisions = syncer.arrive(header(1, clock=1), 3.0)
    assert {entry.learner for entry in decisions if isinstance(entry, Publication)} == {0, 1}
    assert [type(entry) for entry in syncer.join(0, 0, 4.0, clock=1)] == [Welcome, Publication]


def test_an_overlap_lasts_less_than_a_period():
    with pytest.raises(SyncError, match=r"overlap is 4 but .* every 4 steps, .* Use overlap: 3 at most"):
        presets.streaming_diloco(4, 2, 4)
    with pytest.raises(SyncError, match="overlap is -1"):
        presets.streaming_diloco(4, 2, -1)
    presets.streaming_diloco(4, 2, 3)


def test_what_policies_say_of_themselves():
    asynchronous = {name: plan.asynchronous for name, (plan, _) in PLANS.items() if isinstance(plan, PolicySettings)}
    assert [name for name, value in asynchronous.items() if not value] == [
        "bsp", "ssp by clock", "local_sgd", "local_sgd by tokens", "diloco", "streaming_diloco",
    ]  # fmt: skip


def test_presets_are_their_parts():
    outer = Outer("nesterov", 0.7, 0.9)
    assert presets.bsp(SGD) == PolicySettings("grad", max_lag=0, combine=Combine(counts_idle=True), outer=SGD)
    assert presets.diloco(7) == PolicySettings(every=7, outer=outer)
    assert presets.local_sgd(7, "tokens") == PolicySettings(every=7, combine=Combine("tokens"))
    assert presets.delayed_nesterov(7, 3).outer == Outer("delayed_nesterov", 0.7, 0.9, 3, 0.0)
    assert presets.ssp(SGD, 2, discount=0.5).combine == Combine("equal", "members", 0.5, counts_idle=True)
    assert presets.asp(SGD, 0.5, 3) == replace(presets.ssp(SGD, 9, discount=0.5), clock_bound=None, max_lag=3)
    streaming = presets.streaming_diloco(7, 2)
    assert (streaming.overlap, streaming.mix, streaming.shares_merge, streaming.outer) == (0, 0.5, True, outer)
    decoupled = presets.decoupled(7)
    assert decoupled.combine == Combine("tokens", "members") and decoupled.gate == Gate("quorum", 1, 0.0)
    assert (decoupled.overlap, decoupled.ahead, decoupled.mix, decoupled.shares_merge) == (None, 4, None, True)
    assert decoupled.outer == Outer() and presets.decoupled(7, outer=outer).outer == outer


# Switches of the syncer's policy


def test_a_plateau_starts_anew_with_every_improvement():
    policy = policy_of(
        presets.switch(presets.asp(SGD), presets.bsp(SGD), SwitchWhen(plateau=2, improvement=0.5)), learners=1
    )
    phases = []
    for clock, loss in enumerate([5.0, 4.75, 4.25, 4.0, 3.75, 3.5, 3.0, 2.0], 1):
        policy.arrive(header(0, clock, clock - 1, base=clock - 1, loss=loss), float(clock))
        phases.append(policy.phase)
    # 4.75 is not 0.5 better than 5, but 4.25 is; 4 and 3.75, exactly 0.5 better, are not better than that by more.
    assert phases == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_step_changes_the_policy_at_the_merge_that_reaches_it():
    policy = policy_of(presets.switch(presets.asp(SGD), presets.bsp(SGD), SwitchWhen(step=1.5)), learners=2)
    assert not only(Switch, policy.arrive(header(0, 1), 1.0)) and policy.progress == 0.5
    assert not only(Switch, policy.arrive(header(1, 1), 1.0)) and policy.progress == 1.0
    decisions = policy.arrive(header(0, 2, 1, base=2), 2.0)
    assert [type(decision) for decision in decisions] == [Merge, Switch, Publication]
    assert decisions[0].phase == 0 and decisions[1] == Switch((0,), 1, 1.5) and decisions[2].phase == 1
    assert policy.settings == presets.bsp(SGD)


# Publications, and updates that come again


def test_who_gets_what_is_merged():
    policy = policy_of(presets.asp(SGD))
    assert [p.learner for p in only(Publication, policy.arrive(header(1), 1.0))] == [1]
    policy = policy_of(presets.decoupled(1))
    (mine, yours, theirs) = only(Publication, policy.arrive(header(1), 1.0))
    assert [p.learner for p in (mine, yours, theirs)] == [0, 1, 2] and yours.settled == 0 and mine.settled == -1
    assert (yours.version, yours.seen, mine.seen, yours.progress) == (1, 1, 0, 1 / 3)


def test_an_update_that_lags_too_far_is_answered_with_the_newest_value():
    policy = policy_of(presets.asp(SGD, max_lag=1))
    policy.arrive(header(0, 1, 0), 1.0)
    policy.arrive(header(0, 2, 1, base=1), 2.0)
    discard, publication = policy.arrive(header(1, base=0), 3.0)
    assert discard == Discard(header(1).id, "lags 2 versions behind, more than 1")
    assert (publication.learner, publication.version, publication.settled) == (1, 2, 0)
    assert len(only(Merge, policy.arrive(header(2, base=1), 4.0))) == 1, "a lag of 1 is allowed"


def test_updates_of_former_lives_and_strangers_are_dropped():
    policy = policy_of(presets.asp(SGD))
    policy.leave(0, 1.0)
    assert policy.arrive(header(0), 2.0) == [Discard(header(0).id, "its sender is no member")]
    policy.join(0, 1, 5, 3.0)
    assert policy.arrive(header(0, 9), 4.0) == [Discard(header(0).id, "its sender is no member")]
    assert only(Merge, policy.arrive(header(0, 6, incarnation=1), 5.0))
    assert policy.arrive(header(7), 5.0) == [Discard(header(7).id, "its sender is no member")]
    # Nothing of this moved the run on.
    assert policy.progress == 6 / 3 and policy.versions == {0: 1}


def test_a_repeated_update_is_answered_once_more_when_it_is_settled():
    policy = policy_of(presets.bsp(SGD), learners=2)
    policy.arrive(header(0), 1.0)
    assert policy.arrive(header(0), 2.0) == [Discard(header(0).id, "came before", True)], "it waits"
    policy.arrive(header(1), 3.0)
    discard, publication = policy.arrive(header(0), 4.0)
    assert discard.repeated and (publication.version, publication.settled, publication.learner) == (1, 0, 0)


def test_a_repeated_update_does_not_release_who_is_held():
    policy = policy_of(presets.ssp(SGD, 0), learners=2)
    assert not only(Publication, policy.arrive(header(0), 1.0))
    assert not only(Publication, policy.arrive(header(0), 2.0))
    assert [p.learner for p in only(Publication, policy.arrive(header(1), 3.0))] == [0, 1]
    assert [p.learner for p in only(Publication, policy.arrive(header(0), 4.0))] == [0]


def test_leaving_and_finishing_open_what_waited_for_it():
    for gone in (SyncerPolicy.leave, SyncerPolicy.finish):
        policy = policy_of(presets.local_sgd(1))
        policy.arrive(header(0), 1.0)
        policy.arrive(header(1), 2.0)
        (merge,) = only(Merge, gone(policy, 2, 3.0))
        assert [update.learner for update in merge.updates] == [0, 1]
        assert gone(policy, 9, 4.0) == []


def test_the_timer_of_a_grace_window():
    policy = policy_of(presets.decoupled(1, quorum=2, grace=1.5))
    assert policy.due() is None
    policy.arrive(header(0), 1.0)
    assert policy.due() is None
    policy.arrive(header(1), 2.0)
    assert policy.due() == 3.5 and not policy.tick(3.4)
    policy.arrive(header(2), 3.4)
    assert policy.due() == 3.5 and len(only(Merge, policy.tick(3.5))[0].updates) == 3
    assert policy.due() is None


# Quantiles


def test_quantiles_by_hand():
    counts = Counter({0: 1, 3: 2, 9: 1})
    assert [quantile(counts, share) for share in (0.0, 0.25, 0.26, 0.5, 0.75, 0.76, 1.0)] == [0, 0, 3, 3, 3, 9, 9]
    with pytest.raises(ValueError, match="no observations"):
        quantile(Counter(), 0.5)


def test_quantiles_are_exact_for_every_number_of_observations():
    # 0.95 * n is not exact in floating point; the place in the order is.
    for total in range(1, 1200):
        counts = Counter(range(1, total + 1))
        assert quantile(counts, 0.95) == -(-95 * total // 100), total
        assert quantile(counts, 0.5) == -(-total // 2), total


def test_a_tally_by_learner():
    tally = StalenessTally()
    for gap, lag, drift in ((0, 2, 4), (1, 2, 4), (5, 0, 4)):
        tally.add_update(3, gap, lag, drift)
    tally.add_age(3, 2)
    tally.add_discard(4)
    assert tally.summary(3) == {
        "clock_gap": {"median": 1, "p95": 5, "max": 5}, "version_lag": {"median": 2, "p95": 2, "max": 2},
        "data_age": {"median": 2, "p95": 2, "max": 2}, "drift": {"median": 4, "p95": 4, "max": 4},
    }  # fmt: skip
    assert set(tally.summary(4).values()) == {None} and tally.discards == {4: 1}
    again = StalenessTally()
    again.load_state_dict(json.loads(json.dumps(tally.state_dict())))
    assert again == tally


# Fragments


def test_cutting_by_hand():
    keys = [Key("a", 4), Key("b.0", 3, "e0"), Key("b.1", 3, "e1"), Key("c.0", 2, "e0"), Key("d", 1), Key("f", 0)]
    # Largest first: e0 (5) to 0, a (4) to 1, e1 (3) to 1 (4 < 5), d (1) to 0, f to 0 (6 < 7).
    first, second = cut(keys, 2)
    names = [{unit.expert: [key.name for key in unit.keys] for unit in part.units} for part in (first, second)]
    assert names == [{"": ["d", "f"], "e0": ["b.0", "c.0"]}, {"": ["a"], "e1": ["b.1"]}]
    assert (first.unit_sizes, first.elements, second.number) == ([1, 5], 6, 1)


@pytest.mark.parametrize("count", [-1, 0, 4])
def test_there_are_no_more_fragments_than_parts(count):
    keys = [Key("a", 4), Key("b.0", 3, "e0"), Key("c.0", 2, "e0"), Key("d", 1)]
    with pytest.raises(SyncError, match=rf"{count} fragments were asked for, but there are 3 .* use 1 to 3 fragments"):
        cut(keys, count)
    assert len(cut(keys, 3)) == 3


# Views of a fragment


def test_a_view_by_hand():
    """Learnt 3 and sent it, learnt 1 since; the shared value moved by 5 with the update in it: 1 stays on top."""
    float64 = partial(torch.tensor, dtype=torch.float64)
    view = LocalView(float64([10.0, 10.0]), [1, 1])
    assert view.contribute(float64([7.0, 4.0]), 0, [5, 0]).tolist() == [3.0, 0.0], "no tokens, nothing sent"
    local = float64([6.0, 4.0])
    # Not settled yet: the shared value has not got the 3, so the learner keeps it, and the 6 of the other unit as well.
    local = view.take(local, float64([12.0, 10.0]), -1, None)
    assert local.tolist() == [8.0, 4.0] and view.anchor_X.tolist() == [9.0, 10.0] and len(view.in_flight) == 1
    local = view.take(local, float64([5.0, 11.0]), 0, None)
    assert local.tolist() == [4.0, 5.0] and view.in_flight == []
    assert view.contribute(local, 1, [1, 1]).tolist() == [1.0, 6.0]
    mixed = view.take(float64([4.0, 8.0]), float64([8.0, 0.0]), 1, 0.25)
    assert mixed.tolist() == [7.0, 2.0] and view.anchor_X.tolist() == [8.0, 0.0]


# The learner's policy


def published(version, *, settled=-1, incarnation=0, phase=0, seen=0, progress=0.0, fragment=0):
    return Publication(fragment, version, 1, incarnation, settled, progress, seen, phase)


def learner_of(plan, fragments=1):
    plan = plan if isinstance(plan, PolicyPlan) else PolicyPlan((plan,))
    return LearnerPolicy(plan, dict.fromkeys(range(fragments), 1), 1)


def after(policy, *losses, tokens=5):
    for loss in losses:
        policy.step_done({fragment: [tokens] for fragment in range(9)}, loss)
    return policy.due_updates()


def test_a_value_that_comes_again_moves_no_learner_in_the_schedule():
    """After a lost connection the syncer sends what it has; by then another learner may have sent its next update."""
    policy = learner_of(presets.diloco(3))
    after(policy, 1.0, 1.0, 1.0)
    policy.receive(Publication(0, 1, 1, 0, settled=0, progress=3.0, seen=3))
    assert len(policy.takes()) == 1 and not policy.must_wait()
    after(policy, 1.0)
    policy.receive(Publication(0, 1, 1, 0, settled=0, progress=4.5, seen=3))
    assert policy.takes() == [] and policy.position() == 4.0


def test_an_update_tells_what_was_done_since_the_last():
    policy = learner_of(presets.decoupled(2))
    assert after(policy, 4.0) == []
    (first,) = after(policy, 3.0)
    assert (first.clock, first.local_steps, first.tokens, first.loss, first.base_version) == (2, 2, (10,), 3.5, 0)
    policy.receive(published(6))
    assert policy.takes() and policy.clock == 2
    (second,) = after(policy, 2.0, 1.0)
    assert (second.clock, second.local_steps, second.tokens, second.loss, second.base_version) == (4, 2, (10,), 1.5, 6)
    assert (second.id.sequence, second.final, policy.flights(0)) == (1, False, [(0, 2), (1, 4)])
    assert after(policy, 1.0) == []
    (last,) = policy.last_updates()
    assert (last.clock, last.local_steps, last.final) == (5, 1, True) and policy.last_updates() == []


def test_what_is_old_or_for_a_former_life_is_not_taken():
    policy = learner_of(presets.decoupled(2))
    for publication in (published(3), published(2), published(4, incarnation=7), published(3, settled=0)):
        policy.receive(publication)
    assert policy.takes() == [published(3)] and policy.inbox() == []


def test_the_phase_never_goes_back():
    policy = learner_of(
        presets.switch(presets.decoupled(2, 2), presets.decoupled(4, 2), SwitchWhen(step=1)), fragments=2
    )
    policy.receive(published(3, phase=1))
    policy.receive(published(1, phase=0, fragment=1))
    assert len(policy.takes()) == 2 and policy.settings.every == 4


def test_a_learner_waits_when_too_much_is_under_way():
    policy = learner_of(presets.decoupled(1, ahead=1))
    after(policy, 1.0)
    assert not policy.must_wait()
    after(policy, 1.0)
    assert policy.must_wait()
    policy.receive(published(1, settled=0))
    policy.takes()
    assert not policy.must_wait()


def test_a_result_is_taken_when_its_overlap_is_over():
    policy = learner_of(presets.streaming_diloco(4, 1, 2))
    after(policy, 1.0, 1.0, 1.0)
    assert after(policy, 1.0) and not policy.must_wait()
    policy.receive(published(1, settled=0))
    assert policy.takes() == []
    after(policy, 1.0)
    assert policy.takes() == [] and not policy.must_wait()
    after(policy, 1.0)
    assert policy.must_wait() and policy.takes() == [published(1, settled=0)] and not policy.must_wait()


# Merger and participant


def test_the_outer_rate_follows_the_schedule():
    merger = Merger(
        [group(presets.asp(SGD), slices(1))], {0: torch.zeros(12)}, 2, schedule=lambda progress: 1 + progress
    )
    merger.join(0, 0, 0.0)
    (answer,) = merger.arrive(header(0), torch.ones(12), 1.0)
    # One of the two expected learners has made a step, so the rate is 1.5 times 0.1; it is the only member.
    assert torch.allclose(answer.value_X, torch.full((12,), -0.15)) and answer.message.progress == 0.5


def test_what_was_sent_out_does_not_change_later():
    merger = Merger([group(presets.asp(SGD), slices(1))], {0: torch.zeros(12)}, 1)
    merger.join(0, 0, 0.0)
    (first,) = merger.arrive(header(0), torch.ones(12), 1.0)
    before = first.value_X.clone()
    merger.arrive(header(0, 2, 1, base=1), torch.ones(12), 2.0)
    assert torch.equal(first.value_X, before)


def test_the_same_version_is_another_value_after_going_back():
    merger = Merger([group(presets.asp(SGD), slices(1))], {0: torch.zeros(12)}, 1)
    merger.join(0, 0, 0.0)
    saved, tensors = merger.state_dict(), {name: tensor.clone() for name, tensor in merger.tensors().items()}
    (first,) = merger.arrive(header(0), torch.ones(12), 1.0)
    merger.load_state_dict(saved)
    merger.load_tensors(tensors)
    (again,) = merger.arrive(header(0), 2 * torch.ones(12), 1.0)
    assert again.message == first.message and torch.equal(again.value_X, 2 * first.value_X)


def test_a_result_has_an_age_once():
    """Two updates are under way, sent after steps 1 and 2; two publications, which settle one each, are taken after
    step 3."""
    groups = [group(presets.decoupled(1), slices(1))]
    participant = Participant(LearnerSync(groups, 1), VectorModel(problem(2), 1, slices(1), False))
    for _ in range(2):
        participant.step()
        assert len(participant.contribute()) == 1
    participant.step()
    value = torch.zeros(12, dtype=torch.float64)
    participant.receive(published(1, settled=0), value)
    assert set(participant.tensors()) == {f"view/0/{n}" for n in ("anchor", "in_flight/0", "in_flight/1")} | {
        "inbox/0/1"
    }
    participant.receive(published(2, settled=1), value)
    participant.receive(published(2, settled=1), value)
    assert [list(taken.ages) for taken in participant.take()] == [[2], [1]]
    assert set(participant.tensors()) == {"view/0/anchor"}, "what was taken is not kept"


def test_only_what_is_settled_has_an_age():
    groups = [group(presets.decoupled(1), slices(1))]
    participant = Participant(LearnerSync(groups, 1), VectorModel(problem(2), 1, slices(1), False))
    for _ in range(2):
        participant.step()
        participant.contribute()
    participant.receive(published(1, settled=0), torch.zeros(12, dtype=torch.float64))
    assert [list(taken.ages) for taken in participant.take()] == [[1]]
    participant.receive(published(2, settled=0), torch.zeros(12, dtype=torch.float64))
    assert [list(taken.ages) for taken in participant.take()] == [[]]


# Several policies at one syncer


def two(dense, expert):
    """A syncer of fragment 0 under one policy and fragment 1 under another; learners 0 and 1 take part."""
    fragments = group(dense, slices(2)).fragments
    groups = [
        SyncGroup("dense", PolicyPlan((dense,)), fragments[:1]),
        SyncGroup("expert", PolicyPlan((expert,)), fragments[1:]),
    ]
    syncer = Syncer(groups, 3)
    for learner in (0, 1):
        syncer.join(learner, 0, 0.0)
    return syncer


def test_a_newcomer_keeps_step_with_whoever_was_heard_of_last():
    for plans in ((presets.local_sgd(2), presets.local_sgd(3)), (presets.local_sgd(3), presets.local_sgd(2))):
        syncer = two(*plans)
        syncer.arrive(header(0, 2), 1.0)
        syncer.arrive(header(0, 3, fragment=1), 2.0)
        assert only(Welcome, syncer.join(2, 0, 3.0)) == [Welcome(2, 0, 3)]
        assert syncer.progress == (3 + 3 + 0) / 3, "the newcomer counts as having made them"


def test_a_newcomer_keeps_step_with_the_slowest_where_one_policy_is_bound():
    syncer = two(presets.asp(SGD), presets.ssp(SGD, 2))
    syncer.arrive(header(0, 1), 1.0)
    syncer.arrive(header(0, 1, fragment=1), 1.0)
    assert only(Welcome, syncer.join(2, 0, 3.0)) == [Welcome(2, 0, 0)]


def test_one_farewell_is_enough():
    syncer = two(presets.local_sgd(2), presets.local_sgd(3))
    syncer.arrive(header(0, 2), 1.0)
    syncer.arrive(header(0, 3, fragment=1), 1.0)
    decisions = syncer.leave(1, 2.0)
    assert [type(decision) for decision in decisions] == [Farewell, Merge, Publication, Merge, Publication]
    assert syncer.leave(1, 3.0) == [] and syncer.members == {0}
    assert only(Farewell, syncer.join(0, 1, 4.0)) == [Farewell(0, 0)], "the former life is gone"


def test_a_learner_that_has_stopped_holds_nobody_back():
    policy = policy_of(presets.ssp(SGD, 1), learners=2)
    assert only(Publication, policy.arrive(header(0, 1), 1.0))
    assert not only(Publication, policy.arrive(header(0, 2, 1), 2.0))
    assert [p.learner for p in only(Publication, policy.finish(1, 3.0))] == [0]


def test_the_loss_of_a_merge_is_the_mean_of_its_updates():
    policy = policy_of(presets.switch(presets.local_sgd(1), presets.local_sgd(1), SwitchWhen(plateau=1)), learners=2)
    # Means 3, 2 and 2.5: the first learner's loss would have gone up before that.
    for clock, losses in enumerate([(2.0, 4.0), (3.0, 1.0), (1.0, 4.0)], 1):
        assert policy.phase == 0
        for learner, loss in enumerate(losses):
            policy.arrive(header(learner, clock, clock - 1, base=clock - 1, loss=loss), float(clock))
    assert policy.phase == 1


def test_who_left_counts_no_more_in_later_merges():
    policy = policy_of(presets.decoupled(1))
    for learner, tokens in enumerate((30, 10, 20)):
        policy.arrive(header(learner, tokens=(tokens,)), 1.0)
    policy.leave(0, 2.0)
    (merge,) = only(Merge, policy.arrive(header(1, 2, 1, tokens=(10,)), 3.0))
    assert merge.weights == ((10 / 30,),)


def test_a_last_update_says_that_no_further_one_comes():
    policy = policy_of(presets.m_sync(SGD, 2), learners=2)
    policy.arrive(header(0, final=True), 1.0)
    assert len(only(Merge, policy.arrive(header(1), 2.0))[0].updates) == 2
    assert only(Merge, policy.arrive(header(1, 2, 1, base=1), 3.0)), "0 is not at work any more"


# A value that comes again


@pytest.mark.parametrize("plan", [presets.diloco(4), presets.streaming_diloco(4, 1, 1, 0.5), presets.decoupled(4)])
def test_a_value_that_comes_again_does_not_undo_what_was_learnt_since(plan):
    """As after a lost connection; a newcomer has it still to take."""
    learner = LearnerPolicy(PolicyPlan((plan,)), {0: 1}, 0)
    again = Publication(0, 0, 0, 0, settled=-1, progress=0.0, seen=0)
    learner.step_done({0: [1]}, 0.0)
    learner.receive(again)
    assert learner.takes() == [] and learner.inbox() == []
    learner.receive(again)
    assert learner.takes(adopt=True) == [again]
    # One that settles something is taken, whatever its version.
    for _ in range(3):
        learner.step_done({0: [1]}, 0.0)
    assert learner.due_updates()
    settles = Publication(0, 0, 0, 0, settled=0, progress=1.0, seen=4)
    learner.receive(settles)
    if plan.overlap:
        learner.step_done({0: [1]}, 0.0)
    assert learner.takes() == [settles]


def test_what_changes_after_the_last_step_is_sent_too():
    """A delay applies its gradients at the end, when a fragment may just have been sent; experts do not change."""
    groups = [group(presets.diloco(1), slices(2), {1: [slice(0, 1)]})]
    sync = LearnerSync(groups, 0)
    sync.step_done(7, {"e0": 3}, 0.0)
    assert len(sync.due_updates()) == 2
    sync.drained(7)
    assert [(header.id.fragment, header.local_steps, header.tokens) for header in sync.last_updates()] == [(0, 1, (7,))]
    # What has not been sent yet keeps its counts.
    sync.step_done(7, {"e0": 3}, 0.0)
    sync.drained(7)
    assert [header.tokens for header in sync.last_updates()] == [(7,), (3,)]
