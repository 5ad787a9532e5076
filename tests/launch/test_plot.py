"""The tool that draws curves of runs, from the shell's side."""

import json

import pytest

from moe_async.observe.recorder import LoadRecorder
from moe_async.observe.store import LoadStore
from tests.observe.loads import figures_of, meta_of
from tools.plot import main


def make_learner(folder, losses):
    folder.mkdir(parents=True)
    lines = [{"step": step, "lm_loss": loss, "tokens_per_second": 100.0 * step} for step, loss in enumerate(losses, 1)]
    lines.append({"step": len(losses), "heldout_bits_per_byte": 2.5})
    # A crash cuts the last line short.
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lm')
    recorder = LoadRecorder(LoadStore(folder / "expert_load", meta_of()))
    for step in range(1, len(losses) + 1):
        recorder.add(step, figures_of(meta_of(), [[2, 2, 2, 2], [step, 2, 1, 1]]))
    recorder.flush()


def test_curves_of_one_run(tmp_path, capsys):
    make_learner(tmp_path / "one", [5.0, 4.0, 3.5])
    assert main([str(tmp_path / "one"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["name"] == "one" and run["loss"] == {"x": [1, 2, 3], "y": [5.0, 4.0, 3.5]}
    assert run["heldout"] == {"x": [3], "y": [2.5]} and run["tokens_per_second"]["y"] == [100.0, 200.0, 300.0]
    # MaxVio of [1, 2, 1, 1], [2, 2, 1, 1] and [3, 2, 1, 1].
    assert run["balance"]["y"] == pytest.approx([2 / 1.25 - 1, 2 / 1.5 - 1, 3 / 1.75 - 1])
    assert run["version_lag"]["x"] == []


def test_learners_and_their_staleness_as_png(tmp_path, capsys):
    for learner in (0, 1):
        make_learner(tmp_path / "run" / f"learner-{learner}", [5.0, 4.0])
    events = [
        {"event": "welcome", "learner": 0},
        {"event": "merge", "updates": [{"learner": 1}], "staleness": [[9, 4, 9]]},
        {"event": "merge", "updates": [{"learner": 0}, {"learner": 1}], "staleness": [[9, 0, 9], [9, 2, 9]]},
    ]
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main([str(tmp_path / "run"), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], second["name"]) == ("run/learner-0", "run/learner-1")
    assert first["version_lag"] == {"x": [2], "y": [0]} and second["version_lag"] == {"x": [1, 2], "y": [4, 2]}
    assert main([str(tmp_path / "run"), "-o", str(tmp_path / "out.png")]) == 0
    assert "run/learner-1" in capsys.readouterr().out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    assert main([str(tmp_path), "--json"]) == 1
    assert "line 1 of" in capsys.readouterr().err
