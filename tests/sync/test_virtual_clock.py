"""What the virtual clock makes of stragglers, links, failures and ends; times are computed by hand."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_async.errors import SyncError
from moe_async.sync import presets
from moe_async.sync.event_log import EventLog
from moe_async.sync.fragments import Fragment, Unit
from moe_async.sync.participant import LearnerStep
from moe_async.sync.settings import Gate, PolicyPlan, PolicySettings, SwitchWhen
from moe_async.sync.syncer import SyncGroup
from moe_async.sync.timing import Failure, Link, Links, StepTimes, Transient, random_failures, read_step_times
from moe_async.sync.virtual_clock import VirtualRun
from tests.helpers.learners import VectorModel, group, prepared, problem, slices, virtual
from tests.helpers.schedules import PIECES, PLANS, SGD, UNITS, cases, pieces_of, schedules

# Learners that die


@pytest.mark.parametrize("name", ["bsp", "ssp by clock", "local_sgd", "diloco", "streaming_diloco"])
@pytest.mark.parametrize("noticed", [0.0, 0.5, 3.0])
def test_nobody_waits_for_a_former_life(name, noticed):
    # A learner that comes back within a round has sent of it in its former life, or owes an update of it now.
    plan, count = PLANS[name]
    for seed in range(12):
        failures = random_failures(3, 0.06, 40, (0.2, 2.0, 6.0)[seed % 3], noticed, seed)
        run, _ = virtual(problem(3, steps=16), plan, pieces_of(count), failures=failures)
        assert all(run.participant(learner).sync.clock == 16 for learner in range(3)), seed


# Changes of policy


SWITCHES = {
    f"{first} to {then}": presets.switch(PLANS[first][0], PLANS[then][0], SwitchWhen(step=5))
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


# Everything finishes


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("flush", [False, True])
@given(case=schedules(failing=True))
@cases(8)
def test_everybody_finishes(name, flush, case):
    plan, count = PLANS[name]
    run, _ = virtual(case.task, plan, pieces_of(count), failures=case.failures, flush=flush)
    for learner in range(case.task.learners):
        assert run.participant(learner).sync.clock == case.task.steps
    assert run.merger.syncer.finished


@pytest.mark.parametrize("flush", [False, True])
@given(case=schedules(failing=True), progress=st.floats(2.0, 9.0))
@cases(15)
def test_everybody_finishes_at_a_common_progress(flush, case, progress):
    for name in ("bsp", "m_sync", "asp", "ssp", "local_sgd", "streaming_diloco", "delayed_nesterov", "decoupled"):
        plan, count = PLANS[name]
        case.task.steps = 40
        run, _ = virtual(
            case.task, plan, pieces_of(count), failures=case.failures, flush=flush, until_progress=progress
        )
        # Nobody makes a step from a position that has come so far.
        assert all(run.participant(learner).sync.position() >= progress for learner in range(case.task.learners)), name


@given(case=schedules(failing=True, most=3))
@cases(25)
def test_two_groups_with_turns_of_their_own_finish(case):
    """Dense parameters and experts under policies of their own, of which one waits and the other does not."""
    for dense, expert in (
        (presets.local_sgd(2), presets.local_sgd(5)),
        (presets.local_sgd(3), presets.decoupled(4, 2, 2, 0.4)),
        (presets.decoupled(2, 1, 2, 0.3, ahead=1), presets.decoupled(5, 2, 2, 0.3, ahead=1)),
        (presets.streaming_diloco(4, 1, 2), presets.diloco(6)),
        (presets.bsp(SGD), presets.asp(SGD)),
        (presets.ssp(SGD, 2), presets.bsp(SGD)),
        (presets.ssp(SGD, 2, "clock"), presets.ssp(SGD, 1)),
    ):
        groups = two_groups(dense, expert)
        sends = dense.contribution == "grad"
        run = VirtualRun(
            groups,
            lambda learner, life, clock, sends=sends: VectorModel(case.task, learner, PIECES, sends),
            case.task.learners,
            case.task.steps,
            StepTimes(given={
                learner: [case.task.compute(learner, n) for n in range(1, case.task.steps + 1)]
                for learner in range(case.task.learners)
            }),
            Links(Link(latency=0.1), Link(latency=0.2)),
            case.failures,
        )  # fmt: skip
        run.run()
        assert all(run.participant(learner).sync.clock == case.task.steps for learner in range(case.task.learners))


def two_groups(dense, expert):
    """The first of three fragments under one policy, the others under another."""
    fragments = group(dense, PIECES).fragments
    if expert.fragments == 1:
        key = tuple(key for fragment in fragments[1:] for key in fragment.keys)
        rest = (Fragment(1, (Unit("", key[:1]),)), Fragment(2, (Unit("", key[1:]),)))
    else:
        rest = fragments[1:]
    return [
        SyncGroup("dense", PolicyPlan((dense,)), fragments[:1]),
        SyncGroup("expert", PolicyPlan((expert,)), rest),
    ]


# Who leaves for ever is not waited for, and loses only what it has not sent


@pytest.mark.parametrize("name", PLANS)
def test_nobody_waits_for_one_that_is_gone(name):
    plan, count = PLANS[name]
    for at in (0.0, 1.9, 7.3):
        run, _ = virtual(problem(3), plan, pieces_of(count), failures=[Failure(0, at, None, 0.7)])
        assert run.participant(0) is None and run.figures[0].away == 0.0
        assert all(run.participant(learner).sync.clock == 24 for learner in (1, 2))
        assert not run.merger.syncer.members & {0}


def test_what_is_on_the_wire_is_merged():
    """Learner 1 dies at 4.5, half a second after it has sent on a link on which that takes 9 seconds. It is counted out
    and back in as soon as that has come, however early the failure is noticed."""
    task = problem(2, 8, up=(0.1, 9.0), down=(0.1, 0.1))
    task.compute = lambda learner, n: 1.0
    run, _ = virtual(task, presets.decoupled(2), failures=[Failure(1, 4.5, 0.2, 0.0)])
    events = [(round(e["time"], 9), e["event"]) for e in run.log.entries if 1 in (e.get("learner"), *senders(e))]
    assert [event for event in events if event[1] != "take"][:6] == [
        (0.0, "welcome"), (2.0, "send"), (4.0, "send"), (4.5, "end"), (11.0, "merge"), (13.0, "merge"),
    ]  # fmt: skip
    assert (13.0, "farewell") in events and (13.0, "welcome") in events
    assert run.figures[1].lost_steps == 0 and run.figures[1].away == pytest.approx(8.5)
    assert not any(e["event"] == "discard" for e in run.log.entries)


def senders(entry):
    updates = entry["updates"] if entry["event"] == "merge" else []
    return [update["learner"] for update in updates] + (
        [entry["header"]["id"]["learner"]] if entry["event"] == "send" else []
    )


def test_only_what_was_not_sent_is_lost():
    """Learner 0 has sent after step 4 and dies in its step 7: two steps, and the one it was at, do not count."""
    task = problem(2, 12, up=(0.1, 0.1), down=(0.1, 0.1))
    task.compute = lambda learner, n: 1.0
    run, _ = virtual(task, presets.decoupled(4), failures=[Failure(0, 6.5, None, 0.0)])
    figures = run.figures[0]
    assert (figures.steps, figures.lost_steps, figures.busy, figures.rounds) == (6, 2, 6.0, 1)
    assert [e["updates"] for e in run.log.entries if e["event"] == "merge" and 0 in senders(e)] == [
        ({"learner": 0, "incarnation": 0, "sequence": 0, "fragment": 0},)
    ]


def test_a_late_joiner_takes_the_newest_values_and_keeps_step():
    """It is away from the beginning and joins at 10.05: the others have sent after steps 4 and 8, so it begins at 8."""
    task = problem(3, 20, up=(0.01, 0.01, 0.01), down=(0.02, 0.02, 0.02))
    task.compute = lambda learner, n: 1.0
    run, trace = virtual(task, presets.local_sgd(4), failures=[Failure(2, 0.0, 10.05, 0.0)])
    assert run.figures[2].steps == 12 and run.figures[2].away == pytest.approx(10.05)
    time, theta = trace.started[2, 9]
    assert time == pytest.approx(10.07) and torch.equal(theta, trace.shared[0, 2])
    merges = [e for e in run.log.entries if e["event"] == "merge"]
    assert [len(e["updates"]) for e in merges] == [2, 2, 3, 3, 3]
    # Its model is made for the step at which it begins.
    assert (2, 1) in trace.models and (2, 9) in trace.started and (2, 2) not in trace.started


@pytest.mark.parametrize(("plan", "clock"), [(presets.ssp(SGD, 2), 2), (presets.asp(SGD), 6)])
def test_a_joiner_is_as_far_as_the_slowest_only_under_a_bound(plan, clock):
    """At 6.5 learner 0 has made 6 steps (4 under the bound of 2), learner 1, of 3 seconds a step, two."""
    task = problem(3, 12, up=(0.01,) * 3, down=(0.01,) * 3)
    task.compute = lambda learner, n: (1.0, 3.0, 1.0)[learner]
    run, _ = virtual(task, plan, failures=[Failure(2, 0.0, 6.5, 0.0)])
    assert [e["clock"] for e in run.log.entries if e["event"] == "welcome" and e["incarnation"] == 1] == [clock]


def test_a_barrier_is_joined_after_the_round_that_has_begun():
    """Only learner 2, which has died since, has sent of the round of step 2: the newcomer owes nothing of it."""
    task = problem(3, 6, up=(0.01,) * 3, down=(0.01,) * 3)
    task.compute = lambda learner, n: (3.0, 3.0, 1.0)[learner]
    run, _ = virtual(task, presets.local_sgd(2), failures=[Failure(2, 2.5, 1.0, 0.0)])
    assert [e["clock"] for e in run.log.entries if e["event"] == "welcome" and e["incarnation"] == 1] == [2]
    merges = [[update["incarnation"] for update in e["updates"]] for e in run.log.entries if e["event"] == "merge"]
    assert merges == [[0, 0, 0], [0, 0, 1], [0, 0, 1]]


def test_a_gradient_of_a_newcomer_is_of_the_version_of_its_round():
    """Under bsp it gets its values when the round that has begun is over, and its gradient is merged with the next."""
    task = problem(3, 5, up=(0.01,) * 3, down=(0.01,) * 3)
    task.compute = lambda learner, n: (1.0, 3.0, 1.0)[learner]
    run, trace = virtual(task, presets.bsp(SGD), failures=[Failure(2, 0.5, 1.0, 0.0)])
    assert not any(e["event"] == "discard" for e in run.log.entries)
    assert trace.started[2, 2][0] == pytest.approx(3.02) and torch.equal(trace.started[2, 2][1], trace.shared[0, 1])
    assert [len(e["updates"]) for e in run.log.entries if e["event"] == "merge"] == [2, 3, 3, 3, 3]


# Times


def test_persistent_stragglers():
    times = StepTimes(2.0, {1: 5.0, 2: 0.5})
    assert [times.of(learner, 3) for learner in range(3)] == [2.0, 10.0, 1.0]


def test_transient_stragglers_and_jitter_follow_from_the_seed():
    times = StepTimes(2.0, transient=Transient(0.25, 6.0), seed=3)
    drawn = [[times.of(learner, n) for n in range(1, 401)] for learner in (0, 1)]
    for row in drawn:
        assert set(row) == {2.0, 12.0} and 60 < row.count(12.0) < 140
    assert drawn[0] != drawn[1]
    again = StepTimes(2.0, transient=Transient(0.25, 6.0), seed=3)
    assert [again.of(1, n) for n in range(400, 0, -1)] == drawn[1][::-1]
    other = StepTimes(2.0, transient=Transient(0.25, 6.0), seed=4)
    assert [other.of(1, n) for n in range(1, 401)] != drawn[1]
    jittered = [StepTimes(2.0, jitter=0.1).of(0, n) for n in range(1, 401)]
    assert len(set(jittered)) == 400 and abs(sum(jittered) / 400 - 2.0) < 0.05
    assert 0.15 < torch.tensor(jittered).std() < 0.25
    assert min(StepTimes(2.0, jitter=9.0).of(0, n) for n in range(1, 100)) == 0.1


def test_given_times_go_on_with_the_last():
    times = StepTimes(9.0, {0: 2.0}, jitter=0.5, given={0: [1.0, 4.0]})
    assert [times.of(0, n) for n in (1, 2, 3, 99)] == [1.0, 4.0, 4.0, 4.0]


def test_step_times_from_a_file(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("seconds,learner,host\n1.5,0,a\n2,1,b\n0.25,0,a\n")
    assert read_step_times(path) == {0: [1.5, 0.25], 1: [2.0]}
    run, trace = virtual_with(StepTimes(given=read_step_times(path)))
    assert run.now > 0 and trace[0] == [0.0, 1.5, 1.75, 2.0] and trace[1] == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no lines; give learner,seconds"),
        ("learner,seconds\n", "has no lines; give learner,seconds"),
        ("learner,time\n0,1\n", "line 2 of .* needs a learner's number and the seconds"),
        ("learner,seconds\n0,1\n0\n", "line 3 of .* needs a learner's number"),
        ("learner,seconds\n0,1\nzero,1\n", "line 3 of .* under the headings learner,seconds"),
        ("learner,seconds\n0.5,1\n", "line 2"),
        ("learner,seconds\n0,fast\n", "line 2"),
        ("learner,seconds\n0,0\n", "line 2 of .*: learners count from 0 and a step takes more than 0 seconds"),
        ("learner,seconds\n0,-1\n", "line 2"),
        ("learner,seconds\n0,nan\n", "line 2"),
        ("learner,seconds\n-1,1\n", "line 2"),
    ],
)
def test_what_is_wrong_with_a_file_of_step_times(tmp_path, text, message):
    path = tmp_path / "times.csv"
    path.write_text(text)
    with pytest.raises(SyncError, match=message):
        read_step_times(path)


def virtual_with(times, plan=None, steps=4, learners=2, links=None, **options):
    """A run with given times, and the start of every learner's steps."""
    task, starts = problem(4, steps), {learner: [] for learner in range(learners)}
    plan = plan or presets.decoupled(100)
    run = VirtualRun(
        [group(plan, slices(1))],
        lambda learner, life, clock: VectorModel(task, learner, slices(1), plan.contribution == "grad"),
        learners,
        steps,
        times,
        links,
        observe=lambda time, learner, participant: starts[learner].append(time),
        **options,
    )
    run.run()
    return run, starts


