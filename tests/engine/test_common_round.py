"""Which checkpoints of several learners fit together."""

from __future__ import annotations

import pytest

from moe_async.engine.checkpoint_folder import Manifest, checkpoint_name, write_manifest
from moe_async.engine.common_round import common_checkpoints, saved_learners
from moe_async.errors import CheckpointError


def save(run, learner, rounds_at):
    """Checkpoints of a learner: rounds by step; None: of a learner whose updates went over the syncer."""
    for step, rounds in rounds_at.items():
        folder = run / f"learner-{learner}" / "checkpoints" / checkpoint_name(step)
        folder.mkdir(parents=True)
        state = {"learner": learner} if rounds is None else {"learner": learner, "rounds": rounds}
        write_manifest(folder, Manifest("", 1, 1, {}, {"exchange": state}, {}))


def test_the_newest_round_that_all_have(tmp_path):
    save(tmp_path, 0, {4: 1, 5: 1, 7: 2, 9: 3})
    save(tmp_path, 1, {4: 1, 6: 2, 8: 2})
    assert [path.name for path in common_checkpoints(tmp_path, 2)] == [checkpoint_name(7), checkpoint_name(8)]
    # Steps between the same two exchanges may differ; a damaged checkpoint is none.
    (tmp_path / "learner-1" / "checkpoints" / checkpoint_name(8) / "manifest.json").write_text("{}")
    assert [path.name for path in common_checkpoints(tmp_path, 2)] == [checkpoint_name(7), checkpoint_name(6)]


def test_without_one_the_error_names_the_steps(tmp_path):
    save(tmp_path, 0, {6: 2})
    save(tmp_path, 1, {3: 1, 4: 1, 5: None})
    with pytest.raises(
        CheckpointError, match=r"no checkpoints .* 2 learners .*\(learner 0: steps 6; learner 1: steps 4\)"
    ):
        common_checkpoints(tmp_path, 2)
    with pytest.raises(CheckpointError, match="learner 2: none"):
        saved_learners(tmp_path, 3, joint=True)
    assert saved_learners(tmp_path, 3, joint=False) == [tmp_path / "learner-0", tmp_path / "learner-1", None]
