"""Figures of layers, by hand."""

import numpy as np
import pytest

from moe_async.errors import LoadError
from moe_async.observe.figures import between, first_part, last_part, summarise
from moe_async.observe.paths import Paths
from moe_async.observe.recorder import LoadRecorder
from moe_async.observe.store import LoadRecord, LoadStore, read_load
from moe_async.observe.windows import Windows
from tests.observe.loads import figures_of, meta_of, windows_of


def record_of(folder, meta, steps):
    """The record of steps with those figures, through the folder."""
    recorder = LoadRecorder(LoadStore(folder, meta))
    for step, figures in enumerate(steps, start=1):
        recorder.add(step, figures)
    recorder.flush()
    return read_load(folder)


def test_a_layer_by_hand(tmp_path):
    meta = meta_of(layers=1)
    first = figures_of(
        meta, [[100, 60, 39, 1]], tokens=[100], dropped=[[20, 0, 0, 0]], entropy=[50], top=[80], margin=[30], z=[400],
        rank_load=[[140, 40]], micro_violation=[2.0], micro_violation_peak=[1.5], micro_batches=[2],
    )  # fmt: skip
    second = figures_of(
        meta, [[20, 140, 39, 1]], tokens=[100], entropy=[150], top=[60], margin=[50], z=[1200], rank_load=[[160, 40]],
        micro_violation=[4.0], micro_violation_peak=[3.0], micro_batches=[2],
    )  # fmt: skip
    record = record_of(tmp_path, meta, [first, second])
    layer = summarise(record, record.windows).layers[0]
    assert (layer.layer, layer.experts, layer.tokens) == ("layer 0", 4, 200)
    loads = np.array([120, 200, 78, 2])
    assert layer.max_over_mean == pytest.approx(2.0) and layer.cv == pytest.approx(loads.std() / 100)
    # MaxVio of the steps: 100 / 50 - 1 and 140 / 50 - 1.
    assert (layer.violation, layer.violation_peak) == (pytest.approx(1.4), pytest.approx(1.8))
    assert (layer.micro_violation, layer.micro_violation_peak) == (1.5, 3.0)
    share = loads / 400
    assert layer.entropy == pytest.approx(-(share * np.log(share)).sum())
    assert layer.effective_experts == pytest.approx(np.exp(layer.entropy))
    assert layer.dead == () and layer.starved == (3,)
    assert layer.drop_rate == 20 / 400 and layer.zero_rate == 0
    assert (layer.router_entropy, layer.confidence, layer.margin) == (1.0, 0.7, 0.4)
    assert layer.logit_size == pytest.approx(8**0.5)
    # 80 of 200 assignments went elsewhere.
    assert layer.drift == pytest.approx(0.4)
    assert layer.rank_imbalance == pytest.approx(300 / 190)
    assert layer.step_imbalance == pytest.approx((140 / 90 + 160 / 100) / 2)


def test_zero_experts_are_no_experts(tmp_path):
    meta = meta_of(layers=1, ranks=0)
    meta = type(meta)(**{**vars(meta), "zero_experts": 1})
    figures = figures_of(meta, [[10, 10, 10, 0, 30]], tokens=[30])
    record = record_of(tmp_path, meta, [figures])
    layer = summarise(record).layers[0]
    assert layer.zero_rate == 0.5 and layer.dead == (3,)
    assert layer.max_over_mean == pytest.approx(10 / 7.5)
    assert layer.rank_imbalance is layer.step_imbalance is layer.drift is None


def test_parts_of_a_record():
    windows = windows_of(meta_of(), 100)
    assert last_part(windows)["first_step"].tolist() == list(range(91, 101))
    assert first_part(windows)["first_step"].tolist() == list(range(1, 11))
    assert between(windows, 5, 7)["first_step"].tolist() == [5, 6, 7]
    long = windows.merged(50)
    assert last_part(long)["first_step"].tolist() == [51] and first_part(long)["first_step"].tolist() == [1]
    with pytest.raises(LoadError, match=r"within steps 5 to 9; it holds steps 1 to 100 in windows of up to 50 steps"):
        between(long, 5, 9)


def test_nothing_to_say():
    meta = meta_of(layers=0)
    with pytest.raises(LoadError, match="without experts"):
        summarise(LoadRecord(meta, Windows.empty(meta.sizes), Paths.empty(0, 0)))
    meta = meta_of()
    with pytest.raises(LoadError, match="no step yet"):
        summarise(LoadRecord(meta, Windows.empty(meta.sizes), Paths.empty(2, 2)))
