"""A whole run of several learners, started as a user starts it, and what happens when parts of it are killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import sys

import psutil
import pytest
import torch
from safetensors.torch import load_file

from moe_async.sync.event_log import read_entries
from tests.helpers.launch import Launch, all_gone
from tests.helpers.texts import tiny_document, write_recipe, write_texts

BETWEEN = {
    "dense": {"policy": "decoupled", "every": 2, "fragments": 2},
    "expert": {"policy": "same", "every": 4},
    "router": {"policy": "same"},
}
pytestmark = pytest.mark.slow


def start(folder, *arguments, steps=40, between=None, timeout=15.0):
    """`moe_async.launch` on a tiny recipe with two learners of two ranks."""
    folder.mkdir(exist_ok=True)
    document = tiny_document(write_texts(folder / "texts"), folder / "runs")
    document["sync"] = {"learners": 2, "timeout": timeout, "between": between or BETWEEN}
    document["name"], document["train"]["steps"] = "several", steps
    if document["sync"]["between"]["dense"]["policy"] == "bsp":
        document["parallel"]["zero"] = 0
    document["log"]["every"] = 1
    recipe = write_recipe(folder / "several.yaml", document)
    return Launch(folder, sys.executable, "-m", "moe_async.launch", str(recipe), "--ranks", "2", *arguments)


def processes(launch, *words):
    """Processes of a run whose command line has all the words."""
    found = []
    for process in psutil.Process(launch.process.pid).children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if all(word in line for word in words):
            found.append(process)
    return found


def summary(folder, name="several"):
    return json.loads((folder / "runs" / name / "summary.json").read_text())


def check_ledger(run, learners=2):
    """Every update is merged once or discarded, and what a learner that lived to the end sent is among them."""
    entries = list(read_entries(run / "events.jsonl"))
    merged = [tuple(update.values()) for entry in entries if entry["event"] == "merge" for update in entry["updates"]]
    assert len(merged) == len(set(merged))
    discarded = {tuple(entry["update"].values()) for entry in entries if entry["event"] == "discard"}
    last = {entry["learner"]: entry["incarnation"] for entry in entries if entry["event"] == "welcome"}
    for learner in range(learners):
        sends = [e for e in read_entries(run / f"learner-{learner}" / "events.jsonl") if e["event"] == "send"]
        own = {tuple(e["header"]["id"].values()) for e in sends if e["header"]["id"]["incarnation"] == last[learner]}
        assert own <= set(merged) | discarded, own - set(merged) - discarded
    return entries


def test_a_run_of_two_learners(tmp_path):
    run = start(tmp_path, steps=12)
    assert run.wait() == 0, run.text()
    text = run.text()
    assert "held-out bits per byte" in text and re.search(r"learner 0 +learner 1", text), text
    for row in ("rounds", "time computing", "MB sent", "clock gap", "version lag", "data age", "drift"):
        assert row in text, row
    found = summary(tmp_path)
    assert set(found["learners"]) == {"0", "1"}
    assert found["tokens"] == sum(entry["tokens"] for entry in found["learners"].values())
    assert abs(sum(entry["steps"] for entry in found["learners"].values()) - 24) <= 4
    check_ledger(tmp_path / "runs" / "several")
    lines = (tmp_path / "runs" / "several" / "learner-0" / "metrics.jsonl").read_text().splitlines()
    ages = [age for line in lines if (age := json.loads(line).get("data_age")) is not None]
    assert ages and max(ages) <= found["learners"]["0"]["staleness"]["data_age"]["max"]
    checkpoints = list((tmp_path / "runs" / "several").glob("learner-*/checkpoints/step_*"))
    assert {path.parent.parent.name for path in checkpoints} == {"learner-0", "learner-1"}


def test_a_killed_learner_comes_back(tmp_path):
    """All ranks of learner 1 die at a moment drawn from a seed; learner 0 goes on, and 1 rejoins."""
    run = start(tmp_path, steps=150)
    run.wait_for(f"learner 1] step {random.Random(5).randint(5, 12)}/")
    victims = processes(run, "moe_async.train", "--learner 1")
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    assert all_gone(victims, 20)
    run.wait_for("starting it anew (1 of 3)")
    assert run.wait() == 0, run.text()
    assert "learner 1 is gone" in run.text()
    entries = check_ledger(tmp_path / "runs" / "several")
    lives = [(e["learner"], e["incarnation"], e["clock"]) for e in entries if e["event"] == "welcome"]
    assert [life[:2] for life in lives[:2]] == [(0, 0), (1, 0)] and (1, 1) in [life[:2] for life in lives]
    # It begins where the others are, and not at the beginning.
    assert next(clock for learner, life, clock in lives if (learner, life) == (1, 1)) > 5


def test_a_learner_that_stood_still_goes_on_at_the_step_of_the_others(tmp_path):
    """Under a policy of rounds, a learner that was counted out begins anew, without being started anew."""
    between = {"dense": {"policy": "local_sgd", "every": 2}, "expert": {"policy": "same"}, "router": {"policy": "same"}}
    run = start(tmp_path, "--pace", "0:0.2", "--pace", "1:0.2", steps=80, between=between, timeout=5.0)
    run.wait_for("learner 1] step 9/")
    for process in processes(run, "moe_async.train", "--learner 1"):
        process.suspend()
    run.wait_for("learner 1 is gone")
    so_far = len(re.findall("learner 0] step", run.text()))
    run.wait_for(f"learner 0] step {so_far + 10}/")
    for process in processes(run, "moe_async.train", "--learner 1"):
        process.resume()
    assert run.wait() == 0, run.text()
    assert "learner 1 cannot go on where it was" in run.text() and "starting it anew" not in run.text()
    folder = tmp_path / "runs" / "several"
    lives = [(e["learner"], e["incarnation"]) for e in check_ledger(folder) if e["event"] == "welcome"]
    assert lives == [(0, 0), (1, 0), (1, 1)]
    lines = [json.loads(line) for line in (folder / "learner-1" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "lm_loss" in line]
    jumps = [b - a for a, b in itertools.pairwise(steps) if b != a + 1]
    assert len(jumps) == 1 and jumps[0] > 5, steps
    assert steps[-1] == 80


def test_one_killed_rank_takes_its_learner_along_and_no_other(tmp_path):
    """A rank dies while updates are under way: its launcher ends the rest of the learner, which is started anew."""
    run = start(tmp_path, steps=150)
    run.wait_for("learner 1] step 8/")
    victim = processes(run, "moe_async.train", "--local_rank=1", "--learner 1")[-1]
    os.kill(victim.pid, signal.SIGKILL)
    run.wait_for("learner 1 died with code")
    assert run.wait() == 0, run.text()
    assert "learner 0 died" not in run.text()
    check_ledger(tmp_path / "runs" / "several")


def test_a_learner_that_comes_back_after_the_end_gets_what_came_out(tmp_path):
    """Learner 1 does the rest of the run alone, and evaluates; learner 0 finds nothing to do and leaves."""
    run = start(tmp_path, steps=20)
    run.wait_for("learner 0] step 5/")
    for victim in processes(run, "moe_async.train", "--learner 0"):
        victim.send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.text()
    found = summary(tmp_path)
    assert found["learners"]["1"]["steps"] > 20 and found["heldout_bits_per_byte"] > 0


def test_a_killed_syncer_comes_back_as_it_was(tmp_path):
    run = start(tmp_path, steps=150)
    run.wait_for("learner 0] step 10/")
    (syncer,) = processes(run, "moe_async.syncer")
    syncer.send_signal(signal.SIGKILL)
    run.wait_for("the run goes on where it was")
    assert run.wait() == 0, run.text()
    assert "syncer died with code -9" in run.text() and "learner 0 died" not in run.text()
    entries = check_ledger(tmp_path / "runs" / "several")
    versions = {}
    for entry in entries:
        if entry["event"] == "merge":
            assert entry["version"] == versions.get(entry["fragment"], 0) + 1
            versions[entry["fragment"]] = entry["version"]


def test_a_syncer_killed_after_the_learners_had_finished_does_not_keep_the_run(tmp_path):
    run = start(tmp_path, steps=12)
    run.wait_for("learner 1] step 2/")
    (syncer,) = processes(run, "moe_async.syncer")
    (learner, *_) = processes(run, "moe_async.train", "--learner 1", "--local_rank=0")
    run.wait_for("all learners have finished")
    # One that stands still has not left, so the syncer is still there to be killed.
    learner.suspend()
    syncer.send_signal(signal.SIGKILL)
    learner.resume()
    assert run.wait(60) == 0, run.text()
    # Who had its last words has left; who had not comes back to the next syncer, which then has something to show.
    assert ("the syncer missed the end of the run" in run.text()) != ("time computing" in run.text()), run.text()


def test_ctrl_c_saves_and_ends_everything(tmp_path):
    run = start(tmp_path, steps=100_000)
    run.wait_for("learner 1] step 5/")
    everything = processes(run)
    os.kill(run.process.pid, signal.SIGINT)
    run.wait(60)
    assert all_gone(everything, 20)
    assert list((tmp_path / "runs" / "several").glob("learner-*/checkpoints/step_*"))


def weights(run):
    """All parameters of the newest checkpoint of learner 0."""
    newest = max((run / "learner-0" / "checkpoints").glob("step_*"))
    found = {}
    for path in [newest / "dense.safetensors", *newest.glob("experts-*.safetensors")]:
        found |= {name: tensor for name, tensor in load_file(path).items() if name.startswith(("param/", "exp_avg"))}
    return newest.name, found


@pytest.mark.parametrize("policy", [{"policy": "diloco", "every": 3}, {"policy": "bsp"}], ids=["diloco", "bsp"])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, policy):
    """Where the weights do not depend on who was faster: learners, syncer, optimizer and what was under way go on."""
    between = {"dense": policy, "expert": {"policy": "same"}, "router": {"policy": "same"}}
    whole = start(tmp_path / "whole", steps=12, between=between)
    assert whole.wait() == 0, whole.text()
    stopped = start(tmp_path / "stopped", steps=12, between=between)
    stopped.wait_for("learner 0] step 4/")
    os.kill(stopped.process.pid, signal.SIGINT)
    stopped.wait(60)
    run = tmp_path / "stopped" / "runs" / "several"
    assert "stopped by" in stopped.text() and not (run / "summary.json").exists()
    resumed = Launch(
        tmp_path / "stopped", sys.executable, "-m", "moe_async.launch", "several.yaml", "--ranks", "2",
        "--resume", str(run),
    )  # fmt: skip
    assert resumed.wait() == 0, resumed.text()
    assert "resumed from" in resumed.text() and "the run goes on where it was" in resumed.text()
    (step, wanted), (again, found) = weights(tmp_path / "whole" / "runs" / "several"), weights(run)
    assert step == again and wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    check_ledger(run)


def test_a_machine_that_died_goes_on_with_what_the_syncer_has(tmp_path):
    """Everything is killed at once; what learners did after their last checkpoints is merged, and is not done again."""
    run = start(tmp_path, "--set", "train.checkpoint_every=4", steps=60)
    run.wait_for("learner 1] step 8/")
    run.wait_for("learner 0] step 11/")
    everything = [psutil.Process(run.process.pid), *processes(run)]
    for process in everything:
        process.send_signal(signal.SIGKILL)
    assert all_gone(everything, 20)
    folder = tmp_path / "runs" / "several"
    before = list(read_entries(folder / "events.jsonl"))
    resumed = Launch(
        tmp_path, sys.executable, "-m", "moe_async.launch", "several.yaml", "--ranks", "2",
        "--set", "train.checkpoint_every=4", "--resume", str(folder),
    )  # fmt: skip
    assert resumed.wait() == 0, resumed.text()
    assert "the run goes on where it was" in resumed.text()
    assert "it has sent more since then and goes on from the newest shared weights" in resumed.text()
    entries = check_ledger(folder)
    assert entries[: len(before)] == before
    # Nothing came twice: what was sent again was not made again.
    assert not [entry for entry in entries if entry["event"] == "discard"]
    assert summary(tmp_path)["heldout_bits_per_byte"] > 0


def test_nothing_outlives_the_launch(tmp_path):
    run = start(tmp_path, steps=100_000)
    run.wait_for("learner 1] step 3/")
    everything = processes(run)
    os.kill(run.process.pid, signal.SIGKILL)
    assert all_gone(everything, 60)


def test_a_recipe_for_one_learner_is_refused(tmp_path):
    recipe = write_recipe(tmp_path / "tiny.yaml", tiny_document(write_texts(tmp_path / "texts"), tmp_path / "runs"))
    run = Launch(tmp_path, sys.executable, "-m", "moe_async.launch", str(recipe))
    assert run.wait() == 1 and "is for one learner: its sync.between is null" in run.text()
    assert not (tmp_path / "runs").exists()


def test_another_recipe_at_the_door_and_no_syncer(tmp_path):
    document = tiny_document(write_texts(tmp_path / "texts"), tmp_path / "runs")
    document["sync"] = {"learners": 2, "timeout": 15.0, "between": BETWEEN}
    recipe = write_recipe(tmp_path / "several.yaml", document)
    command = [sys.executable, "-m", "moe_async.train", "--recipe", str(recipe), "--set", "parallel.expert=1"]
    alone = Launch(tmp_path, *command)
    assert alone.wait() == 1 and "this launch joins nobody. Start the whole run with" in alone.text(), alone.text()
    wrong = Launch(tmp_path, *command, "--join", "nowhere")
    assert wrong.wait() == 2 and "'nowhere' is no address; write HOST:PORT" in wrong.text()
