"""The folder of a record: what is read is what was written, it stays small, and damage is told."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from moe_async.errors import LoadError
from moe_async.observe.paths import Paths
from moe_async.observe.store import BUDGET_BYTES, MOST_WINDOWS, LoadMeta, LoadStore, read_load
from moe_async.observe.windows import FIELDS, Windows
from tests.observe.loads import equal, meta_of, paths_of, windows_of


def record(folder, steps, meta=None, budget=BUDGET_BYTES, part=16):
    """Write ``steps`` steps in windows as long as the store wants them, ``part`` at a time; the steps themselves."""
    meta = meta or meta_of()
    windows, done = windows_of(meta, steps), 0
    store = LoadStore(folder, meta, budget=budget)
    while done < steps:
        some = windows.chosen(slice(done, done + part * store.window_steps)).merged(store.window_steps)
        done += int(some["steps"].sum())
        store.append(some, paths_of(meta, some["last_step"], seed=done))
    return store, windows


def test_what_is_read_is_what_was_written(tmp_path):
    meta = meta_of(ranks=2, domains=("code", "prose", "(none)"))
    windows, paths = windows_of(meta, 5), paths_of(meta, [1, 3])
    LoadStore(tmp_path / "expert_load", meta).append(windows, paths)
    for folder in (tmp_path, tmp_path / "expert_load"):
        found = read_load(folder)
        assert found.meta == meta and equal(found.windows, windows)
        assert all(
            np.array_equal(a, b) for a, b in zip(found.paths.arrays().values(), paths.arrays().values(), strict=True)
        )


def test_a_long_record_keeps_sums_and_maxima_in_few_windows(tmp_path):
    store, windows = record(tmp_path, 500, budget=1)
    found = read_load(tmp_path).windows
    assert store.most == 64 and 32 <= len(found) <= 64 + 16
    assert store.window_steps == 8
    for name in FIELDS:
        np.testing.assert_allclose(found.total()[name], windows.total()[name], rtol=1e-6, err_msg=name)
    # In the order of steps, without gap or overlap.
    assert (found["first_step"][1:] == found["last_step"][:-1] + 1).all()
    assert found["steps"].sum() == 500
    paths = read_load(tmp_path).paths
    assert 0 < len(paths) < 100 and (np.diff(paths.step) > 0).all()


@pytest.mark.parametrize("part", [1, 3, 64])
def test_parts_of_any_length_are_halved(tmp_path, part):
    _, windows = record(tmp_path, 200, budget=1, part=part)
    found = read_load(tmp_path).windows
    assert len(found) <= 64 + part
    assert np.array_equal(found.total()["counts"], windows.total()["counts"])
    assert np.array_equal(found.total()["peak"], windows.total()["peak"])


def test_short_windows_are_put_together_evenly(tmp_path):
    """Checkpoints cut windows short; that must not make the old ones ever longer."""
    meta = meta_of()
    store = LoadStore(tmp_path, meta, budget=1)
    windows = windows_of(meta, 600)
    for start in range(0, 600, 3):
        store.append(windows.chosen(slice(start, start + 3)).merged(3), paths_of(meta, [start + 1]))
    found = read_load(tmp_path).windows
    assert len(found) <= 64 and found["steps"].max() <= 16 == store.window_steps
    assert np.array_equal(found.total()["counts"], windows.total()["counts"])


def test_a_run_of_a_large_model_stays_below_a_gigabyte(tmp_path):
    """48 layers of 256 experts, 8 ranks and 5 labels: however long, it holds `most` windows of this size."""
    meta = meta_of(layers=48, experts=256, ranks=8, domains=("a", "b", "c", "d", "(none)"))
    windows = windows_of(meta, 8)
    store = LoadStore(tmp_path, meta)
    store.append(windows, paths_of(meta, np.repeat(windows["last_step"], 16)))
    size = sum(path.stat().st_size for path in tmp_path.iterdir()) / 8
    # At the worst there are `most` windows, a part that is being added, and a file that is being rewritten.
    assert (store.most + 64 + 128) * size < 1e9
    assert store.most >= 256


def test_a_small_model_keeps_more_windows_but_not_any_number(tmp_path):
    assert LoadStore(tmp_path, meta_of(layers=1)).most == MOST_WINDOWS


def test_a_resumed_record_goes_on(tmp_path):
    meta = meta_of()
    record(tmp_path, 20, part=7)
    LoadStore(tmp_path, meta).forget_after(11)
    assert read_load(tmp_path).windows["last_step"].tolist() == list(range(1, 12))
    assert read_load(tmp_path).paths.step.max() == 11
    again = LoadStore(tmp_path, meta)
    again.append(windows_of(meta, 9, first=12), paths_of(meta, [12]))
    assert read_load(tmp_path).windows["last_step"].tolist() == list(range(1, 21))


def test_a_window_that_reaches_beyond_the_step_goes(tmp_path):
    meta = meta_of()
    store = LoadStore(tmp_path, meta)
    store.append(windows_of(meta, 12).merged(4), paths_of(meta, [1, 5, 9]))
    store.forget_after(6)
    assert read_load(tmp_path).windows["last_step"].tolist() == [4]
    assert read_load(tmp_path).paths.step.tolist() == [1]
    store.forget_after(0)
    assert not len(read_load(tmp_path).windows) and not list(tmp_path.glob("windows-*"))


def test_a_process_killed_while_it_rewrites_loses_nothing(tmp_path):
    meta = meta_of()
    _, windows = record(tmp_path / "a", 12, part=4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    # The longer file is there, the ones that it replaces are not removed yet, and another was cut short.
    LoadStore(tmp_path / "c", meta).append(windows.merged(2), paths_of(meta, [1]))
    (longer,) = (tmp_path / "c").glob("windows-*")
    shutil.copy(longer, tmp_path / "b")
    (tmp_path / "b" / "windows-00000013-00000014.partial").write_bytes(b"half")
    found = read_load(tmp_path / "b").windows
    assert np.array_equal(found["counts"], windows.merged(2)["counts"])
    # Whoever goes on with it does not count the steps twice either.
    LoadStore(tmp_path / "b", meta).append(windows_of(meta, 2, first=13), Paths.empty(2, 2))
    assert read_load(tmp_path / "b").windows["steps"].sum() == 14


def test_other_axes_are_refused(tmp_path):
    record(tmp_path, 3)
    assert LoadStore.fits(tmp_path, meta_of()) and not LoadStore.fits(tmp_path, meta_of(ranks=4))
    with pytest.raises(LoadError, match=r"whose rank_experts are .*Give another folder"):
        LoadStore(tmp_path, meta_of(ranks=4))
    assert LoadStore.fits(tmp_path / "none", meta_of(ranks=4))


def test_a_folder_without_a_record_is_told(tmp_path):
    with pytest.raises(LoadError, match="does not exist"):
        read_load(tmp_path / "runs")
    with pytest.raises(LoadError, match="holds no record of expert loads"):
        read_load(tmp_path)
    record(tmp_path / "learner-0" / "expert_load", 3)
    with pytest.raises(LoadError, match=r"several learners; name one of them: .*learner-0"):
        read_load(tmp_path)


def test_damage_is_told(tmp_path):
    record(tmp_path, 3)
    (path,) = tmp_path.glob("windows-*")
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    with pytest.raises(LoadError, match=r"windows-00000001-00000003.safetensors is damaged"):
        read_load(tmp_path)
    with pytest.raises(LoadError, match="is damaged"):
        LoadStore(tmp_path, meta_of())
    path.write_bytes(content)
    path.rename(tmp_path / "windows-x.safetensors")
    with pytest.raises(LoadError, match="is not a name"):
        read_load(tmp_path)
    meta = tmp_path / "meta.json"
    document = json.loads(meta.read_text())
    other = json.dumps(document | {"version": 9})
    for text, words in (("{", "cannot be read"), ("[]", "cannot be read"), (other, "format version 9")):
        meta.write_text(text)
        with pytest.raises(LoadError, match=words):
            read_load(tmp_path)


def test_counts_beyond_four_bytes_are_kept(tmp_path):
    meta = meta_of()
    windows = windows_of(meta, 1)
    large = Windows(windows.items() | {"counts": windows["counts"] + 2**40})
    LoadStore(tmp_path, meta).append(large, Paths.empty(2, 2))
    assert equal(read_load(tmp_path).windows, large)


def test_meta_knows_its_sizes():
    meta = LoadMeta(layers=("a", "b"), experts=(4, 8), top_k=(1, 2), zero_experts=2)
    assert (meta.sizes.layers, meta.sizes.choices, meta.sizes.ranks, meta.sizes.domains) == (2, 10, 0, 1)
