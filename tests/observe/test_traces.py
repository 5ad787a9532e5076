"""Router traces of other programs give the figures that counting by hand gives."""

import json

import numpy as np
import pytest

from moe_async.errors import LoadError
from moe_async.observe import read_traces, summarise
from moe_async.observe.paths import NO_EXPERT


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_experts_of_each_token(tmp_path):
    probs = [[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]]
    trace = write(
        tmp_path / "t.jsonl",
        {"step": 1, "layer": 0, "experts": [[0, 1], [3, 2]], "probs": probs, "tokens": [7, 9], "domain": ["a", "b"]},
        {"step": 1, "layer": 1, "experts": [[0, -1], [0, 2]], "domain": ["a", "b"]},
        {"step": 2, "layer": 0, "experts": [[0, 3]], "logits": [[2.0, 0.0, 0.0, 1.0]]},
        {"step": 2, "layer": 1, "experts": [[2, 0]]},
    )
    record = read_traces(trace)
    meta, windows = record.meta, record.windows
    assert (meta.layers, meta.experts, meta.top_k) == (("layer 0", "layer 1"), (4, 3), (2, 2))
    assert meta.domains == ("a", "b", "(none)")
    assert windows["first_step"].tolist() == [1, 2] and windows["tokens"].tolist() == [[2, 2], [1, 1]]
    assert windows["counts"].tolist() == [[[1, 1, 1, 1], [2, 0, 1, 0]], [[1, 0, 0, 1], [1, 0, 1, 0]]]
    assert windows["domain_tokens"].tolist() == [[1, 1, 0], [0, 0, 1]]
    assert windows["domain_counts"][0, 1].tolist() == [[1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(windows["prob"][0, 0], np.sum(probs, axis=0))
    np.testing.assert_allclose(windows["top"][0, 0], 0.9)
    np.testing.assert_allclose(windows["margin"][0, 0], 0.3)
    entropy = -sum(p * np.log(p) for row in probs for p in row if p)
    np.testing.assert_allclose(windows["entropy"][0, 0], entropy)
    # Logits tell the z as well; where nothing is known, nothing is made up.
    np.testing.assert_allclose(windows["z"][1, 0], np.log(np.exp([2, 0, 0, 1]).sum()) ** 2)
    assert np.isnan(windows["prob"][:, 1]).all() and np.isfinite(windows["prob"][:, 0]).all()
    assert np.isnan(windows["z"][0, 0]) and np.isnan(windows["entropy"][:, 1]).all()
    assert record.paths.token.tolist() == [7, 9, -1]
    assert record.paths.experts.tolist() == [[[0, 1], [0, NO_EXPERT]], [[3, 2], [0, 2]], [[0, 3], [2, 0]]]


def test_counts_alone(tmp_path):
    trace = write(
        tmp_path / "t.jsonl",
        {"layer": "block.3", "counts": [6, 2], "dropped": [1, 0], "tokens": 4},
        {"layer": "block.3", "counts": [3, 5], "domain": "code"},
    )
    record = read_traces(trace)
    assert record.meta.layers == ("block.3",) and record.windows["first_step"].tolist() == [1, 2]
    assert record.windows["tokens"].tolist() == [[4], [8]] and record.windows["dropped"][0].tolist() == [[1, 0]]
    figures = summarise(record, record.windows).layers[0]
    assert figures.max_over_mean == 9 / 8 and figures.drop_rate == 1 / 16


def test_requests_of_inference_engines(tmp_path):
    trace = write(
        tmp_path / "t.jsonl",
        {"routed_experts": [[[1, 0], [2, 3]], [[1, 2], [2, 0]]], "num_experts": 8},
        {"routed_experts": [[[3, 4], [5, 6]]], "domain": "prose"},
    )
    record = read_traces(trace)
    assert record.meta.experts == (8, 8) and len(record.paths) == 3
    assert record.windows["counts"][0, 0].tolist() == [1, 2, 1, 0, 0, 0, 0, 0]


def test_layers_of_both_kinds_and_bad_logits(tmp_path):
    trace = write(
        tmp_path / "t.jsonl",
        {"step": 1, "layer": 0, "experts": [[0], [1], [1]], "logits": [[1.0, 0.0], [float("nan"), 1.0], [0.0, 1.0]]},
        {"step": 1, "layer": 1, "counts": [5, 1]},
    )
    windows = read_traces(trace).windows
    assert windows["domain_tokens"].tolist() == [[3]] and windows["tokens"].tolist() == [[3, 6]]
    assert windows["bad_tokens"].tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ('{"layer": 0}', r"one of 'experts' \[T\]\[K\], 'counts' \[E\] or"),
        ('{"experts": [[0, 1], [2]]}', "'experts' must be an array of 2 dimensions with whole numbers"),
        ('{"experts": [[0.5]]}', "'experts' must be an array of 2 dimensions with whole numbers"),
        ('{"experts": [[0, 4]], "probs": [[0.5, 0.5]]}', "expert 4 was chosen, but there are 2 experts"),
        ('{"experts": [[0]], "tokens": [1, 2]}', "'tokens' is of 2 tokens, the experts are of 1"),
        ('{"experts": [[0]], "domain": ["a", "b"]}', "one label, or a list of one for each of 1 tokens"),
        ('{"counts": [1, 2], "dropped": [2, 0]}', "'dropped' 0 or more and at most as many"),
        ('{"counts": [1, 2], "dropped": [-1, 0]}', "'dropped' 0 or more and at most as many"),
        ('{"counts": [1, 2, 3], "num_experts": 2}', "'counts' is of 3 experts, but 'num_experts' is 2"),
        ('{"counts": [1], "step": 9007199254740992}', "0 or more and below 2"),
        ('{"counts": [1], "layer": true}', "'layer' is True; it must be a number or a name"),
        ('{"counts": [1, 2], "step": -1}', "'step' is -1; it must be a whole number"),
        ('{"counts": [1, 2], "layer": null}', "'layer' is None; it must be a number or a name"),
        ("", "has no line; each is a JSON object"),
    ],
)
def test_what_is_not_a_trace(line, message, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(LoadError, match=message):
        read_traces(path)
