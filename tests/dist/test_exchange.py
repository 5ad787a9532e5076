"""Learners that really run apart: real processes over gloo, a real syncer, on a model small enough for float64."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_async.comm import World
from moe_async.engine.door import make_hello
from moe_async.engine.run_description import describe_run
from moe_async.engine.seat import take_seat
from moe_async.engine.syncer_link import SyncerLink
from moe_async.errors import SyncError
from moe_async.model import build_model
from moe_async.model.keys import exchanged_tensors
from moe_async.recipe.loader import dump_recipe
from moe_async.sync.event_log import interleave, read_entries
from moe_async.sync.replay import Replay
from moe_async.sync.timing import Link, Links, StepTimes
from moe_async.sync.virtual_clock import VirtualRun
from tests.helpers.learner_run import PlainLearner, Syncer, batches, dense_hash, merged, run_learners, several

SAME = {"policy": "same"}
LOCAL = {"dense": {"policy": "local_sgd", "every": 3}, "expert": SAME, "router": SAME}
DECOUPLED = {
    "dense": {"policy": "decoupled", "every": 2, "fragments": 2},
    "expert": {"policy": "same", "every": 4, "fragments": 1},
    "router": SAME,
}


def one_process(recipe, learners, every, steps):
    """Local SGD as a plain loop over whole models in one process: the mean of all weights, every so often."""
    models = [build_model(recipe) for _ in range(learners)]
    for step in range(1, steps + 1):
        for learner, model in enumerate(models):
            (batch,) = batches(recipe, learner, 0, 1, step)
            logits = model(batch.tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= recipe.optim.lr * parameter.grad
                    parameter.grad = None
        if step % every == 0:
            with torch.no_grad():
                for parameters in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(parameters) / learners
                    for parameter in parameters:
                        parameter.copy_(mean)
    return exchanged_tensors(models[0])


@pytest.mark.parametrize("learners", [2, 3])
def test_local_sgd_equals_a_plain_loop(tmp_path, learners):
    moe = {"layers": [1], "num_experts": 4, "top_k": 2, "expert_dim": 6}
    recipe = several(LOCAL, learners, train__steps=6, moe=moe)
    _, results = run_learners(recipe, tmp_path, paces=(0.0,) * learners)
    wanted = one_process(recipe, learners, 3, 6)
    for learner in results:
        assert learner[0]["steps"] == 6
        for name, tensor in merged(learner).items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-12, msg=name)


def test_expert_replicas_inside_a_learner_share_the_exchange(tmp_path):
    """Four ranks with two replicas of each expert beside a learner of one rank: each element travels once, and the
    result is that of learners of one rank with the same batches."""
    moe = {"layers": [1], "num_experts": 4, "top_k": 2, "expert_dim": 6}
    recipe = several(LOCAL, train__steps=6, moe=moe, parallel={"expert": 2, "zero": 0})
    _, results = run_learners(recipe, tmp_path, ranks=4)
    alone = several(LOCAL, train__steps=6, moe=moe, train__accumulation=4)
    _, wanted = run_learners(alone, tmp_path / "alone")
    for found, one in zip(results, wanted, strict=True):
        weights = merged(one)
        for name, tensor in merged(found).items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_ranks_of_a_learner_never_differ_and_learners_end_alike(tmp_path, zero):
    """Also under ZeRO 1 and 2, whose float32 masters follow: a master that did not would undo what was taken."""
    precision = "float64" if zero == 0 else "float32"
    recipe = several(
        DECOUPLED, train__steps=10, parallel={"expert": 2, "zero": zero}, train__precision=precision,
        optim__kind="adamw", optim__lr=1e-2,
    )  # fmt: skip
    syncer, results = run_learners(recipe, tmp_path, ranks=2, watch=dense_hash)
    for learner in results:
        assert learner[0]["seen"] == learner[1]["seen"] and len(set(learner[0]["seen"])) == len(learner[0]["seen"])
    first, second = (merged(learner) for learner in results)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    # What the learners hold is what the syncer made.
    for group in syncer.server.run.groups:
        for fragment in group.fragments:
            shared = fragment.split(syncer.server.merger.values[fragment.number].value_X)
            for name, values in shared.items():
                assert torch.equal(first[name].reshape(-1), values), name


def test_zero_stages_give_the_same_numbers(tmp_path):
    """SGD in float32: a float32 master that was left behind shows after the first exchange."""
    finals = []
    for zero in (0, 1):
        recipe = several(
            LOCAL, train__steps=7, train__precision="float32", parallel={"expert": 2, "zero": zero}, optim__lr=0.05
        )
        _, results = run_learners(recipe, tmp_path / str(zero), ranks=2)
        finals.append(merged(results[0]))
    before = exchanged_tensors(build_model(recipe))
    for name, tensor in finals[0].items():
        assert not torch.allclose(tensor, before[name], rtol=0, atol=1e-4), name
        torch.testing.assert_close(tensor, finals[1][name], rtol=0, atol=2e-6, msg=name)


def test_what_was_sent_was_merged_once(tmp_path):
    recipe = several(DECOUPLED, train__steps=12)
    syncer, results = run_learners(recipe, tmp_path, paces=(0.01, 0.05))
    entries = list(read_entries(tmp_path / "run" / "events.jsonl"))
    merges = [tuple(update.values()) for entry in entries if entry["event"] == "merge" for update in entry["updates"]]
    assert len(set(merges)) == len(merges)
    sent = set()
    for learner in (0, 1):
        for entry in read_entries(tmp_path / "run" / f"learner-{learner}" / "events.jsonl"):
            if entry["event"] == "send":
                sent.add(tuple(entry["header"]["id"].values()))
    assert sent == set(merges) and syncer.server.merger.syncer.pending() == set()
    fast, slow = (learner[0]["summary"] for learner in results)
    assert fast["steps"] > slow["steps"] and fast["rounds"] > slow["rounds"] > 0
    assert fast["bytes_sent"] > 0 and fast["staleness"]["drift"]["max"] == 4
    assert set(syncer.server.reports) == {0, 1}
    json.dumps(syncer.server.reports)


def test_an_update_is_sent_again_until_it_is_acknowledged(tmp_path):
    """Sessions end with updates in them that nobody has written down; and what is acknowledged is not kept."""
    syncer = Syncer(tmp_path / "run")
    handle, seen, lost, ended = syncer.server._update, [], [], []

    def lossy(seat, rank, header, payload):
        seen.append(header["header"]["id"])
        if any(seat is entry for entry in ended):
            # What comes behind it in its session is lost with it: order is what a session keeps.
            return
        if len(seen) in (3, 8, 13):
            lost.append(tuple(seen[-1].values()))
            ended.append(seat)
            seat.close(wait=False)
        else:
            handle(seat, rank, header, payload)

    syncer.server._update = lossy
    recipe = several(DECOUPLED, train__steps=16)
    _, results = run_learners(recipe, tmp_path, syncer=syncer, paces=(0.05, 0.05))
    entries = list(read_entries(tmp_path / "run" / "events.jsonl"))
    merges = [tuple(update.values()) for entry in entries if entry["event"] == "merge" for update in entry["updates"]]
    assert lost and set(lost) <= set(merges) and len(set(merges)) == len(merges)
    sent = {
        tuple(entry["header"]["id"].values())
        for learner in (0, 1)
        for entry in read_entries(tmp_path / "run" / f"learner-{learner}" / "events.jsonl")
        if entry["event"] == "send"
    }
    assert sent == set(merges)
    assert [learner[0]["outbox"] for learner in results] == [0, 0]


PLAIN_MOE = {"layers": [1], "num_experts": 4, "top_k": 2, "expert_dim": 6}


def test_the_event_logs_of_a_real_run_replay_to_its_weights(tmp_path):
    """No policy and no clock: what the logs say was sent, merged and taken gives the weights that the run ended with."""
    recipe = several(DECOUPLED, train__steps=12, moe=PLAIN_MOE)
    syncer, results = run_learners(recipe, tmp_path, paces=(0.01, 0.03))
    folder = tmp_path / "run"
    logs = [list(read_entries(folder / f"learner-{learner}" / "events.jsonl")) for learner in (0, 1)]
    entries = interleave(read_entries(folder / "events.jsonl"), logs)
    replay = Replay(syncer.server.run.groups, lambda learner, life, clock: PlainLearner(recipe, learner), entries)
    final = merged(results[0])
    for number, shared in replay.shared.items():
        real = syncer.server.merger.values[number].value_X
        torch.testing.assert_close(shared.value_X, real, rtol=0, atol=1e-12, msg=f"fragment {number}")
        for name, values in replay.lives[0, 0].model.fragments[number].split(shared.value_X).items():
            torch.testing.assert_close(final[name].reshape(-1), values, rtol=0, atol=1e-12, msg=name)
    with pytest.raises(SyncError, match="the event logs do not fit together"):
        interleave(read_entries(folder / "events.jsonl"), logs[:1])


@pytest.mark.slow
def test_a_paced_run_equals_the_virtual_clock(tmp_path):
    """Steps that sleep to deadlines far apart: the same merges in the same order, and the same weights."""
    paces, steps = (1.6, 2.5), 6
    recipe = several(DECOUPLED, train__steps=steps, moe=PLAIN_MOE)
    syncer, results = run_learners(recipe, tmp_path, paces=paces)
    groups = syncer.server.run.groups
    run = VirtualRun(
        groups,
        lambda learner, life, clock: PlainLearner(recipe, learner),
        2,
        until_progress=steps,
        times=StepTimes(given={learner: [pace] for learner, pace in enumerate(paces)}),
        links=Links(up=Link(latency=0.05), down=Link(latency=0.05)),
        flush=True,
    )
    run.run()

    def merges(entries):
        """By fragment: several that are sent at one boundary are merged one after another, in no order that matters."""
        found = {}
        for entry in entries:
            if entry["event"] == "merge":
                updates = [tuple(update.values()) for update in entry["updates"]]
                found.setdefault(entry["fragment"], []).append((entry["version"], updates, entry["weights"]))
        return json.loads(json.dumps(found))

    assert [learner[0]["steps"] for learner in results] == [run.figures[learner].steps for learner in (0, 1)]
    assert merges(read_entries(tmp_path / "run" / "events.jsonl")) == merges(run.log.entries)
    for number, shared in run.merger.values.items():
        real = syncer.server.merger.values[number].value_X
        torch.testing.assert_close(real, shared.value_X, rtol=0, atol=1e-12, msg=f"fragment {number}")


def test_the_door_names_the_first_difference(tmp_path):
    syncer = Syncer(tmp_path / "run")
    recipe = several(LOCAL, train__steps=3)
    other = several(LOCAL, train__steps=4)
    describe_run(dump_recipe(recipe), tmp_path / "other")
    link = SyncerLink(*syncer.address, 20.0)
    assert take_seat(link, make_hello(recipe, World(), -1), World(), 5.0).learner == 0

    def refused(hello, match):
        second = SyncerLink(*syncer.address, 20.0)
        with pytest.raises(SyncError, match=match):
            take_seat(second, hello, World(), 1.5)
        second.disconnect()

    refused(make_hello(other, World(), -1), "train.steps is 3 in the run but 4 in this learner's recipe")
    refused(make_hello(recipe, World(), 0), "place 0 is taken. Wait until a learner has left")
    refused(make_hello(recipe, World(), 5), "place 5 does not exist: the run is for 2 learners. Use --learner 0 to 1")
    hello = make_hello(recipe, World(), 1)
    refused({**hello, "code": {**hello["code"], "sync/gates.py": "0"}}, "moe_async/sync/gates.py differs from that")
    refused({**hello, "libraries": {**hello["libraries"], "torch": "1.0"}}, r"the run has torch .* but this learner 1\.0")
    refused({**hello, "recipe": "model: 3"}, "refuses this learner: ")
    second = SyncerLink(*syncer.address, 20.0)
    assert take_seat(second, hello, World(), 5.0).learner == 1
    for entry in (link, second):
        entry.leave()
    syncer.close()


def test_a_learner_waits_for_a_place_that_is_about_to_be_free(tmp_path):
    """One that is started anew may knock before its former life is quite gone."""
    syncer = Syncer(tmp_path / "run")
    hello = make_hello(several(LOCAL), World(), 0)
    first, second = (SyncerLink(*syncer.address, 20.0) for _ in range(2))
    assert take_seat(first, hello, World(), 5.0).incarnation == 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take_seat, second, hello, World(), 30.0)
        while not any("place 0 is taken" in line for line in syncer.said):
            time.sleep(0.05)
        first.leave()
        assert waiting.result(timeout=30.0).incarnation == 1
    second.leave()
    syncer.close()
