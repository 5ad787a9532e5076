"""The tool that shows who loads which expert, from the shell's side."""

import json

import pytest

from moe_async.observe.recorder import LoadRecorder
from moe_async.observe.store import LoadStore
from tests.observe.loads import figures_of, meta_of
from tools.expert_load import main


def make_run(folder, counts, **others):
    meta = meta_of(layers=len(counts))
    recorder = LoadRecorder(LoadStore(folder / "expert_load", meta))
    for step in range(1, 41):
        recorder.add(step, figures_of(meta, counts, **others))
    recorder.flush()


EVEN, UNEVEN = [200, 200, 200, 200], [380, 210, 205, 5]


def test_a_healthy_run(tmp_path, capsys):
    make_run(tmp_path, [EVEN, [230, 190, 190, 190]])
    assert main(["summary", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "steps 37 to 40 of 1 to 40 recorded" in text and "no known disease" in text
    assert text.index("layer 1") < text.index("layer 0")
    assert "1.15" in text and "4.0/4" in text


def test_a_disease_is_named_and_changes_the_exit_code(tmp_path, capsys):
    make_run(tmp_path, [EVEN, UNEVEN])
    assert main(["summary", str(tmp_path), "--steps", "1:20", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["first_step"], document["last_step"]) == (1, 20)
    assert document["layers"][1]["max_over_mean"] == 380 / 200 and document["layers"][1]["starved"] == [3]
    (verdict,) = document["verdicts"]
    assert (verdict["disease"], verdict["layer"], verdict["experts"]) == ("dying experts", "layer 1", [3])
    assert "moe.balance" in verdict["treatment"]


def test_what_cannot_be_read(tmp_path, capsys):
    assert main(["summary", str(tmp_path / "none")]) == 1
    assert "does not exist; give the folder of a run" in capsys.readouterr().err
    make_run(tmp_path, [EVEN, EVEN])
    assert main(["summary", str(tmp_path), "--steps", "90:100"]) == 1
    assert "it holds steps 1 to 40" in capsys.readouterr().err


def test_heat_maps_over_layers_and_over_time(tmp_path, capsys):
    make_run(tmp_path, [EVEN, UNEVEN])
    assert main(["heatmap", str(tmp_path), "--width", "80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["all layers, steps 37 to 40", "layer 0  ▅▅▅▅", "layer 1  █▅▅▁"]
    assert main(["heatmap", str(tmp_path), "--layer", "layer 1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rows"][0] == "1-2" and document["rows"][-1] == "39-40"
    assert document["load_over_fair_share"][0] == [1.9, 1.05, 1.025, 0.025]
    assert main(["heatmap", str(tmp_path), "--layer", "layer 9"]) == 1
    assert "no layer 'layer 9'; it has 'layer 0', 'layer 1'" in capsys.readouterr().err


def test_two_runs_side_by_side(tmp_path, capsys):
    make_run(tmp_path / "a", [EVEN, EVEN])
    make_run(tmp_path / "b", [EVEN, UNEVEN])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "A: no known disease" in text and "B: layer 1: dying experts" in text
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    pair = document["layers"][1]
    assert (pair["a"]["max_over_mean"], pair["b"]["max_over_mean"]) == (1.0, 1.9)
    assert [ill["disease"] for ill in document["verdicts"]["b"]] == ["dying experts"]


def test_runs_with_other_layers_are_compared_by_name(tmp_path, capsys):
    make_run(tmp_path / "a", [EVEN])
    make_run(tmp_path / "b", [EVEN, EVEN])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["layers"]
    assert first["a"] == first["b"] and (second["a"], second["b"]["layer"]) == (None, "layer 1")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["layer", "1", "A", *"-" * 11] in lines


def test_tokens_that_were_not_finite_are_told_of_and_keep_json_standard(tmp_path, capsys):
    nan = [float("nan")]
    make_run(tmp_path, [EVEN], bad_tokens=[2], top=nan, entropy=nan, z=nan, margin=nan)
    assert main(["summary", str(tmp_path)]) == 0
    assert "layer 0: 8 tokens had router logits that were not finite" in capsys.readouterr().out
    assert main(["summary", str(tmp_path), "--json"]) == 0
    (layer,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["layers"]
    assert layer["confidence"] is None and layer["bad_tokens"] == 8


@pytest.mark.parametrize("width", ["0", "-3", "wide"])
def test_a_width_that_is_none_is_wrong_usage(tmp_path, capsys, width):
    with pytest.raises(SystemExit) as end:
        main(["heatmap", str(tmp_path), f"--width={width}"])
    assert end.value.code == 2 and "1 or more" in capsys.readouterr().err
