"""What holds on every schedule, whatever the policy does: the list of invariants, tried on random schedules.

V1, V2 ... are the numbers of the list.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_async.errors import SyncError
from moe_async.ops.outer import Outer, outer_step
from moe_async.sync import presets
from moe_async.sync.event_log import EventLog, read_entries
from moe_async.sync.fragments import Key, cut
from moe_async.sync.merger import Merger
from moe_async.sync.messages import UpdateHeader, UpdateId
from moe_async.sync.participant import Participant
from moe_async.sync.replay import Replay
from moe_async.sync.settings import Combine, Gate, PolicySettings, SwitchWhen
from moe_async.sync.syncer import LearnerSync
from tests.helpers.learners import VectorModel, group, prepared, problem, slices, virtual
from tests.helpers.schedules import PIECES, PLANS, SGD, UNITS, cases, pieces_of, schedules


def same(found, wanted, started=True):
    """Bit-equal values, and equal times."""
    if started:
        assert found.started.keys() == wanted.started.keys()
        for key, (time, theta) in wanted.started.items():
            assert found.started[key][0] == time and torch.equal(found.started[key][1], theta), key
    assert found.shared.keys() == wanted.shared.keys()
    assert all(torch.equal(found.shared[key], value) for key, value in wanted.shared.items())
    assert found.ended.keys() == wanted.ended.keys()
    assert all(torch.equal(found.ended[learner], theta) for learner, theta in wanted.ended.items())


def apart(found, wanted):
    """How far two runs' shared values are from each other at the same number of merges."""
    return max(float((a - b).abs().max()) for a, b in zip(found.path, wanted.path, strict=False))


def entries_of(run, event):
    return [entry for entry in run.log.entries if entry["event"] == event]


def id_of(entry):
    return UpdateId(**entry)


def as_json(value):
    return json.loads(json.dumps(value))


# V1, V2, V3, V5: bounded clocks


@pytest.mark.parametrize("aggregate", ["push", "clock"])
@given(case=schedules(failing=True), bound=st.integers(0, 3))
@cases(25)
def test_no_step_is_started_too_far_ahead(aggregate, case, bound):
    """V1: a learner that has finished n steps starts the next only if it is not more than the bound ahead of the
    slowest. The steps that learners have *finished* may differ by one more."""
    runs, participants = [], {}

    def watch(time, learner, participant):
        participants[learner] = participant
        if not runs:
            return
        members = runs[0].merger.syncer.policies[0].members
        lives = [(participants[other].sync, member) for other, member in members.items() if not member.final]
        clocks = [
            sync.clock if sync.policies[0].incarnation == member.incarnation else member.joined_clock
            for sync, member in lives
        ]
        assert participant.sync.clock - min(clocks) <= bound

    run, _ = prepared(case.task, presets.ssp(SGD, bound, aggregate), failures=case.failures, observe=watch)
    runs.append(run)
    run.run()


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_is_reached_and_finished_steps_go_one_further(bound):
    started, finished = [], []

    def watch(time, learner, participant):
        clocks[learner] = participant
        started.append(participant.sync.clock - min(other.sync.clock for other in clocks.values()))

    class Watched(VectorModel):
        def step(self, number, position):
            finished.append(number - min(other.sync.clock for other in clocks.values()))
            return super().step(number, position)

    clocks = {}
    virtual(problem(2, 12, seconds=(1.0, 5.0)), presets.ssp(SGD, bound), observe=watch, kind=Watched)
    assert max(started) == bound and max(finished) == bound + 1


@pytest.mark.parametrize("aggregate", ["push", "clock"])
@given(case=schedules(fewest=2), bound=st.integers(0, 3))
@cases(25)
def test_what_a_bounded_read_contains(aggregate, case, bound):
    """V2: what is taken after n steps contains everything that any learner sent after n - bound steps or fewer, and
    with one optimizer step per push all that the reader sent itself."""
    run, _ = virtual(case.task, presets.ssp(SGD, bound, aggregate))
    clock_of, merged, taken = {}, {0: set()}, defaultdict(set)
    for entry in run.log.entries:
        if entry["event"] == "send":
            clock_of[id_of(entry["header"]["id"])] = entry["header"]["clock"]
        elif entry["event"] == "merge":
            merged[entry["version"]] = merged[entry["version"] - 1] | {id_of(update) for update in entry["updates"]}
        elif entry["event"] == "take":
            contained = {(update.learner, clock_of[update]) for update in merged[entry["version"]]}
            n, reader = entry["clock"], entry["learner"]
            taken[reader].add(n)
            for learner in range(case.task.learners):
                wanted = n if learner == reader and aggregate == "push" else n - bound
                assert {(learner, clock) for clock in range(1, wanted + 1)} <= contained
    assert all(clocks == set(range(1, case.task.steps + 1)) for clocks in taken.values())


