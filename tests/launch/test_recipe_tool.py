"""The tool for recipes, from the shell's side."""

import json
from pathlib import Path

from moe_async.recipe import load_recipe, parse_recipe
from tools.recipe import DIFFERENT, main

SYNC, OLMOE = "recipes/quickstart-sync.yaml", "recipes/models/olmoe-1b-7b.yaml"


def test_check_tells_all_errors_of_all_recipes(tmp_path, capsys):
    bad = tmp_path / "bad.yaml"
    bad.write_text(Path(SYNC).read_text().replace("top_k: 2", "top_k: 9").replace("lr: 4e-3", "lr: fast"))
    assert main(["check", SYNC, OLMOE]) == 0
    assert f"{SYNC}: valid" in capsys.readouterr().out
    assert main(["check", SYNC, str(bad)]) == 1
    text = capsys.readouterr().out
    assert f"{SYNC}: valid" in text and f"2 errors in {bad}" in text
    assert "moe.top_k is 9" in text and "optim.lr is 'fast'" in text
    assert main(["check", str(bad), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document[str(bad)]["valid"] is False and "moe.top_k" in document[str(bad)]["problem"]


def test_show_loads_back_and_gives_the_deepspeed_json(capsys):
    assert main(["show", SYNC, "--ranks", "4", "--set", "train.steps=77"]) == 0
    text = capsys.readouterr().out
    assert parse_recipe(text, "shown") == load_recipe(SYNC, ["train.steps=77"])
    assert "# DeepSpeed JSON on 4 ranks:" in text and '"train_micro_batch_size_per_gpu": 4' in text
    assert main(["show", SYNC, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ranks"] == 2 and document["deepspeed"]["train_micro_batch_size_per_gpu"] == 8
    assert document["recipe"]["moe"]["num_experts"] == 8
    assert main(["show", SYNC, "--ranks", "3"]) == 1
    assert "3" in capsys.readouterr().err


def test_diff_is_about_resolved_values(tmp_path, capsys):
    same = tmp_path / "same.yaml"
    same.write_text(Path(SYNC).read_text() + "\ndeepspeed: {}\n")
    assert main(["diff", SYNC, str(same)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["diff", SYNC, OLMOE, "--json"]) == DIFFERENT
    document = json.loads(capsys.readouterr().out)
    assert document["moe.num_experts"] == {"a": 8, "b": 64}
    assert "moe.balance.0.loss" not in document and document["moe.router.weights"] == {"a": "normalised", "b": "raw"}
    assert main(["diff", SYNC, OLMOE]) == DIFFERENT
    assert "A: 8" in capsys.readouterr().out


def test_explain_tells_which_model_used_which_value(tmp_path, capsys):
    assert main(["explain", "moe.balance"]) == 0
    text = capsys.readouterr().out
    assert "list of mapping" in text and "default: none" in text and "number, 0 or more" in text
    assert "qwen3-30b-a3b: [{loss: switch, coefficient: 0.001, scope: step}]" in text
    assert "olmoe-1b-7b: [" in text and "-small" not in text
    assert main(["explain", "moe.top_k", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["values"]["8"] == ["deepseek-v3-like", "olmoe-1b-7b", "qwen3-30b-a3b"]
    assert document["forms"][0]["default"] is None
    assert main(["explain", "moe.top_k", "--recipes", str(tmp_path)]) == 0
    assert f"No recipes of models were found in {tmp_path};" in capsys.readouterr().out
    assert main(["explain", "0"]) == 1 and "no entry '0'" in capsys.readouterr().err
    assert main(["explain", "moe.topk"]) == 1
    assert "Did you mean moe.top_k?" in capsys.readouterr().err
    assert main(["explain", "moe.top_k", "--recipes", str(tmp_path / "none")]) == 1
    assert "is no folder" in capsys.readouterr().err
