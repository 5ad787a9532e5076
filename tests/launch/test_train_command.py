"""The training command as a user runs it: whole runs, stops, resumes and deaths, under the real launcher."""

import json
import os
import signal
import sys
import time

import pytest

from moe_async.observe import read_load
from tests.helpers.launch import Launch, all_gone, free_port, train
from tests.helpers.texts import tiny_document, write_recipe, write_texts

MEASURED = ("tokens_per_second", "data_wait", "comm_wait")


@pytest.fixture
def workplace(tmp_path):
    """A folder with texts and a recipe that takes ``changes``."""

    def make(**changes):
        texts = tmp_path / "texts"
        if not texts.exists():
            write_texts(texts)
        return write_recipe(tmp_path / "tiny.yaml", tiny_document(texts, tmp_path / "runs", **changes))

    return make


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(run):
    """Step lines without what is measured in seconds."""
    found = [line for line in lines(run) if "lm_loss" in line]
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in found]


@pytest.mark.slow
def test_a_whole_run_leaves_everything_behind(tmp_path, workplace):
    launch = train(tmp_path, workplace(train__eval_every=4, train__checkpoint_every=3))
    assert launch.wait() == 0, launch.text()
    run = tmp_path / "runs" / "tiny"
    assert {path.name for path in run.iterdir()} == {
        "recipe.yaml", "deepspeed.json", "metrics.jsonl", "expert_load", "summary.json", "checkpoints",
    }  # fmt: skip
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_00000006", "step_00000008"]
    assert [line["step"] for line in steps(run)] == list(range(1, 9))
    evaluations = [line for line in lines(run) if "heldout_bits_per_byte" in line]
    assert [line["step"] for line in evaluations] == [0, 4, 8]

    summary = json.loads((run / "summary.json").read_text())
    assert summary["heldout_bits_per_byte"] == evaluations[-1]["heldout_bits_per_byte"]
    assert summary["heldout_bits_per_byte_start"] == evaluations[0]["heldout_bits_per_byte"]
    assert 0 < summary["trigram_bits_per_byte"] < 8 and summary["dropped"] == 0
    assert summary["tokens"] == 8 * 8 * 16 and summary["tokens_per_second"] > 0
    assert summary["params_active"] < summary["params_total"]
    assert [set(layer) for layer in summary["layers"]] == [{"layer", "max_over_mean", "cv", "dead"}] * 2

    load = read_load(run)
    assert load.windows["last_step"].tolist() == list(range(1, 9)) and load.meta.layers == ("layer 0", "layer 1")
    assert (load.windows["counts"].sum(axis=(0, 2)) == 2 * summary["tokens"]).all()
    assert (load.windows["rank_load"].sum(axis=(0, 2)) == 2 * summary["tokens"]).all()
    assert load.windows["domain_counts"].sum() == load.windows["counts"].sum()
    assert set(load.paths.step) == set(range(1, 9)) and (load.paths.experts >= 0).all()

    text = launch.text()
    for shown in ("held-out bits per byte", "trigram", "dropped assignments", "layer 1", "> the |", "step 8/8"):
        assert shown in text, shown
    check_evaluate_tool(tmp_path, run, summary)
    check_profile(tmp_path, run, summary)
    check_branch(tmp_path, tmp_path / "tiny.yaml", run, summary)


def check_evaluate_tool(folder, run, summary):
    """The tool recomputes the run's figure; bfloat16 experts see their rows in other groupings."""
    tool = Launch(folder, sys.executable, "-m", "tools.evaluate", summary["checkpoint"], "--json")
    assert tool.wait() == 0, tool.text()
    figures = json.loads(tool.text())
    assert figures["heldout_bits_per_byte"] == pytest.approx(summary["heldout_bits_per_byte"], abs=2e-3)
    assert figures["run"] == summary["heldout_bits_per_byte"] and figures["same_text"]
    newest = Launch(folder, "moe-async", "evaluate", str(run))
    assert newest.wait() == 0 and "the run itself measured" in newest.text(), newest.text()


def check_profile(folder, run, summary):
    """A checkpoint's routing over its held-out text, and against itself and its predecessor."""
    before = sorted((run / "checkpoints").iterdir())[0]
    command = [sys.executable, "-m", "tools.expert_load", "profile", summary["checkpoint"], "--json", "--against"]
    with_itself = Launch(folder, *command, summary["checkpoint"])
    with_another = Launch(folder, *command, str(before), "--bytes", "3000")
    assert with_itself.wait() in (0, 3) and with_another.wait() in (0, 3), with_itself.text() + with_another.text()
    document = json.loads(with_itself.text())
    tokens = sum(document["tokens"].values())
    assert document["step"] == 8 and tokens > 0
    for layer, figures in zip(document["specialisation"], document["summary"]["layers"], strict=True):
        assert figures["layer"] == layer["layer"] and figures["tokens"] == tokens
        assert layer["stability"]["agreement"] == 1.0
    other = json.loads(with_another.text())
    assert sum(other["tokens"].values()) < tokens
    assert all(0 < layer["stability"]["agreement"] < 1 for layer in other["specialisation"])
    # A folder of one's own text, as a table.
    text = folder / "own"
    text.mkdir()
    (text / "a.txt").write_text("All of it is read. " * 40)
    table = Launch(
        folder, "moe-async", "expert_load", "profile", str(run), "--data", f"mine={text}", "--layer", "layer 1"
    )
    assert table.wait() in (0, 3) and f"tokens: mine {19 * 40}" in table.text(), table.text()
    assert "preferred tokens" in table.text() and "layer 1: load over the fair share" in table.text()
    wrong = Launch(folder, "moe-async", "expert_load", "profile", str(run), "--data", "mine=nowhere")
    assert wrong.wait() == 1 and "nowhere" in wrong.text(), wrong.text()


