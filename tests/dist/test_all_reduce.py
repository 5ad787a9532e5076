"""Learners that add up among themselves, beside the same recipes over the syncer: real processes over gloo."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_async.comm import World
from moe_async.engine.all_reduce_exchange import AllReduceExchange
from moe_async.engine.door import make_hello
from moe_async.engine.seat import Seat, take_seat
from moe_async.engine.stop import StopFlag
from moe_async.engine.learner_exchange import LearnerParts
from moe_async.engine.syncer_exchange import SyncerExchange
from moe_async.engine.syncer_link import SyncerLink
from moe_async.errors import CheckpointError, SyncError
from moe_async.recipe.loader import dump_recipe
from moe_async.sync.event_log import read_entries
from tests.dist.test_exchange import one_process
from tests.helpers.learner_run import Syncer, merged, one_rank, run_learners, several
from tests.helpers.spawn import RankFailure, run_ranks

SAME = {"policy": "same"}
MIXED = {
    "dense": {"policy": "diloco", "every": 3, "weight": "tokens"},
    "expert": {"policy": "local_sgd", "every": 2, "weight": "tokens"},
    "router": {"policy": "diloco", "every": 4, "lr": 0.5},
}
LOCAL = {"dense": {"policy": "local_sgd", "every": 3}, "expert": {"policy": "diloco", "every": 4}, "router": SAME}
MOE = {"layers": [1], "num_experts": 4, "top_k": 2, "expert_dim": 6}


def both(between, folder, ranks=1, learners=2, paces=(0.0, 0.0), **changes):
    """The final weights of every learner over the syncer and by an all-reduce, and the syncer of the latter."""
    # At the rate of other tests momentum blows rounding up over these steps.
    changes = {"optim__lr": 0.1, **changes}
    found = []
    for via in ("syncer", "all_reduce"):
        recipe = several(between, learners, train__steps=7, moe=MOE, sync__via=via, **changes)
        syncer, results = run_learners(recipe, folder / via, ranks=ranks, paces=paces)
        found.append(results)
    return found, syncer


def check(found, atol):
    over_syncer, jointly = ([merged(learner) for learner in results] for results in found)
    for name, tensor in jointly[0].items():
        assert torch.equal(tensor, jointly[1][name]), name
        torch.testing.assert_close(tensor, over_syncer[0][name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(("ranks", "between"), [(1, MIXED), (1, LOCAL), (2, MIXED), (2, LOCAL)])
def test_the_numbers_are_those_over_the_syncer(tmp_path, ranks, between):
    found, syncer = both(between, tmp_path, ranks, parallel={"expert": ranks, "zero": 0})
    check(found, 1e-12)
    for one, other in zip(*found, strict=True):
        first, second = one[0]["summary"], other[0]["summary"]
        for key in ("rounds", "steps", "tokens", "discarded", "staleness"):
            assert first[key] == second[key], key
        assert second["staleness"]["clock_gap"]["max"] == second["staleness"]["version_lag"]["max"] == 0
        assert second["bytes_sent"] > 0
    assert set(syncer.server.reports) == {0, 1} and "all learners have finished" in syncer.said
    # The decisions are written down as a syncer does.
    logs = [
        [{**entry, "time": 0} for entry in read_entries(tmp_path / via / "run" / "events.jsonl")]
        for via in ("syncer", "all_reduce")
    ]
    assert [e for e in logs[0] if e["event"] == "merge"] == [e for e in logs[1] if e["event"] == "merge"]
    assert not list((tmp_path / "all_reduce" / "run").rglob("*.safetensors"))


def test_three_learners_equal_a_plain_loop(tmp_path):
    between = {"dense": {"policy": "local_sgd", "every": 3}, "expert": SAME, "router": SAME}
    recipe = several(between, 3, train__steps=6, moe=MOE, sync__via="all_reduce")
    _, results = run_learners(recipe, tmp_path, paces=(0.0, 0.02, 0.0))
    wanted = one_process(recipe, 3, 3, 6)
    for learner in results:
        for name, tensor in merged(learner).items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_stages(tmp_path, zero):
    """AdamW in float32, whose masters have to follow."""
    found, _ = both(
        MIXED, tmp_path, 2, parallel={"expert": 2, "zero": zero}, train__precision="float32", optim__kind="adamw",
        optim__lr=1e-2,
    )  # fmt: skip
    check(found, 2e-6)


JOINT = several(LOCAL, train__steps=30, moe=MOE, sync__via="all_reduce", sync__timeout=6.0)


def die(engine, exchange, rank):
    """Learner 1 is killed before its eighth step."""
    if exchange.seat.learner == 1 and exchange.clock == 7:
        os.kill(os.getpid(), signal.SIGKILL)


def stand_still(engine, exchange, rank):
    """Learner 1 stops between two exchanges for longer than the time limit; its threads live on."""
    if exchange.seat.learner == 1 and exchange.clock == 4:
        time.sleep(9.0)


def inside(engine, exchange, number):
    """A signal to learner 1 in the middle of an exchange."""
    if exchange.seat.learner == 1 and exchange.clock == 4:
        original = exchange.peers.gather

        def gather(value):
            found = original(value)
            os.kill(os.getpid(), number)
            return found

        exchange.peers.gather = gather


def die_inside(engine, exchange, rank):
    inside(engine, exchange, signal.SIGKILL)


def freeze_inside(engine, exchange, rank):
    """As a machine that hangs: connections stay open, and nothing comes."""
    inside(engine, exchange, signal.SIGSTOP)


def test_a_slow_learner_is_waited_for(tmp_path):
    recipe = several(LOCAL, train__steps=6, moe=MOE, sync__via="all_reduce", sync__timeout=6.0)
    syncer, results = run_learners(recipe, tmp_path, watch=stand_still)
    assert [learner[0]["steps"] for learner in results] == [6, 6] and not syncer.server.meeting.problem
    assert results[0][0]["summary"]["waited"] > 0.5


def start_two(syncer, folder, watch, limits, pace=0.0):
    """Two learners of one rank on `JOINT`, each with a time limit of the test."""
    pool = ThreadPoolExecutor(2)
    arguments = (one_rank, dump_recipe(JOINT), syncer.address)
    return [
        pool.submit(run_ranks, 1, *arguments, n, str(folder), watch, pace, timeout=limit)
        for n, limit in enumerate(limits)
    ]


@pytest.mark.parametrize("watch", [die, die_inside, freeze_inside])
def test_a_learner_that_is_gone_ends_the_others(tmp_path, watch):
    syncer = Syncer(tmp_path / "run")
    first, second = start_two(syncer, tmp_path, watch, (60.0, 22.0))
    with pytest.raises(RankFailure, match=r"SyncError: the run cannot go on: learner 1 is gone.*--resume"):
        first.result()
    # What was frozen ends by the limit of the test alone.
    with pytest.raises(RankFailure, match="died with exit code|hung"):
        second.result()
    syncer.thread.join(20)
    assert not syncer.thread.is_alive() and "learner 1 is gone" in syncer.server.meeting.problem
    assert f"--resume {tmp_path / 'run'}" in syncer.server.meeting.problem


def test_a_syncer_that_is_gone_ends_the_run(tmp_path):
    syncer = Syncer(tmp_path / "run")
    ends = start_two(syncer, tmp_path, None, (60.0, 60.0), pace=0.2)
    deadline = time.monotonic() + 60
    while not (syncer.server.meeting and syncer.server.meeting._begun) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(1.0)
    # The second call does not wait for learners to save.
    syncer.server.stop()
    syncer.close()
    for end in ends:
        with pytest.raises(RankFailure, match=r"cannot go on: the syncer at 127.0.0.1:\d+ is gone.*--resume FOLDER"):
            end.result()


def stop_before(engine, exchange, rank):
    """Rank 0 of learner 1 is told to stop in the step before an exchange; learner 0 waits at the boundary by then."""
    if exchange.seat.learner == 1 and exchange.clock == 2:
        time.sleep(2.0)
        if rank == 0:
            exchange._stop.reason = "SIGTERM"


def stop_waiting(engine, exchange, rank):
    """Learner 0 is told to stop while it waits for learner 1."""
    if exchange.seat.learner == 0 and exchange.clock == 2 and rank == 0:
        threading.Timer(1.0, lambda: setattr(exchange._stop, "reason", "SIGTERM")).start()
    if exchange.seat.learner == 1 and exchange.clock == 2:
        time.sleep(2.5)


@pytest.mark.parametrize("watch", [stop_before, stop_waiting])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, watch):
    # The momentum of the exchange before is there when they stop.
    between = {"dense": {"policy": "diloco", "every": 2}, "expert": {"policy": "local_sgd", "every": 3}, "router": SAME}
    recipe = several(
        between, train__steps=7, moe=MOE, parallel={"expert": 2, "zero": 0}, optim__lr=0.1, sync__via="all_reduce"
    )
    _, whole = run_learners(recipe, tmp_path / "whole", 2)
    folder = tmp_path / "stopped"
    _, stopped = run_learners(recipe, folder, 2, watch=watch)
    # All learners stop between the same two exchanges, with the second one still to come.
    for results in stopped:
        assert all(result["steps"] == 3 and result["state"]["to_send"] for result in results)
        assert results[0]["state"]["rounds"] == 1
    _, resumed = run_learners(recipe, folder, 2, saved=stopped)
    for one, other in zip(whole, resumed, strict=True):
        assert other[0]["steps"] == 7
        assert {k: other[0]["summary"][k] for k in ("rounds", "steps", "staleness")} == {
            k: one[0]["summary"][k] for k in ("rounds", "steps", "staleness")
        }
        wanted = merged(one)
        for name, tensor in merged(other).items():
            assert torch.equal(tensor, wanted[name]), name
    kinds = [entry["event"] for entry in read_entries(folder / "run" / "events.jsonl")]
    assert kinds == [entry["event"] for entry in read_entries(tmp_path / "whole" / "run" / "events.jsonl")]


def test_checkpoints_of_different_rounds_are_refused(tmp_path):
    """As when each was resumed by hand from its own newest checkpoint."""
    recipe = several(LOCAL, train__steps=7, moe=MOE, sync__via="all_reduce", optim__lr=0.1)
    _, stopped = run_learners(recipe, tmp_path, watch=stop_before)
    stopped[1][0]["state"]["merger"]["syncer"]["policies"][0]["versions"]["0"] += 1
    match = "do not fit together: learner 0 at step 3 after 0 merges, learner 1 at step 3 after 1 merges"
    with pytest.raises(RankFailure, match=match):
        run_learners(recipe, tmp_path, saved=stopped)
    stopped[1][0]["state"]["merger"]["syncer"]["policies"][0]["versions"]["0"] -= 1
    stopped[1][0]["tensors"]["shared/fragment/0/value"][0] += 1e-9
    with pytest.raises(RankFailure, match="the learners begin with different shared weights, though after as many"):
        run_learners(recipe, tmp_path, saved=stopped)


def test_a_checkpoint_of_the_other_form_is_refused():
    link, seat = SyncerLink("127.0.0.1", 1, 20.0), Seat(0, 0, 2, "run")
    exchange = AllReduceExchange(LearnerParts(None, (), (), World(), link, seat, StopFlag()))
    with pytest.raises(CheckpointError, match="written with sync.via syncer but this run has all_reduce.*=syncer"):
        exchange.restore({"clock": 3}, {})
    over_syncer = SyncerExchange(LearnerParts(None, (), (), World(), link, seat, StopFlag()), {})
    with pytest.raises(CheckpointError, match="written with sync.via all_reduce but this run has syncer"):
        over_syncer.restore({"clock": 3, "via": "all_reduce"}, {})


# The syncer alone, on links without a model behind them.


def hello(learner, ranks=1, recipe=JOINT, **more):
    return {**make_hello(recipe, World(), learner), "world_size": ranks, **more}


def sit_down(syncer, learner, recipe=JOINT, ready=True, **more):
    link = SyncerLink(*syncer.address, 20.0)
    take_seat(link, hello(learner, recipe=recipe, **more), World(), 2.0)
    if ready:
        link.send({"kind": "ready"})
    return link


def heard(link, count):
    """The newest of so many messages."""
    deadline = time.monotonic() + 10
    while link.received < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return [header["kind"] for header, _ in link.next(1)]


def at(link, step, last=False):
    link.send({"kind": "at", "place": {"step": step, "last": last}})


@pytest.fixture
def syncer(tmp_path):
    made = Syncer(tmp_path / "run")
    yield made
    made.server.stop()
    made.close()


def test_the_door_refuses_another_shape_and_whoever_comes_late(tmp_path, syncer):
    first = sit_down(syncer, 0)
    shape = r"the run has learners of 1 ranks with expert-parallel size 1 but this learner has 2 ranks with .* size 1"
    with pytest.raises(SyncError, match=shape):
        sit_down(syncer, 1, world_size=2)
    with pytest.raises(SyncError, match=r"sync.via is 'all_reduce' in the run but 'syncer' in this learner's recipe"):
        sit_down(syncer, 1, recipe=several(LOCAL, train__steps=30, moe=MOE, sync__timeout=6.0))
    # One that leaves before the run has begun may come again; nobody begins alone.
    second = sit_down(syncer, 1, ready=False)
    second.leave()
    time.sleep(0.5)
    assert first.received == 0
    second = sit_down(syncer, 1)
    assert heard(first, 1) == heard(second, 1) == ["begin"]
    with pytest.raises(SyncError, match="the run has begun with all its learners"):
        sit_down(syncer, -1)
    for link in (first, second):
        link.send({"kind": "halt"})
        link.leave()


def test_nobody_is_told_to_go_before_all_are_there_or_after_one_stops(tmp_path, syncer):
    first, second = (sit_down(syncer, learner) for learner in (0, 1))
    assert heard(first, 1) == heard(second, 1) == ["begin"]
    at(first, 3)
    time.sleep(0.5)
    assert first.received == 1
    at(second, 3)
    assert (heard(first, 2), heard(second, 2)) == (["go"], ["go"])
    at(first, 6)
    second.send({"kind": "halt"})
    assert (heard(first, 3), heard(second, 3)) == (["halt"], ["halt"])
    at(second, 6)
    time.sleep(0.5)
    assert first.received == second.received == 3
    for link in (first, second):
        link.leave()
    syncer.thread.join(10)
    assert not syncer.thread.is_alive() and not syncer.server.meeting.problem


def test_learners_at_different_places_cannot_go_on(tmp_path, syncer):
    first, second = (sit_down(syncer, learner) for learner in (0, 1))
    heard(first, 1), heard(second, 1)
    at(first, 3)
    at(second, 4)
    deadline = time.monotonic() + 10
    while not (first.refusal and second.refusal) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "the learners have come to different places of the run" in first.refusal
    for link in (first, second):
        link.leave()
