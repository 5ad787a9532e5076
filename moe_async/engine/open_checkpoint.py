"""A checkpoint as a model that can be looked at: one process, all experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_async.engine.checkpoint import load_weights
from moe_async.engine.checkpoint_folder import MANIFEST, Manifest, read_manifest
from moe_async.engine.run_folder import RunFolder, resumed_run
from moe_async.errors import CheckpointError
from moe_async.model import Transformer, build_model
from moe_async.recipe import Recipe, parse_recipe


@dataclass(frozen=True)
class OpenedCheckpoint:
    """What a checkpoint holds.

    Attributes:
        folder: of the checkpoint.
        run: that wrote it.
        recipe: of the run, for one process.
        manifest: what the checkpoint says of itself.
        model: with the checkpoint's weights, in evaluation mode, on the CPU.
    """

    folder: Path
    run: RunFolder
    recipe: Recipe
    manifest: Manifest
    model: Transformer


def open_checkpoint(path: Path, overrides: Sequence[str] = ()) -> OpenedCheckpoint:
    """Load a checkpoint into one process.

    Args:
        path: a checkpoint's folder, or a run's (its newest checkpoint is taken).
        overrides: recipe entries to replace, such as ``data.source=my.txt``.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        RecipeError: an override is wrong.
    """
    learners = sorted(str(one.parent) for one in path.glob("learner-*/checkpoints"))
    if learners and not (path / "checkpoints").is_dir():
        raise CheckpointError(f"{path} is a run of several learners; name one of them: {', '.join(learners)}.")
    run, folder = resumed_run(path.parent, path.name, str(path))
    recipe = parse_recipe(read_manifest(folder).recipe, str(folder / MANIFEST), ["parallel.expert=1", *overrides])
    model = build_model(recipe)
    manifest = load_weights(folder, model)
    return OpenedCheckpoint(folder, run, recipe, manifest, model.eval())
