"""What a report says, against the record it is made of."""

import json
import shutil

import numpy as np
import pytest

from moe_async.errors import LoadError, MoeAsyncError
from moe_async.observe.figures import summarise
from moe_async.observe.paths import Paths
from moe_async.observe.store import LoadRecord, read_load
from moe_async.report.document import report_document
from moe_async.report.page import report_page
from moe_async.report.structure import flows
from moe_async.tables import json_text
from tests.report.runs import make_learner, make_run
from tools.expert_load import main


def test_loads_are_those_of_the_record(tmp_path):
    make_learner(tmp_path)
    (view,) = report_document(tmp_path)["learners"]
    record = read_load(tmp_path)
    counts = record.windows["counts"]
    assert [(piece["first"], piece["last"]) for piece in view["pieces"]] == [(step, step) for step in range(1, 31)]
    for place, piece in enumerate(view["pieces"]):
        assert np.allclose(piece["loads"], counts[place] / counts[place].mean(axis=-1, keepdims=True), atol=5e-4)
        dropped = record.windows["dropped"][place].sum(axis=-1) / counts[place].sum(axis=-1)
        assert piece["drop_rate"] == pytest.approx(dropped.tolist())
    assert view["summary"]["layers"][1]["max_over_mean"] == summarise(record).layers[1].max_over_mean
    assert view["rank_loads"]["by_piece"][4][0] == pytest.approx(
        (record.windows["rank_load"][4, 0] / record.windows["rank_load"][4, 0].mean()).tolist(), abs=5e-4
    )


def test_domains_add_up_and_tell_their_bits(tmp_path):
    make_learner(tmp_path)
    (view,) = report_document(tmp_path)["learners"]
    found = view["specialisation"]
    assert found["domains"] == ["code", "prose"] and found["of"] == "training"
    for layer in found["layers"]:
        assert np.allclose(np.sum(layer["domain_shares"], axis=1), 1, atol=0.01)
        assert 0 < layer["information"]["bits"] < 1 and layer["preferred"] is None


def test_what_uneven_ranks_cost_by_hand(tmp_path):
    make_learner(tmp_path)
    (view,) = report_document(tmp_path)["learners"]
    cost = view["rank_cost"]
    imbalance = [layer["step_imbalance"] for layer in view["summary"]["layers"]]
    assert cost["step_imbalance"] == pytest.approx(np.mean(imbalance))
    assert cost["step_seconds"] == pytest.approx(16 * 256 / 2015.5)
    lost = cost["experts_share"] * np.mean([1 - 1 / value for value in imbalance])
    assert cost["lost_share"] == pytest.approx(lost) and cost["lost_seconds"] == pytest.approx(lost * 16 * 256 / 2015.5)


def test_ways_between_layers_by_hand(tmp_path):
    make_learner(tmp_path, layers=2)
    meta = read_load(tmp_path).meta
    # One token: experts 0 and 1, then 2 and 3; another: 0 alone, then 2 alone.
    paths = Paths([1, 1], [0, 0], [0, 0], [[[0, 1], [2, 3]], [[0, -1], [2, -1]]])
    (ways,) = flows(LoadRecord(meta, read_load(tmp_path).windows, paths))
    assert ways == [[0, 2, 0.625], [0, 3, 0.125], [1, 2, 0.125], [1, 3, 0.125]]


def test_a_run_of_several_learners(tmp_path):
    make_run(tmp_path)
    document = report_document(tmp_path)
    assert [view["name"] for view in document["learners"]] == ["learner-0", "learner-1"]
    first, second = document["staleness"]["learners"]
    assert (first["learner"], first["updates"], second["updates"]) == (0, 6, 6)
    # Merges 1, 3, 5, ... are of learner 0.
    assert first["merge"] == [1, 3, 5, 7, 9, 11] and first["values"][0] == [0, 2, 1, 0, 2, 1]
    assert first["mean"] == [1.0, 0.0, 5.0] and second["max"] == [2, 1, 5]
    assert set(document["learners"][0]["losses"]["balance"]) == {"switch", "z"}


def test_many_experts_have_their_strongest_pairs_alone(tmp_path):
    make_learner(tmp_path, experts=80)
    (view,) = report_document(tmp_path)["learners"]
    for layer in view["specialisation"]["layers"]:
        assert layer["coactivation"] is None and len(layer["strongest"]) <= 40
        assert all(pair["count"] >= 5 and pair["lift"] > 1 for pair in layer["strongest"])