@given(case=schedules())
@cases(20)
def test_without_a_bound_it_is_asynchronous(case):
    """V3."""
    same(virtual(case.task, presets.ssp(SGD, 10**6))[1], virtual(case.task, presets.asp(SGD))[1])


@given(case=schedules())
@cases(20)
def test_bound_zero_by_clock_is_bulk_synchronous(case):
    """V5."""
    same(virtual(case.task, presets.ssp(SGD, 0, "clock"))[1], virtual(case.task, presets.bsp(SGD))[1])


def test_bound_zero_by_push_is_not_bulk_synchronous():
    """V5, the other way: with momentum the velocity decays once per push instead of once per step. All gradients are of
    one value all the same, so that without momentum nothing but the rounding differs."""
    for momentum in (0.0, 0.6):
        outer = Outer("sgd", 0.1, momentum)
        ends = [virtual(problem(3), plan)[1].ended[0] for plan in (presets.ssp(outer, 0), presets.bsp(outer))]
        difference = float((ends[0] - ends[1]).abs().max())
        assert difference > 1e-2 if momentum else difference < 1e-13


# V7, V9, V10, V11: policies that coincide


@given(case=schedules())
@cases(15)
def test_averaging_every_step_is_bulk_synchronous(case):
    """V7: with SGD inside, also with momentum, for it is linear; not to the last bit, as w - (w - local) rounds."""
    runs = [
        virtual(case.task, plan)[1]
        for plan in (presets.diloco(1, lr=1.0, momentum=0.0), presets.local_sgd(1), presets.bsp(SGD))
    ]
    for key, value in runs[2].shared.items():
        assert all(torch.allclose(run.shared[key], value, rtol=0, atol=1e-14) for run in runs)


class Adam(VectorModel):
    """The vector under AdamW, whose step is not linear in the gradient."""

    moments = (0.9, 0.999)

    def step(self, number, position):
        theta = self.theta
        done = super().step(number, position)
        self.theta = self.moved(theta, self.last, number)
        return done

    def moved(self, theta, gradient, number):
        a, b = self.moments
        state = self.__dict__.setdefault("state", [torch.zeros_like(theta), torch.zeros_like(theta)])
        state[0] = a * state[0] + (1 - a) * gradient
        state[1] = b * state[1] + (1 - b) * gradient.square()
        step = (state[0] / (1 - a**number)) / ((state[1] / (1 - b**number)).sqrt() + 1e-8)
        return theta - self.problem.lr * (step + 0.01 * theta)


def test_averaging_every_step_is_not_bulk_synchronous_under_adam():
    """V9: averaging the weights after each step of AdamW is *not* AdamW on the mean gradient. It is no error: the
    second moments of single learners are larger than those of the mean."""
    task = problem(3, steps=10)
    _, found = virtual(task, presets.local_sgd(1), kind=Adam)
    theta, adam = task.initial, Adam(task, 0, slices(1), False)
    for n in range(1, task.steps + 1):
        gradients = [task.gradient(learner, n, theta) for learner in range(task.learners)]
        theta = adam.moved(theta, torch.stack(gradients).mean(0), n)
    assert 1e-2 < float((found.shared[0, task.steps] - theta).abs().max()) < 1
    # With one learner they are one and the same.
    alone = problem(1, steps=10)
    _, found = virtual(alone, presets.local_sgd(1), kind=Adam)
    theta, adam = alone.initial, Adam(alone, 0, slices(1), False)
    for n in range(1, alone.steps + 1):
        theta = adam.moved(theta, alone.gradient(0, n, theta), n)
    assert torch.allclose(found.shared[0, alone.steps], theta, rtol=0, atol=1e-14)


@given(case=schedules())
@cases(15)
def test_delayed_nesterov_of_one_is_nesterov(case):
    """V10."""
    nesterov = PolicySettings(every=3, gate=Gate("each"), outer=Outer("nesterov", 0.7, 0.9))
    found, wanted = virtual(case.task, presets.delayed_nesterov(3, 1))[1], virtual(case.task, nesterov)[1]
    assert found.shared.keys() == wanted.shared.keys()
    assert all(torch.allclose(found.shared[key], value, rtol=0, atol=1e-12) for key, value in wanted.shared.items())