def test_messages_follow_one_another_on_a_link():
    """12 values of 8 bytes and a header of 4 make 100 bytes, 2 s at 50 B/s up and 0.5 s at 200 B/s down. Each learner
    sends after every step of one second, waits for nothing, and has 0.25 s of latency.

    Learner 0 sends at 1, 2, 3, 4: the link is busy until 3, 5, 7, 9, the syncer has them at 3.25, 5.25, 7.25, 9.25.
    """
    plan = presets.decoupled(1, ahead=99)
    links = Links(Link(50.0, 0.25), Link(200.0, 0.25), header_bytes=4)
    run, starts = virtual_with(StepTimes(), plan, learners=1, links=links)
    assert starts == {0: [0.0, 1.0, 2.0, 3.0]}
    merges = [e["time"] for e in run.log.entries if e["event"] == "merge"]
    assert merges == [3.25, 5.25, 7.25, 9.25]
    figures = run.figures[0]
    assert (figures.sent, figures.rounds, figures.waited, figures.busy) == (400, 4, 0.0, 4.0)
    # The last answer leaves at 9.25 and is there half a second and the latency later.
    assert run.now == 10.0 and figures.received == 400


def test_slow_links_make_learners_wait_and_busy_links_make_messages_wait():
    """As above with bsp: up and down take 2.25 and 0.75 s, so a step every 4 s. With one link 4 times as slow down, all
    wait for that learner."""
    links = Links(Link(50.0, 0.25), Link(200.0, 0.25), header_bytes=4)
    run, starts = virtual_with(StepTimes(), presets.bsp(SGD), links=links)
    assert starts == {0: [0.0, 4.0, 8.0, 12.0], 1: [0.0, 4.0, 8.0, 12.0]}
    assert run.figures[0].waited == 12.0 and run.summary()[0]["waited"] == 12.0 / run.now
    slow = Links(links.up, links.down, {0: Link(100.0, 0.5)}, {1: Link(50.0, 0.0)}, header_bytes=4)
    run, starts = virtual_with(StepTimes(), presets.bsp(SGD), links=slow)
    # 1 is at the syncer at 3.25 (0 at 2.5), so 0 goes on at 4.0 and 1 at 5.25; after that 1 is always the later one.
    assert starts == {0: [0.0, 4.0, 9.25, 14.5], 1: [0.0, 5.25, 10.5, 15.75]}


