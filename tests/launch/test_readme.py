"""The README's commands and examples are run as they stand there, on less work."""

import re
import shlex
import subprocess
import sys

import pytest
import torch

from tests.helpers.launch import ROOT, Launch, environment, free_port
from tests.helpers.texts import tiny_document, write_recipe, write_texts
from tools.expert_load import DISEASED

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL).replace("\n", " ")
LESS = ["--set", "train.steps=41", "--set", "data.heldout_bytes=2000", "--set", "log.sample_tokens=4"]


def blocks(language):
    return [text for kind, text in BLOCKS if kind == language]


def commands():
    """Every command line in the README, in a block or in the running text, without its comment."""
    lines = [line for text in blocks("") for line in text.splitlines()]
    lines += re.findall(r"`((?:make|deepspeed|torchrun|srun|python|moe-async|pip) [^`]*)`", PROSE)
    starts = ("make ", "deepspeed ", "torchrun ", "srun ", "python ", "moe-async ", "pip ")
    return {line.split("#")[0].strip() for line in lines if line.startswith(starts)}


def test_the_commands_are_those_that_tests_run():
    run_here = {
        "make train",
        'make train RECIPE=... ARGS="--set train.steps=100"',
        "make train RECIPE=recipes/quickstart-sync.yaml",
        "deepspeed --num_gpus 2 --module moe_async.train --recipe recipes/quickstart-sync.yaml",
        "torchrun --nproc-per-node 2 -m moe_async.train --recipe recipes/quickstart-sync.yaml",
        "srun --ntasks 2 python -m moe_async.train --recipe recipes/quickstart-sync.yaml",
        "python tools/evaluate.py runs/quickstart-sync",
        "python tools/expert_load.py summary runs/quickstart-sync",
        "python tools/expert_load.py report runs/quickstart-sync",
        "python tools/plan.py recipes/models/olmoe-1b-7b.yaml --gpus 64",
        "moe-async evaluate",
        "moe-async expert_load",
    }
    # What installs is what this test runs in, and `make test` is what runs it.
    assert commands() == run_here | {"make test", "pip install -e .", "pip install -e '.[tensorboard]'"}


@pytest.mark.slow
def test_make_train_and_evaluate(tmp_path):
    """`make train` in this checkout, with the recipe's run elsewhere."""
    arguments = shlex.join([*LESS, "--set", f"log.dir={tmp_path / 'runs'}"])
    programs = f"VENV={sys.prefix}"
    train = Launch(
        tmp_path,
        "make",
        "-C",
        str(ROOT),
        "train",
        programs,
        "RECIPE=recipes/quickstart-sync.yaml",
        f"ARGS={arguments} --set name=quickstart-sync",
    )
    assert train.wait() == 0, train.text()
    assert "held-out bits per byte" in train.text() and "--module moe_async.train" in train.text()
    _, engine_example, model_example = blocks("python")
    imports = engine_example.splitlines()[0]
    script = f"{imports}\n{model_example.replace('step_00000450', 'step_00000041')}\nprint(len(texts), 'text')"
    use = Launch(tmp_path, sys.executable, "-c", script)
    assert use.wait() == 0 and "1 text" in use.text(), use.text()
    evaluate = Launch(tmp_path, sys.executable, str(ROOT / "tools" / "evaluate.py"), "runs/quickstart-sync")
    assert evaluate.wait() == 0 and "the run itself measured" in evaluate.text(), evaluate.text()
    for command in ([sys.executable, str(ROOT / "tools" / "expert_load.py")], ["moe-async", "expert_load"]):
        load = Launch(tmp_path, *command, "summary", "runs/quickstart-sync")
        # So short a run may well show a disease.
        assert load.wait() in (0, DISEASED) and "steps 37 to 41 of 1 to 41 recorded" in load.text(), load.text()
    tool = [sys.executable, str(ROOT / "tools" / "expert_load.py")]
    report = Launch(tmp_path, *tool, "report", "runs/quickstart-sync")
    assert report.wait() == 0 and "<!DOCTYPE html>" in (tmp_path / "report.html").read_text(), report.text()


def test_the_plan(tmp_path):
    plan = Launch(ROOT, sys.executable, "tools/plan.py", "recipes/models/olmoe-1b-7b.yaml", "--gpus", "64")
    assert plan.wait() == 0 and "fits 80.0 GB" in plan.text(), plan.text()


@pytest.mark.slow
def test_make_train_of_two_learners(tmp_path):
    """`make train` as it stands: a syncer, and two learners of two ranks."""
    arguments = shlex.join([*LESS, "--set", f"log.dir={tmp_path / 'runs'}"])
    train = Launch(tmp_path, "make", "-C", str(ROOT), "train", f"VENV={sys.prefix}", f"ARGS={arguments}")
    assert train.wait(300) == 0, train.text()
    assert "-m moe_async.launch recipes/quickstart.yaml --ranks 2" in train.text()
    assert "held-out bits per byte" in train.text() and re.search(r"learner 0 +learner 1", train.text())


@pytest.mark.slow
def test_slurm_variables_start_a_world(tmp_path):
    """`srun` is not here; what it sets is."""
    recipe = write_recipe(tmp_path / "tiny.yaml", tiny_document(write_texts(tmp_path / "texts"), tmp_path / "runs"))
    port = str(free_port())
    ranks = []
    for rank in range(2):
        own = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
        shared = {"SLURM_STEP_NODELIST": "127.0.0.1", "MASTER_PORT": port, "SLURM_TASKS_PER_NODE": "2"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "moe_async.train", "--recipe", str(recipe)],
                cwd=tmp_path,
                env=environment() | own | shared,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "tiny: 2 ranks on cpu" in outputs[0]


def test_python_examples_run(tmp_path, monkeypatch):
    layer_example, engine_example, _ = blocks("python")
    names = {"x": torch.randn(3, 64)}
    exec(layer_example, names)
    assert names["y"].shape == (3, 64) and names["selection"].shape == (3, 2)

    tokens = torch.randint(0, 256, (16, 32))
    script = f"import torch\ntokens = torch.randint(0, 256, (16, 32)); labels = tokens\n{engine_example}"
    script = (
        script.replace('load_recipe("recipes/quickstart-sync.yaml")', ONE_RANK) + "\nprint('loss', report.lm_loss)\n"
    )
    assert ONE_RANK in script and tokens.shape == (16, 32)
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0 and "loss 5." in result.stdout, result.stdout + result.stderr


ONE_RANK = 'load_recipe("recipes/quickstart-sync.yaml", ["parallel.expert=1"])'


def test_yaml_example_is_a_valid_source(tmp_path):
    (example,) = blocks("yaml")
    from moe_async.recipe import parse_recipe

    text = (ROOT / "recipes" / "quickstart-sync.yaml").read_text()
    start, end = text.index("data:"), text.index("  seq_len:")
    recipe = parse_recipe(text[:start] + example + text[end:], "README.md")
    assert [entry.domain for entry in recipe.data.source][0::2] == ["books", "python"]