@given(count=st.integers(1, 6), rounds=st.integers(1, 4), seed=st.integers(0, 9))
@cases(25)
def test_delayed_nesterov_of_all_is_diloco(count, rounds, seed):
    """V10: as many contributions from one value as are gathered move it by a Nesterov step with their mean."""
    draw = torch.Generator().manual_seed(seed)
    found, wanted = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    late, at_once = {}, {}
    for _ in range(rounds):
        directions = torch.randn(count, 5, generator=draw, dtype=torch.float64)
        for direction in directions:
            outer_step(Outer("delayed_nesterov", 0.7, 0.9, count), found, direction, late, 1.0)
        outer_step(Outer("nesterov", 0.7, 0.9), wanted, directions.mean(0), at_once, 1.0)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-14 * 10)


@given(case=schedules(), overlap=st.integers(0, 4))
@cases(15)
def test_streaming_that_mixes_nothing_in_is_no_communication(case, overlap):
    """V11: bit for bit, at every step of every learner."""
    _, found = virtual(case.task, presets.streaming_diloco(5, 3, overlap, 1.0), PIECES)
    for learner in range(case.task.learners):
        theta, velocity = case.task.initial, torch.zeros_like(case.task.initial)
        for n in range(1, case.task.steps + 1):
            assert torch.equal(found.started[learner, n][1], theta)
            velocity = case.task.momentum * velocity + case.task.gradient(learner, n, theta)
            theta = theta - case.task.lr * velocity


@given(case=schedules(), every=st.integers(1, 5))
@cases(15)
def test_streaming_of_one_fragment_without_overlap_is_diloco(case, every):
    """V11."""
    same(
        virtual(case.task, presets.streaming_diloco(every, 1, 0, 0.0))[1], virtual(case.task, presets.diloco(every))[1]
    )


@given(case=schedules(steps=(12, 19)), every=st.integers(3, 6))
@cases(15)
def test_each_fragment_is_sent_once_a_period(case, every):
    """V11, V20: and at the same steps by all, whatever their pace."""
    for plan in (presets.streaming_diloco(every, 3, 1), presets.decoupled(every, 3, 2, 0.5)):
        run, _ = virtual(case.task, plan, PIECES)
        sent = defaultdict(list)
        for entry in entries_of(run, "send"):
            sent[entry["header"]["id"]["learner"]].append((entry["header"]["clock"], entry["header"]["id"]["fragment"]))
        assert all(order == sent[0] for order in sent.values())
        for fragment in range(3):
            clocks = [clock for clock, number in sent[0] if number == fragment]
            assert {b - a for a, b in pairwise(clocks)} <= {every} and len(clocks) >= case.task.steps // every - 1
        # Never two fragments of one period at one step, as long as there are steps enough.
        assert len({clock for clock, _ in sent[0]}) == len(sent[0])


# V12, V16: nothing is lost and nothing counts twice


class Moving(VectorModel):
    """Notes how far its own steps moved it."""

    def step(self, number, position):
        before = self.theta
        done = super().step(number, position)
        self.moved = getattr(self, "moved", torch.zeros_like(before)) + (before - self.theta)
        return done