def test_units_without_tokens_do_not_travel():
    task = problem(1, 2, unit_tokens=lambda learner, n: [0, 3, 1, 0, 2])
    run, _ = virtual(task, presets.decoupled(2, 3), PIECES, UNITS)
    sizes = {0: 3, 1: 2 + 2, 2: 1}
    sent = [e["header"]["id"]["fragment"] for e in run.log.entries if e["event"] == "send"]
    assert run.figures[0].sent == sum(256 + 8 * sizes[fragment] for fragment in sent)


# Ends


def test_a_run_may_stop_and_go_on_at_any_time():
    task = problem(3)
    whole, trace = virtual(task, PLANS["decoupled"][0], PIECES)
    run, parts = prepared(task, PLANS["decoupled"][0], PIECES)
    for until in (0.0, 0.5, 3.3, 3.3, 17.0):
        run.run(until)
        assert run.now == until
        assert all(entry["time"] <= until for entry in run.log.entries)
    run.run()
    assert run.log.entries == whole.log.entries and run.now == whole.now
    assert all(torch.equal(parts.shared[key], value) for key, value in trace.shared.items())


def test_a_common_progress_ends_the_run():
    """In 18 s one learner makes 18 steps and the other 6, 12 on average: both stop there, at the same time nearly."""
    task = problem(2, 100, up=(0.01, 0.01), down=(0.01, 0.01))
    task.compute = lambda learner, n: (1.0, 3.0)[learner]
    run, _ = virtual(task, presets.asp(SGD), until_progress=12.0)
    steps = [run.figures[learner].steps for learner in (0, 1)]
    assert abs(steps[0] - 18) <= 1 and abs(steps[1] - 6) <= 1


