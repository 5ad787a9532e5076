"""The parts by themselves: gates, factors, presets, settings, fragments, tallies, positions, the log; by hand."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_async.errors import SyncError
from moe_async.ops.outer import Outer
from moe_async.sync import presets
from moe_async.sync.event_log import EventLog, read_entries
from moe_async.sync.learner_policy import Position
from moe_async.sync.messages import Merge, UpdateHeader, UpdateId
from moe_async.sync.settings import PolicyPlan, SwitchWhen
from moe_async.sync.syncer_policy import SyncerPolicy
from tests.helpers.schedules import cases

SGD = Outer("sgd", 0.1, 0.6)


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


def test_a_position_follows_the_news_and_never_goes_back():
    position = Position(0.0, 0)
    assert [position.at(clock) for clock in (0, 1, 2)] == [0.0, 1.0, 2.0]
    # The others were slower: after 2 of its own steps the mean was 1, and it is 2 now that it has made 3.
    position.hear(1.0, 2, 3)
    assert [position.at(clock) for clock in (3, 4, 5, 6)] == [3.0, 3.0, 4.0, 5.0]
    # They were faster.
    position.hear(9.0, 4, 6)
    assert [position.at(clock) for clock in (6, 7)] == [11.0, 12.0]
    position.hear(9.5, 6, 7)
    assert [position.at(clock) for clock in (7, 8, 9)] == [12.0, 12.0, 12.5]
    assert Position(**asdict(position)).at(9) == 12.5


@given(news=st.lists(st.tuples(st.floats(0, 50), st.integers(0, 9), st.integers(0, 3)), max_size=20))
@cases(50)
def test_a_position_is_monotone(news):
    position, clock, last = Position(0.0, 0), 0, 0.0
    for progress, behind, steps in news:
        for _ in range(steps):
            clock += 1
            assert position.at(clock) >= last
            last = position.at(clock)
        position.hear(progress, max(clock - behind, 0), clock)
        assert position.at(clock) >= last
        last = position.at(clock)
