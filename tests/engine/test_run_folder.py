"""Names of run folders, what a resumed run starts from, and what it forgets."""

import json
import math
import shutil

import pytest

from moe_async.engine.checkpoint_folder import (
    MANIFEST,
    Manifest,
    abandon_after,
    checkpoint_name,
    find_checkpoints,
    partial_folder,
    publish,
    read_manifest,
    write_manifest,
)
from moe_async.engine.run_folder import RunFolder, append_line, forget_after, new_run, resumed_run
from moe_async.errors import CheckpointError


def checkpoint(run, step, complete=True):
    """A folder that looks like the checkpoint after ``step``."""
    path = run / "checkpoints" / checkpoint_name(step)
    path.mkdir(parents=True)
    if complete:
        write_manifest(path, Manifest("", 1, 1, {"dense": step, "expert": step}, {}, {}))
    return path


def test_a_run_never_writes_into_anothers_folder(tmp_path):
    paths = [new_run(tmp_path / "runs", "quick").path for _ in range(3)]
    assert paths == [tmp_path / "runs" / name for name in ("quick", "quick-2", "quick-3")]
    assert all(path.is_dir() for path in paths)
    (tmp_path / "runs" / "file").write_text("")
    assert new_run(tmp_path / "runs", "file").path.name == "file-2"


def test_the_files_of_a_run(tmp_path):
    folder = RunFolder(tmp_path)
    assert [path.name for path in (folder.recipe, folder.deepspeed, folder.metrics, folder.expert_load)] == [
        "recipe.yaml", "deepspeed.json", "metrics.jsonl", "expert_load"
    ]  # fmt: skip
    assert folder.summary == tmp_path / "summary.json" and folder.checkpoints == tmp_path / "checkpoints"


def test_checkpoints_are_complete_ones_in_the_order_of_steps(tmp_path):
    paths = [checkpoint(tmp_path, step) for step in (300, 20, 1000)]
    checkpoint(tmp_path, 2000, complete=False)
    for name in (".step_00003000.partial", "step_later"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / MANIFEST).write_text("{}")
    assert find_checkpoints(tmp_path / "checkpoints") == [paths[1], paths[0], paths[2]]
    assert find_checkpoints(tmp_path / "nowhere") == []


def test_latest_is_the_newest_checkpoint_of_the_newest_run_that_has_one(tmp_path):
    for name in ("quick", "quick-2", "quick-10", "quick-11", "quickest", "quick-x", "my-quick"):
        (tmp_path / name).mkdir()
    checkpoint(tmp_path / "quick", 900)
    checkpoint(tmp_path / "quick-2", 500)
    checkpoint(tmp_path / "quick-10", 100)
    newest = checkpoint(tmp_path / "quick-10", 200)
    # These are of other runs, or not complete.
    checkpoint(tmp_path / "quickest", 7000)
    checkpoint(tmp_path / "quick-x", 7000)
    checkpoint(tmp_path / "quick-11", 7000, complete=False)
    assert resumed_run(tmp_path, "quick", "latest") == (RunFolder(tmp_path / "quick-10"), newest)


def test_a_name_with_signs_of_patterns_is_taken_as_it_is(tmp_path):
    checkpoint(tmp_path / "a1b", 5)
    mine = checkpoint(tmp_path / "a.b", 3)
    assert resumed_run(tmp_path, "a.b", "latest") == (RunFolder(tmp_path / "a.b"), mine)


def test_a_run_or_a_checkpoint_by_its_path(tmp_path):
    older, newer = checkpoint(tmp_path / "run", 5), checkpoint(tmp_path / "run", 30)
    for resume, expected in ((tmp_path / "run", newer), (older, older), (newer, newer)):
        assert resumed_run(tmp_path / "elsewhere", "other", str(resume)) == (RunFolder(tmp_path / "run"), expected)


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path):
    older, newer = checkpoint(tmp_path / "quick", 5), checkpoint(tmp_path / "quick", 30)
    (newer / MANIFEST).write_text("{")
    assert resumed_run(tmp_path, "quick", "latest") == (RunFolder(tmp_path / "quick"), older)
    (older / MANIFEST).write_text("[]")
    with pytest.raises(CheckpointError, match=r"step_00000030.*damaged"):
        resumed_run(tmp_path, "quick", str(tmp_path / "quick"))


def test_a_checkpoint_outside_a_run_is_refused(tmp_path, monkeypatch):
    copied = checkpoint(tmp_path / "run", 5).rename(tmp_path / "copied")
    with pytest.raises(CheckpointError, match="not in the checkpoints folder of a run"):
        resumed_run(tmp_path, "quick", str(copied))
    mine = checkpoint(tmp_path / "run", 6)
    monkeypatch.chdir(mine.parent)
    assert resumed_run(tmp_path, "quick", mine.name) == (RunFolder(tmp_path / "run"), mine)


