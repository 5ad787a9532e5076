"""Whole runs whose learners add up among themselves, started as a user starts them."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import pytest
import torch

from moe_async.sync.event_log import read_entries
from tests.helpers.launch import Launch
from tests.launch.test_several_learners import processes, start, summary, weights

BETWEEN = {
    "dense": {"policy": "diloco", "every": 3},
    "expert": {"policy": "local_sgd", "every": 2, "weight": "tokens"},
    "router": {"policy": "same"},
}
pytestmark = pytest.mark.slow


def joint(folder, *arguments, steps=12):
    return start(folder, *arguments, "--set", "sync.via=all_reduce", steps=steps, between=BETWEEN)


def resume(folder, *arguments):
    run = folder / "runs" / "several"
    return Launch(
        folder, sys.executable, "-m", "moe_async.launch", "several.yaml", "--ranks", "2",
        "--set", "sync.via=all_reduce", "--resume", str(run), *arguments,
    )  # fmt: skip


def steps_of(run, learner):
    return sorted(path.name for path in (run / f"learner-{learner}" / "checkpoints").glob("step_*"))


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path):
    """Learner 0 makes its steps faster, so it is told to stop at another place than learner 1."""
    whole = joint(tmp_path / "whole")
    assert whole.wait() == 0, whole.text()
    found = summary(tmp_path / "whole")
    assert [found["learners"][learner]["steps"] for learner in "01"] == [12, 12]
    assert all(found["learners"][learner]["bytes_sent"] > 0 for learner in "01")
    stopped = joint(tmp_path / "stopped", "--pace", "1:0.4")
    stopped.wait_for("learner 0] step 4/")
    os.kill(stopped.process.pid, signal.SIGINT)
    stopped.wait(60)
    run = tmp_path / "stopped" / "runs" / "several"
    assert "stopped by" in stopped.text() and not (run / "summary.json").exists()
    assert len(steps_of(run, 0)) == len(steps_of(run, 1)) == 1
    resumed = resume(tmp_path / "stopped")
    assert resumed.wait() == 0, resumed.text()
    assert "resumed from" in resumed.text()
    (step, wanted), (again, got) = weights(tmp_path / "whole" / "runs" / "several"), weights(run)
    assert step == again and wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


def test_a_killed_learner_ends_the_run_and_it_goes_on_from_what_fits(tmp_path):
    often = ["--set", "train.checkpoint_every=4", "--set", "train.keep_checkpoints=3"]
    run = joint(tmp_path, *often, steps=30)
    run.wait_for("learner 1] step 10/")
    for victim in processes(run, "moe_async.train", "--learner 1"):
        victim.send_signal(signal.SIGKILL)
    assert run.wait(60) == 1, run.text()
    text = run.text()
    assert "the run cannot go on: learner 1 is gone" in text and "starting it anew" not in text, text
    folder = tmp_path / "runs" / "several"
    assert f"so the run ends. The other lines say why. Start the whole run again with --resume {folder}" in text
    # One learner has saved once more than the other.
    shutil.rmtree(folder / "learner-1" / "checkpoints" / steps_of(folder, 1)[-1])
    common = steps_of(folder, 1)[-1]
    assert common in steps_of(folder, 0)[:-1]
    resumed = resume(tmp_path, *often)
    assert resumed.wait() == 0, resumed.text()
    assert resumed.text().count(f"{common} at step") == 2, resumed.text()
    assert summary(tmp_path)["learners"]["1"]["steps"] == 30
    merges = [entry for entry in read_entries(folder / "events.jsonl") if entry["event"] == "merge"]
    versions = [(entry["fragment"], entry["version"]) for entry in merges]
    assert len(set(versions)) == len(versions)