@pytest.mark.parametrize("flush", [False, True])
@given(
    case=schedules(failing=True),
    options=st.sampled_from([
        {}, {"quorum": 2, "grace": 1.0}, {"quorum": 2, "over": "arrived"}, {"max_lag": 1}, {"ahead": 0},
    ]),
    experts=st.booleans(),
    until=st.none() | st.floats(1, 20),
)  # fmt: skip
@cases(60)
def test_what_was_learnt_is_somewhere(flush, case, options, experts, until):
    """V12: what a learner's steps moved is what it sent plus what it has not sent, unit by unit; and what it sent is
    merged, discarded, waiting, or on its way."""
    participants, payloads = {}, {}

    def watch(time, learner, participant):
        key = (learner, participant.sync.policies[0].incarnation)
        if key in participants:
            return
        participants[key], contribute = participant, participant.contribute

        def noting(last=False):
            updates = contribute(last)
            payloads.update({header.id: payload.clone() for header, payload in updates})
            return updates

        participant.contribute = noting

    plan = presets.decoupled(4, 3, **options)
    run, trace = prepared(
        case.task, plan, PIECES, UNITS if experts else None, case.failures, watch, Moving, flush=flush
    )
    run.run(until)
    for (learner, incarnation), participant in participants.items():
        model = trace.models[learner, incarnation]
        moved = getattr(model, "moved", torch.zeros_like(model.theta))
        for number, piece in enumerate(PIECES):
            mine = [
                p
                for u, p in payloads.items()
                if (u.learner, u.incarnation, u.fragment) == (learner, incarnation, number)
            ]
            unsent = participant.views[number].anchor_X - model.read(number)
            assert torch.allclose(sum(mine, unsent), moved[piece], rtol=0, atol=1e-12)
            finished = (
                flush and until is None and model is trace.models[max(k for k in trace.models if k[0] == learner)]
            )
            if finished and not experts:
                assert torch.allclose(unsent, torch.zeros_like(unsent), rtol=0, atol=1e-12)

    sent = [id_of(entry["header"]["id"]) for entry in entries_of(run, "send")]
    merged = [id_of(update) for entry in entries_of(run, "merge") for update in entry["updates"]]
    discarded = [id_of(entry["update"]) for entry in entries_of(run, "discard")]
    waiting = list(run.merger.syncer.pending())
    settled = merged + discarded + waiting
    assert set(sent) == payloads.keys() and len(set(sent)) == len(sent)
    assert len(set(settled)) == len(settled) and set(settled) <= set(sent)
    if until is None:
        assert len(settled) == len(sent)
        assert max_lag_only(run) or not discarded
    # The shared value is the first one less what was merged, with the factors of the log.
    values = {number: case.task.initial[piece].clone() for number, piece in enumerate(PIECES)}
    for entry in entries_of(run, "merge"):
        sizes = run.merger.values[entry["fragment"]].unit_sizes
        for update, factors in zip(entry["updates"], entry["weights"], strict=True):
            scale = torch.repeat_interleave(torch.tensor(factors, dtype=torch.float64), torch.tensor(sizes))
            values[entry["fragment"]] -= scale * payloads[id_of(update)]
    for number, value in values.items():
        assert torch.allclose(run.merger.values[number].value_X, value, rtol=0, atol=1e-12)


def max_lag_only(run):
    return all("versions behind" in entry["reason"] for entry in entries_of(run, "discard"))


GATES = {
    "each": PolicySettings(gate=Gate("each"), outer=Outer("sgd", 0.5, 0.5)),
    "first": PolicySettings(gate=Gate("first", 2), max_lag=1),
    "quorum": PolicySettings(gate=Gate("quorum", 2, 1.5), combine=Combine("tokens", "members", 0.5)),
    "barrier": PolicySettings(),
}


@pytest.mark.parametrize("gate", GATES)
@given(data=st.data())
@cases(40)
def test_what_is_accepted_is_applied_once(gate, data):
    """V16: whatever is sent again, and however messages of different learners overtake one another. Those of one
    learner and life come in order."""
    learners, fragments = 3, 2
    plan, groups = GATES[gate], [group(GATES[gate], slices(fragments))]
    sizes = [piece.stop - piece.start for piece in slices(fragments)]
    initial = {number: torch.zeros(size, dtype=torch.float64) for number, size in enumerate(sizes)}
    merger = Merger(groups, initial, learners)
    alive, lives = {}, Counter()
    history, first_payloads, accepted = [], {}, []
    now, noise = 0.0, torch.Generator().manual_seed(3)

    def payload(fragment):
        return torch.randn(sizes[fragment], generator=noise, dtype=torch.float64)

    def join(learner):
        alive[learner] = (lives[learner], [0] * fragments, [0])
        merger.join(learner, lives[learner], now)
        lives[learner] += 1

    for learner in range(learners):
        join(learner)
    for _ in range(data.draw(st.integers(5, 40))):
        now += data.draw(st.sampled_from([0.0, 0.5, 2.0]))
        action = data.draw(st.sampled_from(["send", "send", "send", "again", "again", "join", "leave", "tick"]))
        learner = data.draw(st.integers(0, learners - 1))
        if action == "send" and learner in alive:
            life, sequences, clock = alive[learner]
            fragment = data.draw(st.integers(0, fragments - 1))
            clock[0] += 1
            update = UpdateId(learner, life, sequences[fragment], fragment)
            sequences[fragment] += 1
            version = merger.syncer.version(fragment)
            header = UpdateHeader(update, max(version - data.draw(st.integers(0, 2)), 0), clock[0], 1, (clock[0],))
            history.append(header)
            first_payloads[update] = payload(fragment)
            accepted.append(update)
            merger.arrive(header, first_payloads[update], now)
        elif action == "again" and history:
            header = data.draw(st.sampled_from(history))
            merger.arrive(header, payload(header.id.fragment), now)
        elif action == "join":
            join(learner)
        elif action == "leave" and alive.pop(learner, None):
            merger.leave(learner, now)
        elif action == "tick":
            merger.tick(now)
    log = merger.log.entries
    merged = [update for entry in log if entry["event"] == "merge" for update in map(id_of, entry["updates"])]
    refused = [id_of(entry["update"]) for entry in log if entry["event"] == "discard" and "versions" in entry["reason"]]
    waiting = merger.syncer.pending()
    assert len(set(merged)) == len(merged)
    assert sorted([*merged, *refused, *waiting]) == sorted(accepted)
    # What waits, and no copy of anything else, is still held.
    held = {name for name in merger.tensors() if name.startswith("payload/")}
    assert held == {f"payload/{u.learner}/{u.incarnation}/{u.sequence}/{u.fragment}" for u in waiting}
    # The copy that came first is the one that counts.
    values = {number: value.clone() for number, value in initial.items()}
    states = {number: {} for number in initial}
    for entry in log:
        if entry["event"] == "merge":
            pairs = zip(entry["updates"], entry["weights"], strict=True)
            direction = sum(factors[0] * first_payloads[id_of(update)] for update, factors in pairs)
            outer_step(plan.outer, values[entry["fragment"]], direction, states[entry["fragment"]], 1.0)
    for number, value in values.items():
        assert torch.allclose(merger.values[number].value_X, value, rtol=0, atol=1e-12)