def published(folder, step, keep):
    aside = partial_folder(folder, step)
    write_manifest(aside, Manifest("", 1, 1, {"dense": step, "expert": step}, {}, {}))
    publish(aside, folder / checkpoint_name(step), keep)
    return [path.name for path in find_checkpoints(folder)]


def test_keeping_never_deletes_what_was_just_written(tmp_path):
    names = [checkpoint_name(step) for step in (10, 20, 30, 40)]
    assert published(tmp_path, 20, keep=2) == names[1:2]
    assert published(tmp_path, 40, keep=2) == [names[1], names[3]]
    # An older step again, as after a resume from an earlier checkpoint.
    assert published(tmp_path, 30, keep=2) == names[1:]
    assert published(tmp_path, 30, keep=1) == names[2:]
    assert sorted(path.name for path in tmp_path.iterdir()) == names[2:]


def test_a_folder_without_its_name_is_no_checkpoint_and_is_swept(tmp_path):
    checkpoint(tmp_path, 10)
    folder = tmp_path / "checkpoints"
    for left in (".step_00000007.partial", ".step_00000005.old"):
        (folder / left).mkdir()
        (folder / left / MANIFEST).write_text("{}")
    assert [path.name for path in find_checkpoints(folder)] == ["step_00000010"]
    published(folder, 12, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000010", "step_00000012"]


def test_a_crash_while_deleting_leaves_no_checkpoint_with_missing_files(tmp_path, monkeypatch):
    for step in (10, 20):
        published(tmp_path, step, keep=2)

    def die(path, ignore_errors=False):
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        published(tmp_path, 30, keep=2)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step_00000020", "step_00000030"]
    monkeypatch.undo()
    assert published(tmp_path, 30, keep=2) == ["step_00000020", "step_00000030"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000020", "step_00000030"]


def test_later_checkpoints_of_another_branch_are_renamed(tmp_path):
    for step in (10, 20, 30):
        checkpoint(tmp_path, step)
    folder = tmp_path / "checkpoints"
    assert [path.name for path in abandon_after(folder, 10)] == [
        "abandoned-1-step_00000020", "abandoned-1-step_00000030"
    ]  # fmt: skip
    checkpoint(tmp_path, 20)
    assert [path.name for path in abandon_after(folder, 10)] == ["abandoned-2-step_00000020"]
    assert [path.name for path in find_checkpoints(folder)] == ["step_00000010"]
    assert read_manifest(folder / "abandoned-1-step_00000030").optimizer_steps == {"dense": 30, "expert": 30}


def test_a_checkpoint_of_the_format_before_is_read(tmp_path):
    checkpoint(tmp_path, 30)
    manifest = tmp_path / "checkpoints" / "step_00000030" / "manifest.json"
    document = json.loads(manifest.read_text())
    assert document["format_version"] == 3
    manifest.write_text(json.dumps(document | {"format_version": 2, "optimizer_steps": 30}))
    assert read_manifest(manifest.parent).optimizer_steps == {"dense": 30, "expert": 30}


def test_nothing_to_resume_says_so(tmp_path):
    (tmp_path / "quick").mkdir()
    with pytest.raises(CheckpointError, match=r"no run called quick with a checkpoint in .*; start without --resume"):
        resumed_run(tmp_path, "quick", "latest")
    with pytest.raises(CheckpointError, match="no run called quick"):
        resumed_run(tmp_path / "nowhere", "quick", "latest")
    with pytest.raises(CheckpointError, match=r"neither a checkpoint nor a run with one; give a folder such as"):
        resumed_run(tmp_path, "quick", str(tmp_path / "quick"))


def test_lines_are_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1, "lm_loss": 2.5})
    append_line(path, {"step": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1, "lm_loss": 2.5}, {"step": 2}]


def test_a_number_that_is_not_finite_becomes_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(
        path, {"step": 1, "lm_loss": math.nan, "by_domain": {"code": math.inf, "text": 2.0}, "ids": [-math.inf, 3]}
    )
    expected = '{"step": 1, "lm_loss": null, "by_domain": {"code": null, "text": 2.0}, "ids": [null, 3]}'
    assert path.read_text() == expected + "\n"


def test_a_resumed_run_forgets_later_and_broken_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = ['{"step": 0, "heldout_bits_per_byte": 8.0}', '{"step": 1}', '{"step": 2}', '{"step": 2, "layer": 1}']
    lost = ['{"step": 3}', '{"tokens": 5}', "[1]", "7", '{"step": null}', '{"step": "last"}', "", '{"step": 1, "lm']
    path.write_text("\n".join([*kept[:2], *lost[:4], *kept[2:], *lost[4:]]))
    forget_after(path, 2)
    assert path.read_text() == "".join(line + "\n" for line in kept)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    append_line(path, {"step": 3})
    assert path.read_text().splitlines()[-1] == '{"step": 3}'


def test_forgetting_where_nothing_is_written_makes_no_file(tmp_path):
    forget_after(tmp_path / "metrics.jsonl", 0)
    assert list(tmp_path.iterdir()) == []