def test_a_run_needs_an_end():
    with pytest.raises(SyncError, match="needs an end: give steps or until_progress"):
        VirtualRun([group(presets.local_sgd(2), slices(1))], lambda *_: None, 1)


def test_learners_that_wait_for_ever_are_an_error():
    """No preset does that: here a learner waits for the result of an update of which the gate wants a second one."""
    plan = PolicySettings(every=2, gate=Gate("quorum", 2), overlap=0)
    run, _ = prepared(problem(2, 4), plan)
    # The other one is a member that never says anything.
    run._lives[1].done = True
    run._queue = [entry for entry in run._queue if entry[2] != 1]
    with pytest.raises(SyncError, match=r"learners \[0\] wait for what never comes"):
        run.run()


@pytest.mark.parametrize("name", [*PLANS, "news of others while waiting"])
def test_shares_of_time_add_up(name):
    plan, count = PLANS.get(name, (presets.decoupled(2, ahead=0), 1))
    run, _ = virtual(problem(3), plan, pieces_of(count))
    ends = {e["learner"]: e["time"] for e in run.log.entries if e["event"] == "end"}
    for learner, figures in run.figures.items():
        assert figures.busy + figures.waited == pytest.approx(ends[learner])
        assert figures.tokens == sum(problem(3).tokens(learner, n) for n in range(1, 25))