def test_repeated_updates_are_not_counted_as_discarded():
    merger = Merger([group(presets.asp(SGD), slices(1))], {0: torch.zeros(12)}, 1)
    merger.join(0, 0, 0.0)
    header = UpdateHeader(UpdateId(0, 0, 0, 0), 0, 1, 1, (5,))
    (first,) = merger.arrive(header, torch.ones(12), 1.0)
    (again,) = merger.arrive(header, torch.ones(12), 2.0)
    assert first.message == again.message, "the answer may have been lost as well"
    assert merger.staleness.discards == {} and merger.log.entries[-1]["repeated"] is True
    assert torch.equal(merger.values[0].value_X, torch.full((12,), -0.1))


# V18: interrupted anywhere


class Scheduled(VectorModel):
    """Its rate falls with the position, so that a wrong one is noticed."""

    def step(self, number, position):
        before = self.theta
        done = super().step(number, position)
        share = 1 / (1 + 0.1 * position)
        self.theta, self.last = before + share * (self.theta - before), share * self.last
        return done


def interrupted(run):
    """Carry a run on from what was saved of it, in new objects."""
    merger = Merger(run.groups, {n: torch.full_like(v.value_X, 9.0) for n, v in run.merger.values.items()}, 1, run.log)
    merger.syncer.policies = [
        type(policy)(policy.plan, list(policy.versions), policy.learners) for policy in run.merger.syncer.policies
    ]
    merger.syncer._of = {fragment: policy for policy in merger.syncer.policies for fragment in policy.versions}
    merger.load_state_dict(as_json(run.merger.state_dict()))
    merger.load_tensors({name: tensor.clone() for name, tensor in run.merger.tensors().items()})
    assert as_json(merger.state_dict()) == as_json(run.merger.state_dict())
    run.merger = merger
    for life in run._lives.values():
        if life.participant is not None:
            old = life.participant
            fresh = Participant(LearnerSync(run.groups, life.number, 99, 0), old.model)
            fresh.sync.load_state_dict(as_json(old.sync.state_dict()))
            fresh.load_tensors({name: tensor.clone() for name, tensor in old.tensors().items()})
            assert as_json(fresh.sync.state_dict()) == as_json(old.sync.state_dict())
            life.participant = fresh


