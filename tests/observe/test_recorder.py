"""Steps become windows, with what follows from their loads."""

from __future__ import annotations

import numpy as np

from moe_async.observe.recorder import FLUSH_WINDOWS, LoadRecorder
from moe_async.observe.store import LoadStore, read_load
from tests.observe.loads import figures_of, meta_of, paths_of

EVEN, FULL, OTHER = [4, 4, 4, 4], [16, 0, 0, 0], [0, 16, 0, 0]


def recorded(folder, steps, every=1, meta=None, **others):
    meta = meta or meta_of(layers=1)
    recorder = LoadRecorder(LoadStore(folder, meta, every=every))
    for step, counts in enumerate(steps, start=1):
        recorder.add(step, figures_of(meta, [counts], **others))
    recorder.flush()
    return read_load(folder).windows


def test_figures_that_follow_from_the_loads_of_a_step(tmp_path):
    windows = recorded(tmp_path, [EVEN, FULL, OTHER], rank_load=[[12, 4]], micro_batches=[3])
    assert windows["counts"][:, 0].tolist() == [EVEN, FULL, OTHER]
    assert windows["violation"][:, 0].tolist() == [0, 3, 3]
    assert windows["rank_violation"][:, 0].tolist() == [0.5] * 3
    assert windows["micro_batches"].tolist() == [3] * 3
    # Expert 0 goes from 4 times its share to none, expert 1 the other way.
    assert windows["swing"][:, 0].tolist() == [[0] * 4, [0] * 4, [1, 1, 0, 0]]


def test_several_steps_are_one_window(tmp_path):
    windows = recorded(tmp_path, [EVEN, FULL, OTHER, EVEN], every=3)
    assert windows["steps"].tolist() == [3, 1]
    assert windows["first_step"].tolist() == [1, 4] and windows["last_step"].tolist() == [3, 4]
    assert windows["counts"][0, 0].tolist() == [20, 20, 4, 4]
    assert windows["peak"][0, 0].tolist() == [16, 16, 4, 4]
    assert windows["violation"][0, 0] == 6 and windows["violation_peak"][0, 0] == 3


def test_zero_experts_are_no_part_of_the_balance(tmp_path):
    meta = meta_of(layers=1, ranks=0)
    meta = type(meta)(meta.layers, (3,), meta.top_k, zero_experts=1)
    windows = recorded(tmp_path, [[4, 4, 4, 90]], meta=meta)
    assert windows["violation"][0, 0] == 0


def test_the_bias_of_a_window_is_that_after_its_last_step(tmp_path):
    meta = meta_of(layers=1)
    recorder = LoadRecorder(LoadStore(tmp_path, meta, every=2))
    for step, bias in ((1, 0.5), (2, -0.25)):
        recorder.add(step, figures_of(meta, [EVEN]), bias_LE=np.full((1, 4), bias))
    recorder.flush()
    assert read_load(tmp_path).windows["bias"].tolist() == [[[-0.25] * 4]]


def test_a_killed_process_loses_few_windows(tmp_path):
    meta = meta_of(layers=1)
    recorder = LoadRecorder(LoadStore(tmp_path, meta))
    for step in range(1, FLUSH_WINDOWS + 3):
        assert recorder.at_start
        recorder.add(step, figures_of(meta, [EVEN]), paths=paths_of(meta, [step]))
    assert len(read_load(tmp_path).windows) == FLUSH_WINDOWS
    assert read_load(tmp_path).paths.step.tolist() == list(range(1, FLUSH_WINDOWS + 1))
    recorder.flush()
    assert len(read_load(tmp_path).windows) == FLUSH_WINDOWS + 2


def test_paths_are_wanted_at_the_start_of_a_window(tmp_path):
    meta = meta_of(layers=1)
    recorder = LoadRecorder(LoadStore(tmp_path, meta, every=2))
    wanted = []
    for step in range(1, 6):
        wanted.append(recorder.at_start)
        recorder.add(step, figures_of(meta, [EVEN]))
    assert wanted == [True, False, True, False, True]


def test_a_learner_that_goes_back_records_those_steps_again(tmp_path):
    meta = meta_of(layers=1)
    recorder = LoadRecorder(LoadStore(tmp_path, meta))
    for step in (1, 2, 3, 2, 3, 4):
        recorder.add(step, figures_of(meta, [EVEN]))
    recorder.flush()
    assert read_load(tmp_path).windows["last_step"].tolist() == [1, 2, 3, 4]


def test_a_short_window_that_is_flushed_is_followed_by_a_new_one(tmp_path):
    meta = meta_of(layers=1)
    recorder = LoadRecorder(LoadStore(tmp_path, meta, every=4))
    for step in range(1, 7):
        recorder.add(step, figures_of(meta, [EVEN]))
        if step == 2:
            recorder.flush()
    recorder.flush()
    assert read_load(tmp_path).windows["steps"].tolist() == [2, 4]