def check_branch(folder, recipe, run, summary):
    """Going on from an older checkpoint is another branch; a finished run has nothing left to do."""
    first, second = sorted((run / "checkpoints").iterdir())
    again = train(folder, recipe, "--resume", str(first))
    assert again.wait() == 0 and "a later checkpoint of another branch is now" in again.text(), again.text()
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == [f"abandoned-1-{second.name}", first.name, second.name]
    repeated = json.loads((run / "summary.json").read_text())
    for figure in ("heldout_bits_per_byte", "heldout_bits_per_byte_start", "layers", "tokens", "samples"):
        assert repeated[figure] == summary[figure], figure
    done = train(folder, recipe, "--resume", "latest")
    assert done.wait() == 0 and "nothing is left to do: train.steps is 8" in done.text()
    assert json.loads((run / "summary.json").read_text()) == repeated

    # A run that was ended between its last checkpoint and its summary.
    (run / "summary.json").unlink()
    late = train(folder, recipe, "--resume", "latest")
    assert late.wait() == 0, late.text()
    late_summary = json.loads((run / "summary.json").read_text())
    for figure in ("heldout_bits_per_byte", "heldout_bits_per_byte_start", "layers", "tokens", "samples"):
        assert late_summary[figure] == summary[figure], figure
    assert late_summary["tokens_per_second"] is None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT"])
def test_a_signal_to_the_process_group_saves_and_a_resumed_run_is_the_same(tmp_path, workplace, how):
    recipe = workplace(train__steps=1000)
    stopped = train(tmp_path, recipe)
    stopped.wait_for("step 6/1000")
    ranks = stopped.ranks()
    os.killpg(stopped.process.pid, signal.Signals[how])
    stopped.wait(30)
    assert all_gone(ranks, 15), stopped.text()
    run = tmp_path / "runs" / "tiny"
    (checkpoint,) = (run / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step_"))
    assert steps(run)[-1]["step"] == step >= 6
    assert f"at step {step}; checkpoint" in stopped.text() and "--resume" in stopped.text()

    # A line from after the checkpoint, as a crash would leave it, is written anew.
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step + 1, "lm_loss": 0.0}) + '\n{"step": ')
    resumed = train(tmp_path, recipe, "--resume", "latest")
    resumed.wait_for(f"step {step + 8 - step % 2}/1000")
    os.killpg(resumed.process.pid, signal.SIGTERM)
    resumed.wait(30)
    assert f"resumed from {checkpoint}" in resumed.text()

    whole = train(tmp_path, recipe, "--set", f"log.dir={tmp_path / 'whole'}")
    whole.wait_for(f"step {step + 8 - step % 2}/1000")
    whole.kill_group()
    whole.process.wait()
    expected = steps(tmp_path / "whole" / "tiny")[: step + 7]
    assert len(expected) == step + 7
    assert steps(run)[: step + 7] == expected

    # Ended where it stands: nothing is trained, and the closing table comes all the same.
    now = steps(run)[-1]["step"]
    ended = train(tmp_path, recipe, "--resume", "latest", "--set", f"train.steps={now}")
    assert ended.wait() == 0, ended.text()
    assert json.loads((run / "summary.json").read_text())["step"] == now


@pytest.mark.slow
def test_no_rank_outlives_a_killed_command(tmp_path, workplace):
    launch = train(tmp_path, workplace(train__steps=100000))
    launch.wait_for("step 4/")
    ranks = launch.ranks()
    assert len(ranks) == 2
    launch.process.kill()
    assert all_gone(ranks, 30), launch.text()
    assert "stopped by launcher gone" in launch.text()
    assert list((tmp_path / "runs" / "tiny" / "checkpoints").glob("step_*/manifest.json"))