@pytest.mark.parametrize("name", PLANS)
@given(case=schedules(most=4, failing=True), flush=st.booleans())
@cases(6)
def test_saved_and_restored_at_every_event(name, case, flush):
    """V18: decisions, their times and all values are those of a run that went through."""
    plan, count = PLANS[name]
    units = UNITS if count == 3 else None
    arguments = (case.task, plan, pieces_of(count), units, case.failures, None, Scheduled)
    wanted, trace = prepared(*arguments, flush=flush)
    wanted.run()
    run, restored = prepared(*arguments, flush=flush)
    while run._queue:
        run.run(until=run._queue[0][0])
        interrupted(run)
    assert as_json(run.log.entries) == as_json(wanted.log.entries)
    assert run.merger.staleness == wanted.merger.staleness and run.summary() == wanted.summary()
    for number, shared in wanted.merger.values.items():
        found = run.merger.values[number].tensors()
        assert all(torch.equal(found[key], tensor) for key, tensor in shared.tensors().items())
    assert restored.models.keys() == trace.models.keys()
    assert all(torch.equal(restored.models[key].theta, model.theta) for key, model in trace.models.items())


# V19: replay


@pytest.mark.parametrize("name", PLANS)
@given(case=schedules(failing=True), flush=st.booleans(), experts=st.booleans())
@cases(8)
def test_the_log_makes_the_run_again(tmp_path_factory, name, case, flush, experts):
    """V19: shared values and those of every life of every learner, bit for bit, from memory and from the file."""
    plan, count = PLANS[name]
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    log = EventLog(path)
    units = UNITS if experts and count == 3 else None
    arguments = (case.task, plan, pieces_of(count), units, case.failures, None, Scheduled)
    factors = lambda progress: 1 / (1 + progress)  # noqa: E731
    run, trace = prepared(*arguments, flush=flush, log=log, schedule=factors)
    run.run()
    log.close()
    sends = run.groups[0].plan.phases[0].contribution == "grad"

    def make_model(learner, incarnation, clock):
        return Scheduled(case.task, learner, pieces_of(count), sends)

    entries = list(read_entries(path))
    assert entries == as_json(log.entries)
    for source in (log.entries, entries):
        again = Replay(run.groups, make_model, source, factors)
        for number, shared in run.merger.values.items():
            assert torch.equal(again.shared[number].value_X, shared.value_X)
        for (learner, incarnation), model in trace.models.items():
            for number, value in again.local(learner, incarnation).items():
                assert torch.equal(value, model.read(number)), (learner, incarnation)
        # One that was welcomed and died before it had all values is in the log alone.
        assert again.lives.keys() >= trace.models.keys()
    # The same arguments give the same log.
    second, _ = prepared(*arguments, flush=flush, schedule=factors)
    second.run()
    assert second.log.entries == log.entries


def test_a_log_that_lacks_a_merge_is_refused():
    run, _ = virtual(problem(2, 4), presets.asp(SGD))
    lacking = [entry for entry in run.log.entries if (entry["event"], entry.get("version")) != ("merge", 2)]
    make_model = lambda learner, life, clock: VectorModel(problem(2, 4), learner, slices(1), True)  # noqa: E731
    with pytest.raises(SyncError, match=r"version 2 of fragment 0 was taken before it was made; it is incomplete"):
        Replay(run.groups, make_model, lacking)


# V20: order


@given(case=schedules(), overlap=st.integers(0, 2))
@cases(20)
def test_all_learners_take_fragments_in_one_order(case, overlap):
    """V20: after the same number of steps, whatever their pace."""
    run, _ = virtual(case.task, presets.streaming_diloco(4, 3, overlap), PIECES)
    taken = defaultdict(list)
    for entry in entries_of(run, "take"):
        taken[entry["learner"]].append((entry["clock"], entry["fragment"], entry["version"]))
    # The last results may be there for some learners only before they stop.
    for order in taken.values():
        shortest = min(len(order), len(taken[0]))
        assert order[:shortest] == taken[0][:shortest]
        assert abs(len(order) - len(taken[0])) <= 3


@given(case=schedules(failing=True))
@cases(20)
def test_versions_never_go_back(case):
    run, _ = virtual(case.task, presets.decoupled(4, 3, 2, 0.5), PIECES, failures=case.failures)
    last = {}
    for entry in entries_of(run, "take"):
        key = (entry["learner"], entry["incarnation"], entry["fragment"])
        assert entry["version"] >= last.get(key, 0)
        last[key] = entry["version"]


# V21: quorum and grace


