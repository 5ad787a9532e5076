"""Checkpoints of several learners from which they go on together.

Learners that add up among themselves (`sync.via: all_reduce`) have to come back from between the same two exchanges;
their steps may differ. Each checkpoint says after how many merges it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_async.engine.checkpoint_folder import find_checkpoints, read_manifest, step_of
from moe_async.errors import CheckpointError


def saved_learners(run: Path, learners: int, joint: bool) -> Sequence[Path | None]:
    """From which folder or checkpoint each learner goes on; None: it has none, and begins with the newest weights.

    Args:
        run: the folder of the run.
        learners: how many there are.
        joint: whether they go on only together.

    Raises:
        CheckpointError: as `common_checkpoints`.
    """
    if joint:
        return common_checkpoints(run, learners)
    folders = [run / f"learner-{learner}" for learner in range(learners)]
    return [folder if find_checkpoints(folder / "checkpoints") else None for folder in folders]


def common_checkpoints(run: Path, learners: int) -> list[Path]:
    """The newest checkpoints of all learners that fit together, by learner.

    Args:
        run: the folder of the run, with a folder for each learner.
        learners: how many there are.

    Raises:
        CheckpointError: there are none; it names the steps of those that are there.
    """
    found = [_by_rounds(run / f"learner-{learner}" / "checkpoints") for learner in range(learners)]
    common = set.intersection(*(set(entry) for entry in found))
    if not common:
        there = "; ".join(f"learner {learner}: {_steps(list(entry.values()))}" for learner, entry in enumerate(found))
        raise CheckpointError(
            f"{run} has no checkpoints from which all {learners} learners can go on together: they must be of the same "
            f"round, but there are ({there}). Start a new run without --resume; with train.checkpoint_every all "
            "learners save after the same steps."
        )
    newest = max(common)
    return [entry[newest] for entry in found]


def _by_rounds(folder: Path) -> dict[int, Path]:
    """The newest checkpoint of each round; those that are damaged are left out."""
    found = {}
    for path in find_checkpoints(folder):
        try:
            state = read_manifest(path).trainer.get("exchange") or {}
        except CheckpointError:
            continue
        if "rounds" in state:
            found[int(state["rounds"])] = path
    return found


def _steps(paths: Sequence[Path]) -> str:
    return f"steps {', '.join(str(step_of(path)) for path in paths)}" if paths else "none"