def test_a_profile_takes_the_place_of_training(tmp_path):
    make_learner(tmp_path)
    layer = {
        "domain_shares": [[0.125] * 8], "information": {"bits": 0.5, "baseline": 0.1, "spread": 0.01},
        "preferred": [[{"token": 65, "count": 9, "lift": 2.0, "text": "'A'"}]] * 8,
        "coactivation": None, "strongest": [],
    }  # fmt: skip
    profile = {
        "checkpoint": "somewhere", "tokens": {"code": 90}, "domains": ["code"],
        "specialisation": [layer | {"layer": f"layer {place}"} for place in range(3)],
    }  # fmt: skip
    (view,) = report_document(tmp_path, profile)["learners"]
    assert view["specialisation"]["of"] == "somewhere" and view["specialisation"]["tokens"] == 90
    assert view["specialisation"]["layers"][1]["information"]["baseline"] == 0.1
    with pytest.raises(LoadError, match="the profile is of the layers layer 0"):
        report_document(tmp_path, profile | {"specialisation": profile["specialisation"][:1]})
    narrow = [one | {"domain_shares": [[0.25] * 4]} for one in profile["specialisation"]]
    with pytest.raises(LoadError, match="the profile is of 4 experts in layer 0, but the run has 8"):
        report_document(tmp_path, profile | {"specialisation": narrow})
    ragged = [one | {"coactivation": [[1.0], [1.0, 2.0]]} for one in profile["specialisation"]]
    for damaged in ({"nothing": 1}, profile | {"specialisation": ragged}):
        with pytest.raises(LoadError, match="cannot be read"):
            report_document(tmp_path, damaged)


def test_zero_experts_stand_behind_the_experts(tmp_path):
    make_learner(tmp_path, zeros=4)
    (view,) = report_document(tmp_path)["learners"]
    record = read_load(tmp_path)
    assert view["experts"] == [8] * 3 and view["choices"] == [12] * 3
    counts = record.windows["counts"][0, 1]
    piece = view["pieces"][0]
    assert piece["loads"][1] == pytest.approx((counts / counts[:8].mean()).tolist(), abs=5e-4)
    assert piece["max_over_mean"][1] == pytest.approx(counts[:8].max() / counts[:8].mean(), abs=1e-3)
    for layer in view["specialisation"]["layers"]:
        assert np.shape(layer["domain_shares"]) == (2, 12) and np.shape(layer["coactivation"]) == (12, 12)
    assert max(way[1] for flow in view["flows"] for way in flow) >= 8


def test_a_learner_without_a_step_is_left_out_and_named(tmp_path):
    make_run(tmp_path, learners=3)
    for path in (tmp_path / "learner-1" / "expert_load").glob("windows-*"):
        path.unlink()
    shutil.rmtree(tmp_path / "learner-2" / "expert_load")
    document = report_document(tmp_path)
    assert [view["name"] for view in document["learners"]] == ["learner-0"]
    assert document["left_out"] == ["learner-1", "learner-2"]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("events.jsonl", b"\xff\xfe\n", "events.jsonl is damaged"),
        ("events.jsonl", b"5\n", "line 1 of .*events.jsonl is no JSON object"),
        ("events.jsonl", b'{"event": "merge", "updates": []}\n', "holds a merge that cannot be read"),
        ("learner-0/metrics.jsonl", b"5\n", "line 1 of .*metrics.jsonl is no JSON object"),
        ("learner-0/metrics.jsonl", b"{\n", "line 1 of .*metrics.jsonl is damaged"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, text, message):
    make_run(tmp_path)
    (tmp_path / file).write_bytes(text)
    with pytest.raises(MoeAsyncError, match=message):
        report_document(tmp_path)


def test_no_text_of_a_run_is_taken_for_a_part_of_the_page(tmp_path):
    hostile = "</script><script>alert(1)</script> STYLE DATA"
    make_learner(tmp_path / "run")
    document = report_document(tmp_path / "run") | {"name": hostile}
    page = report_page(document)
    assert page.count("</script>") == 2 and page.count("<style>") == 1
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data) == json.loads(json_text(document))


def test_the_command(tmp_path, capsys):
    make_learner(tmp_path / "run")
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "run"), "-o", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out and out.read_text().startswith("<!DOCTYPE html>")
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "run"
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "no" / "page.html")]) == 1
    assert "give another file with -o" in capsys.readouterr().err
    (tmp_path / "null.json").write_text("null")
    assert main(["report", str(tmp_path / "run"), "--profile", str(tmp_path / "null.json")]) == 1
    assert "holds no JSON object" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run"), "--profile", str(out)]) == 1
    assert "profile --json" in capsys.readouterr().err