@given(case=schedules(fewest=2), quorum=st.integers(1, 3), grace=st.sampled_from([0.0, 0.3, 2.0]))
@cases(40)
def test_merges_wait_for_the_quorum_and_no_longer_than_the_grace(case, quorum, grace):
    """V21: at exactly the time of the K-th learner's arrival plus the grace, with all that has come by then."""
    run, _ = virtual(case.task, presets.decoupled(3, 1, quorum, grace))
    over = min(entry["time"] for entry in entries_of(run, "end"))
    # Whoever has made its last step is not waited for: from then on a smaller quorum holds.
    wanted = min(quorum, case.task.learners)
    arrivals = sorted(
        (entry["time"] + case.task.up(entry["header"]["id"]["learner"]), id_of(entry["header"]["id"]))
        for entry in entries_of(run, "send")
    )
    gone = set()
    merges = [entry for entry in entries_of(run, "merge") if entry["time"] < over]
    for entry in merges:
        left = [(time, update) for time, update in arrivals if update not in gone]
        there, opened = set(), None
        for time, update in left:
            there.add(update.learner)
            if len(there) == wanted:
                opened = time + grace
                break
        merged = {id_of(update) for update in entry["updates"]}
        assert entry["time"] == pytest.approx(opened, abs=1e-9)
        if grace > 0:
            assert merged == {update for time, update in left if time <= entry["time"]}
        else:
            assert len({update.learner for update in merged}) == wanted
        gone |= merged
    if over > 30:
        assert merges


# V24: fragments