def test_random_failures_follow_from_the_seed():
    failures = random_failures(3, 0.1, 200.0, 5.0, 0.5, seed=2)
    assert failures == random_failures(3, 0.1, 200.0, 5.0, 0.5, seed=2)
    assert failures != random_failures(3, 0.1, 200.0, 5.0, 0.5, seed=3)
    assert failures == sorted(failures, key=lambda failure: failure.at) and failures[-1].at < 200.0
    for learner in range(3):
        times = [failure.at for failure in failures if failure.learner == learner]
        assert 6 < len(times) < 25 and all(b - a > 5.0 for a, b in pairwise(times))
    assert not random_failures(3, 0.0, 200.0, 5.0)
    # One more learner changes nothing for the others.
    more = random_failures(4, 0.1, 200.0, 5.0, 0.5, seed=2)
    assert [failure for failure in more if failure.learner < 3] == failures


# Many learners


class Stub:
    """A model without content."""

    def __init__(self):
        self.value = torch.zeros(1)

    def step(self, number, position):
        return LearnerStep(1, {}, 0.0)

    def read(self, fragment):
        return self.value

    def write(self, fragment, value_X):
        self.value = value_X

    def gradient(self, fragment):
        return self.value


@pytest.mark.parametrize("name", ["bsp", "ssp", "ssp by clock", "local_sgd", "decoupled"])
def test_thousands_of_learners(name):
    """A merge looks at all updates and members, but an arrival does not: else this would take minutes."""
    learners, steps = (2000 if name in ("bsp", "decoupled") else 1000), 2
    plan = {
        "bsp": presets.bsp(SGD),
        "ssp": presets.ssp(SGD, 1),
        "ssp by clock": presets.ssp(SGD, 1, "clock"),
        "local_sgd": presets.local_sgd(1),
        "decoupled": presets.decoupled(1, quorum=1000, grace=0.1),
    }[name]
    run = VirtualRun(
        [group(plan, [slice(0, 1)])],
        lambda *_: Stub(),
        learners,
        steps,
        StepTimes(jitter=0.2),
        log=EventLog(keep=False),
    )
    run.run()
    assert sum(figures.steps for figures in run.figures.values()) == learners * steps
