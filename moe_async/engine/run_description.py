"""What a syncer makes of the first learner's recipe: fragments, initial values, policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moe_async.engine.run_folder import new_run
from moe_async.engine.sync_plan import outer_schedule, sync_groups
from moe_async.model import build_model
from moe_async.model.keys import exchanged_tensors
from moe_async.recipe import parse_recipe
from moe_async.sync.run import RunDescription

if TYPE_CHECKING:
    from torch import Tensor

    from moe_async.recipe import Recipe
    from moe_async.sync.syncer import SyncGroup


def describe_run(text: str, folder: Path | None = None) -> RunDescription:
    """The run of a recipe, with a folder of its own.

    Args:
        text: the resolved recipe.
        folder: to write to; None: a new one for the recipe's name in its ``log.dir``.

    Raises:
        MoeAsyncError: the recipe is not valid, or not for several learners.
    """
    recipe = parse_recipe(text, "the first learner's recipe")
    joint = recipe.sync.between is not None and recipe.sync.via == "all_reduce"
    groups, initial = ([], {}) if joint else _first_version(recipe)
    if folder is None:
        folder = new_run(Path(recipe.log.dir).expanduser(), recipe.name or "run").path
    folder.mkdir(parents=True, exist_ok=True)
    return RunDescription(
        folder=folder,
        learners=recipe.sync.learners,
        num_experts=recipe.moe.num_experts if recipe.moe else 1,
        groups=groups,
        initial=initial,
        schedule=outer_schedule(recipe),
        timeout=recipe.sync.timeout,
        joint=joint,
    )


def _first_version(recipe: Recipe) -> tuple[list[SyncGroup], dict[int, Tensor]]:
    """What is exchanged, and version 0 of every fragment."""
    model = build_model(recipe)
    groups = sync_groups(recipe, model)
    tensors = exchanged_tensors(model)
    fragments = [fragment for group in groups for fragment in group.fragments]
    return groups, {fragment.number: fragment.flatten(tensors) for fragment in fragments}
