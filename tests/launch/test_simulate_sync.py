"""The simulator of policies from the command line."""

from __future__ import annotations

import builtins
import json

import pytest
import yaml

from tests.helpers.small import SMALL
from tools import simulate_sync


@pytest.fixture
def recipe(tmp_path):
    document = {
        **SMALL,
        "name": "tiny",
        "model": {**SMALL["model"], "vocab_size": None},
        "optim": {**SMALL["optim"], "lr": 0.05},
        "data": {"source": [{"path": str(tmp_path / "text.txt"), "document_bytes": 1000}], "seq_len": 16,
                 "heldout": 0.2, "heldout_bytes": 500},
        "train": {"steps": 6, "global_batch": 2},
        "log": {"sample_tokens": 0},
    }  # fmt: skip
    (tmp_path / "text.txt").write_text("".join(f"line {i}: {i * i % 977} {chr(97 + i % 26) * 9}\n" for i in range(800)))
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def figures(recipe, capsys, *options):
    code = simulate_sync.main([str(recipe), "--json", *options])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def complaint(recipe, capsys, *options):
    assert simulate_sync.main([str(recipe), *options]) == 1
    return capsys.readouterr().err


SLOW = ("--learners", "3", "--straggler", "0:5x")


def test_policies_side_by_side_with_their_losses(recipe, capsys):
    assert simulate_sync.main([str(recipe), *SLOW, "--seeds", "2"]) == 0
    captured = capsys.readouterr()
    rows = [line.split(" | ") for line in captured.out.splitlines() if line.startswith("| ")]
    names = [row[0].removeprefix("| ") for row in rows if "policy" not in row[0]]
    expected = [
        "bsp", "m_sync:count=2", "ssp:bound=3", "asp",
        "local_sgd:every=1", "diloco:every=1", "delayed_nesterov:every=1", "decoupled:every=1",
    ]  # fmt: skip
    assert names == expected * 2
    assert "After 6 s of virtual time:" in captured.out and "After equal tokens" in captured.out
    assert all(" ± " in row[1] and 4 < float(row[1].split()[0]) < 12 for row in rows if "policy" not in row[0])
    assert "asp, seed 1 ..." in captured.err


def test_bsp_has_the_pace_of_the_slowest(recipe, capsys):
    ((run,),) = figures(recipe, capsys, *SLOW, "--policy", "bsp", "--stub", "--step-seconds", "0.5").values()
    end = run["at_tokens"]
    assert end["seconds"] == 6 * 2.5 and end["tokens_per_second"] == 3 * 2 * 16 / 2.5
    assert end["loss"] is None and run["at_time"]["seconds"] == 3.0


def test_the_same_seed_gives_the_same_numbers(recipe, capsys):
    options = [
        *SLOW, "--jitter", "0.2", "--transient", "10%:6x", "--fail", "1/min", "--downtime", "2s",
        "--bandwidth", "1Mbit", "--latency", "20ms", "--policy", "asp", "--policy", "decoupled:every=2",
    ]  # fmt: skip
    first, second = (figures(recipe, capsys, *options) for _ in range(2))
    assert first == second
    assert figures(recipe, capsys, *options, "--seed", "1") != first


def test_entries_of_policies_reach_their_classes(recipe, capsys):
    policy = "decoupled:every=2,expert.every=3,outer.lr=0.5,outer.momentum=0,optim.lr=0.01"
    assert simulate_sync.policy_overrides(policy, True) == [
        "sync.between={dense: {policy: decoupled}, expert: {policy: same}, router: {policy: same}}",
        "sync.between.dense.every=2",
        "sync.between.expert.every=3",
        "sync.between.dense.outer.lr=0.5",
        "sync.between.dense.outer.momentum=0",
        "optim.lr=0.01",
    ]
    ((run,),) = figures(recipe, capsys, "--learners", "2", "--stub", "--policy", policy).values()
    drift = run["at_time"]["staleness"]["drift"]
    assert (drift["median"], drift["max"]) == (2, 3)


def test_step_times_from_a_file(recipe, capsys, tmp_path):
    (tmp_path / "times.csv").write_text("learner,seconds\n1,2.0\n1,4.0\n")
    options = ("--learners", "2", "--stub", "--policy", "bsp", "--times", str(tmp_path / "times.csv"))
    ((run,),) = figures(recipe, capsys, *options).values()
    assert run["at_tokens"]["seconds"] == 2 + 5 * 4


def test_a_recipe_of_its_own_and_another_rate(recipe, capsys):
    document = yaml.safe_load(recipe.read_text())
    document["optim"] = {"kind": "adamw", "lr": 0.001, "schedule": {"kind": "constant"}}
    same = {"policy": "same"}
    document["sync"] = {"learners": 2, "between": {
        "dense": {"policy": "local_sgd", "every": 2}, "expert": same, "router": same,
    }}  # fmt: skip
    recipe.write_text(yaml.safe_dump(document, sort_keys=False))
    assert list(figures(recipe, capsys, "--stub", "--learners", "2")) == [
        "recipe", "local_sgd:every=1", "diloco:every=1", "delayed_nesterov:every=1", "decoupled:every=1"
    ]  # fmt: skip
    assert list(figures(recipe, capsys, "--stub", "--learners", "2", "--policy", "bsp")) == ["bsp"]
    options = ("--stub", "--policy", "bsp", "--set", "optim.kind=muon", "--set", "parallel.zero=0")
    assert "optim.kind is muon but sync.between.dense.policy is bsp" in complaint(recipe, capsys, *options)
    found = figures(recipe, capsys, "--learners", "2", "--policy", "bsp", "--policy", "recipe", "--sgd-lr", "0.1")
    assert all(run["at_tokens"]["loss"] > 4 for (run,) in found.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "bspp"], "bspp"),
        (["--policy", "diloco:every"], "'every' in the policy 'diloco:every' is not key=value"),
        (["--policy", "diloco"], "sync.between.dense.every"),
        (["--policy", "diloco:evry=2"], "every"),
        (["--policy", "recipe"], "sync.between is null"),
        (["--policy", "m_sync:count=5"], "Use count: 3 at most"),
        (["--learners", "1"], "sync.learners is 1"),
        (["--straggler", "7:2x"], "times are given for learner 7, but the 3 learners count from 0 to 2"),
        (["--times", "nowhere.csv"], "nowhere.csv"),
        (["--set", "optim.lr=-1"], "optim.lr"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_runs(recipe, capsys, options, message):
    error = complaint(recipe, capsys, "--learners", "3", *options)
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--straggler", "5x"], "Write it like 0:5x"),
        (["--straggler", "0:5"], "Write it like 5x or 0.6x"),
        (["--transient", "0.1:6x"], "Write it like 10%"),
        (["--bandwidth", "1G"], "is not a bandwidth"),
        (["--latency", "20"], "is not a duration"),
        (["--fail", "1"], "is not a rate"),
        (["--learners", "0"], "--learners is 0; it must be at least 1"),
        (["--step-seconds", "0"], "--step-seconds is 0.0; it must be more than 0"),
    ],
)
def test_options_that_say_nothing(recipe, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        simulate_sync.main([str(recipe), *options])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_plot(recipe, capsys, tmp_path):
    options = ("--learners", "2", "--policy", "bsp", "--policy", "decoupled:every=2")
    for name, extra in (("curves.png", ()), ("bars.png", ("--stub",))):
        figures(recipe, capsys, *options, *extra, "--plot", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(recipe, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    error = complaint(recipe, capsys, "--learners", "2", "--plot", "out.png")
    assert "pip install 'moe_async[tools]'" in error and "seed 0" not in error