@st.composite
def keys(draw):
    count = draw(st.integers(1, 30))
    experts = draw(st.lists(st.sampled_from(["", "", "a", "b", "c", "d"]), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    return [Key(f"key {n}", size, expert) for n, (size, expert) in enumerate(zip(sizes, experts, strict=True))]


@given(keys=keys(), data=st.data())
@cases(60)
def test_every_key_is_in_one_fragment(keys, data):
    """V24: all of them, none twice, experts whole, and no fragment larger than the smallest by more than a part."""
    parts = Counter()
    for key in keys:
        parts[key.expert or key.name] += key.elements
    count = data.draw(st.integers(1, len(parts)))
    fragments = cut(keys, count, first_number=7)
    assert [fragment.number for fragment in fragments] == list(range(7, 7 + count))
    assert sorted(key.name for fragment in fragments for key in fragment.keys) == sorted(key.name for key in keys)
    sizes = [fragment.elements for fragment in fragments]
    assert sum(sizes) == sum(key.elements for key in keys)
    assert max(sizes) - min(sizes) <= max(parts.values())
    place = {key.name: n for n, key in enumerate(keys)}
    for fragment in fragments:
        experts = [unit.expert for unit in fragment.units]
        assert len(set(experts)) == len(experts) and "" not in experts[1:]
        for unit in fragment.units:
            assert all(key.expert == unit.expert for key in unit.keys)
            assert [place[key.name] for key in unit.keys] == sorted(place[key.name] for key in unit.keys)
            if unit.expert:
                assert {key.name for key in unit.keys} == {key.name for key in keys if key.expert == unit.expert}
    assert cut(keys, count, 7) == fragments
    # A vector of a fragment and the tensors of its keys are the same thing.
    tensors = {key.name: torch.arange(key.elements) + 100.0 * place[key.name] for key in keys}
    for fragment in fragments:
        back = fragment.split(fragment.flatten(tensors))
        assert list(back) == [key.name for key in fragment.keys]
        assert all(torch.equal(back[name], tensors[name]) for name in back)


# V28: change of policy


@given(case=schedules(fewest=2, steps=(8, 12)), step=st.integers(2, 6))
@cases(25)
def test_no_gradient_is_lost_at_a_change_of_policy(case, step):
    """V28: all gradients go into one velocity, each once; the learning rate is that of the policy of the merge."""
    rates = 0.1, 0.03
    plan = presets.switch(
        presets.bsp(Outer("sgd", rates[0], 0.6)), presets.asp(Outer("sgd", rates[1], 0.6)), SwitchWhen(step=step)
    )
    run, trace = virtual(case.task, plan)
    (change,) = entries_of(run, "switch")
    assert change["progress"] >= step
    sent = [id_of(entry["header"]["id"]) for entry in entries_of(run, "send")]
    merges = entries_of(run, "merge")
    assert sorted(id_of(update) for entry in merges for update in entry["updates"]) == sorted(sent)
    phases = [entry["phase"] for entry in merges]
    assert phases == sorted(phases) and set(phases) == {0, 1}
    before = [entry for entry in run.log.entries if entry["event"] in ("merge", "switch")]
    assert phases.index(1) == before.index(change)
    # One recurrence across the boundary, with gradients computed anew at the values that the learners had.
    value, velocity = case.task.initial.clone(), torch.zeros_like(case.task.initial)
    for entry in merges:
        direction = torch.zeros_like(value)
        for update, factors in zip(map(id_of, entry["updates"]), entry["weights"], strict=True):
            n = update.sequence + 1
            direction.add_(case.task.gradient(update.learner, n, trace.started[update.learner, n][1]), alpha=factors[0])
        velocity = velocity * 0.6 + direction
        value = value.sub(velocity, alpha=rates[entry["phase"]])
        assert torch.equal(trace.shared[0, entry["version"]], value)
    assert torch.equal(run.merger.values[0].outer_states[0]["velocity"], velocity)


def test_an_optimizer_without_momentum_leaves_the_momentum_alone():
    nesterov, none = presets.diloco(2), presets.local_sgd(2)
    there = virtual(problem(2, 12), presets.switch(nesterov, none, SwitchWhen(step=6)))[0].merger.values[0]
    stopped = virtual(problem(2, 6), nesterov)[0].merger.values[0]
    assert torch.equal(there.outer_states[0]["velocity"], stopped.outer_states[0]["velocity"])


def test_a_plateau_changes_the_policy_once():
    """The loss of the schedule never falls by 10 nats, so the third merge after the first one is the last."""
    plan = presets.switch(presets.local_sgd(2), presets.local_sgd(2), SwitchWhen(plateau=3, improvement=10.0))
    run, _ = virtual(problem(2, 20), plan)
    assert [entry["phase"] for entry in entries_of(run, "merge")] == [0] * 4 + [1] * 6
    assert len(entries_of(run, "switch")) == 1


# Staleness


def test_staleness_by_hand_without_waiting():
    """Steps of 1 and 3 seconds, 0.25 s each way; 0 sends at 1, 2.5, 4 and 1 at 3, 6.5, 10, merged 0.25 s later:

    version 1 (0): base 0, 1 step ahead of learner 1; 2 (0): base 1, 2 ahead; 3 (1): base 0, so 2 versions behind; 4
    (0): base 2, so 1 behind, and 3 - 1 steps ahead; 5 (1): base 3, 1 behind; 6 (1): base 5, none behind.
    """
    task = problem(2, 3, up=(0.25, 0.25), down=(0.25, 0.25))
    task.compute = lambda learner, n: (1.0, 3.0)[learner]
    run, _ = virtual(task, presets.asp(SGD))
    merges = entries_of(run, "merge")
    assert [(entry["time"], entry["updates"][0]["learner"], *entry["staleness"][0]) for entry in merges] == [
        (1.25, 0, 1, 0, 1), (2.75, 0, 2, 0, 1), (3.25, 1, 0, 2, 1),
        (4.25, 0, 2, 1, 1), (6.75, 1, 0, 1, 1), (10.25, 1, 0, 0, 1),
    ]  # fmt: skip
    counts = run.merger.staleness.counts
    assert counts[0] == {"clock_gap": {1: 1, 2: 2}, "version_lag": {0: 2, 1: 1}, "data_age": {0: 3}, "drift": {1: 3}}
    assert counts[1] == {"clock_gap": {0: 3}, "version_lag": {2: 1, 1: 1, 0: 1}, "data_age": {0: 3}, "drift": {1: 3}}
    summary = run.summary()[1]["staleness"]
    assert summary["version_lag"] == {"median": 1, "p95": 2, "max": 2}


def test_staleness_by_hand_while_training_goes_on():
    """Steps of 1 and 3 seconds, 0.75 s each way, every second step sent: the results of 0 of time 2 are taken at 4, 2
    steps later, those of time 4 when it has stopped; those of 1 of time 6 are taken at 9, a step later."""
    task = problem(2, 4, up=(0.75, 0.75), down=(0.75, 0.75))
    task.compute = lambda learner, n: (1.0, 3.0)[learner]
    run, _ = virtual(task, presets.decoupled(2))
    counts = run.merger.staleness.counts
    assert counts[0] == {"clock_gap": {2: 1, 4: 1}, "version_lag": {0: 2}, "data_age": {2: 1}, "drift": {2: 2}}
    assert counts[1] == {"clock_gap": {0: 2}, "version_lag": {0: 2}, "data_age": {1: 1}, "drift": {2: 2}}
    assert [(entry["learner"], entry["version"], entry["clock"]) for entry in entries_of(run, "take")] == [
        (0, 1, 4), (1, 1, 2), (1, 2, 2), (1, 3, 3),
    ]  # fmt: skip
