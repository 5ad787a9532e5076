"""The selective-precision experiment from the shell to its table, with one small variant."""

import json
import subprocess

import yaml

from tests.helpers.launch import environment
from tests.helpers.small import SMALL
from tools import selective_precision

BFLOAT16 = {"selective, router in bfloat16": ("selective", "bfloat16")}


def write_recipe(folder):
    document = {
        **SMALL,
        "name": "tiny",
        "model": {**SMALL["model"], "vocab_size": None},
        "moe": {**SMALL["moe"], "layers": "all", "num_experts": 16, "top_k": 4},
        "parallel": {"expert": 1, "zero": 1},
        "optim": {**SMALL["optim"], "lr": 0.01},
        "data": {"source": str(folder / "text.txt"), "seq_len": 16, "heldout": 0.3},
        "train": {"steps": 3, "global_batch": 2},
        "log": {"sample_tokens": 0},
    }
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i % 977} {chr(97 + i % 26) * 9}\n" for i in range(1200)))
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def test_it_trains_measures_and_uses_finished_runs_again(tmp_path, monkeypatch, capsys):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(selective_precision, "VARIANTS", BFLOAT16)
    recipe = write_recipe(tmp_path)
    arguments = [str(recipe), "--seeds", "1", "--ranks", "1", "--runs", str(tmp_path / "runs")]

    assert selective_precision.main([*arguments, "--json"]) == 0
    ((figures,),) = json.loads(capsys.readouterr().out).values()
    assert 4 < figures["heldout_bits_per_byte"] < 12 and figures["skipped"] == 0
    assert 0 < figures["ties"] < 0.5 and 0 < figures["differing"] < 0.5

    def never(*args, **kwargs):
        raise AssertionError("a finished run was made again")

    monkeypatch.setattr(subprocess, "run", never)
    assert selective_precision.main(arguments) == 0
    assert "| selective, router in bfloat16 |" in capsys.readouterr().out


def test_a_run_that_fails_is_reported(tmp_path, monkeypatch, capsys):
    def fail(command, **options):
        return subprocess.CompletedProcess(command, 3, stdout="no accelerator today")

    monkeypatch.setattr(subprocess, "run", fail)
    assert selective_precision.main([str(write_recipe(tmp_path)), "--runs", str(tmp_path)]) == 1
    assert "ended with code 3:\nno accelerator today" in capsys.readouterr().err


def test_the_table_has_means_spreads_and_differences_seed_by_seed():
    def rows(*bits):
        return [{"heldout_bits_per_byte": value, "differing": 0.01, "ties": 0.002} for value in bits]

    table = selective_precision.table({"one": rows(2.0, 2.2), "two": rows(2.1, 2.3)})
    assert "against one, same seed" in table
    assert "| one | 2.1000 ± 0.1414 | - | 1.000 % | 0.200 % |" in table
    assert "| two | 2.2000 ± 0.1414 | +0.1000 ± 0.0000 | 1.000 % | 0.200 % |" in table
    assert "| one | 2.0000 | - |" in selective_precision.table({"one": rows(2.0)})