@pytest.mark.slow
def test_no_rank_outlives_a_command_killed_while_they_start(tmp_path, workplace):
    launch = train(tmp_path, workplace(train__steps=100000))
    deadline = time.monotonic() + 30
    while len(launch.ranks()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = launch.ranks()
    assert len(ranks) == 2
    launch.process.kill()
    assert all_gone(ranks, 60), launch.text()


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_without_a_hang(tmp_path, workplace):
    launch = train(tmp_path, workplace(train__steps=100000))
    launch.wait_for("step 4/")
    ranks = launch.ranks()
    ranks[1].kill()
    assert launch.wait(60) != 0
    assert all_gone(ranks, 15)


FAILING = """
from moe_async import train
from moe_async.engine.loop import Trainer

plain = Trainer._step

def step(self):
    if self.world.rank == 1 and self.engine.global_step == 3:
        raise ZeroDivisionError("planned on rank 1")
    return plain(self)

Trainer._step = step
train.main()
"""


@pytest.mark.slow
def test_a_failing_rank_ends_the_job_with_its_traceback(tmp_path, workplace):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    launch = Launch(
        tmp_path, "deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), str(script),
        "--recipe", str(workplace(train__steps=100000)),
    )  # fmt: skip
    assert launch.wait(90) != 0
    text = launch.text()
    assert "rank 1 failed:" in text and "ZeroDivisionError: planned on rank 1" in text and "Traceback" in text


SICK = """
import torch
from moe_async import train
from moe_async.engine.loop import Trainer

plain = Trainer._step

def step(self):
    if self.world.rank == 1 and self.engine.global_step == 2:
        self.engine.module.layers[1].attention.out.weight.data[0, 0] = torch.inf
    return plain(self)

Trainer._step = step
train.main()
"""


@pytest.mark.slow
def test_a_run_that_gives_up_names_the_module_and_has_written_its_last_step(tmp_path, workplace):
    script = tmp_path / "sick.py"
    script.write_text(SICK)
    recipe = workplace(train__steps=100000, train__max_bad_steps=3, train__recompute="reentrant")
    launch = Launch(
        tmp_path, "deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), str(script),
        "--recipe", str(recipe),
    )  # fmt: skip
    assert launch.wait(90) != 0
    text = launch.text()
    assert "3 steps in a row were skipped" in text and "the last one is step 5, loss nan" in text
    assert "The first numbers that are not finite are in the output of layers.1.attention.out." in text
    assert "Routers that saw such numbers: layer 1." in text
    found = [(line["step"], line["applied"], line["lm_loss"] is None) for line in steps(tmp_path / "runs" / "tiny")]
    assert found == [(step, step < 3, step > 2) for step in range(1, 6)]


OTHER_TEXT = """
import os, sys
from moe_async import train

train.main([*sys.argv[1:], *(["--set", "data.heldout=0.3"] if os.environ["LOCAL_RANK"] == "1" else [])])
"""


@pytest.mark.slow
def test_ranks_that_read_other_text_do_not_train(tmp_path, workplace):
    script = tmp_path / "other.py"
    script.write_text(OTHER_TEXT)
    launch = Launch(
        tmp_path, "deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), str(script),
        "--recipe", str(workplace()),
    )  # fmt: skip
    assert launch.wait(90) != 0 and "ranks [1] read other text than rank 0" in launch.text()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_torchrun_and_a_process_on_its_own(tmp_path, workplace):
    recipe = workplace()
    alone = Launch(tmp_path, sys.executable, "-m", "moe_async.train", "--recipe", str(recipe),
                   "--set", "parallel.expert=1")  # fmt: skip
    assert alone.wait() == 0, alone.text()
    port = str(free_port())
    torchrun = Launch(tmp_path, "torchrun", "--nproc-per-node", "2", "--master-port", port,
                      "-m", "moe_async.train", "--recipe", str(recipe), "--set", "name=two")  # fmt: skip
    assert torchrun.wait() == 0, torchrun.text()
    one, two = steps(tmp_path / "runs" / "tiny"), steps(tmp_path / "runs" / "two")
    # The same initial model and the same text; a balance loss per micro-batch depends on the cut.
    assert one[0]["lm_loss"] == pytest.approx(two[0]["lm_loss"], rel=1e-4)
    assert one[0]["z_loss"] == pytest.approx(two[0]["z_loss"], rel=1e-4)


@pytest.mark.slow
def test_errors_are_said_once_and_end_the_job(tmp_path, workplace):
    recipe = workplace()
    wrong = train(tmp_path, recipe, "--set", "moe.topk=1", "--set", "optim.lr=-1")
    assert wrong.wait() != 0
    text = wrong.text()
    assert text.count("2 errors in") == 1 and "moe.topk" in text and "top_k" in text and "optim.lr" in text
    assert "Traceback" not in text

    missing = train(tmp_path, recipe, "--set", "data.source=[{path: nope}]")
    assert (
        missing.wait() != 0 and missing.text().count("nope does not exist") == 1 and "Traceback" not in missing.text()
    )

    small = train(tmp_path, recipe, "--set", "model.vocab_size=100", ranks=1)
    assert small.wait() != 0 and "model.vocab_size is 100 but the tokenizer 'bytes' has 257 ids" in small.text()
    assert not (tmp_path / "runs").exists()

    nothing = train(tmp_path, recipe, "--resume", "latest")
    assert nothing.wait() != 0
    assert "nothing to resume" in nothing.text() and "Traceback" not in nothing.text()
