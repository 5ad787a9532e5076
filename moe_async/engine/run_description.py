"""What a syncer makes of the first learner's recipe: fragments, initial values, policies."""

from __future__ import annotations

from pathlib import Path

from moe_async.engine.run_folder import new_run
from moe_async.engine.sync_plan import outer_schedule, sync_groups
from moe_async.model import build_model
from moe_async.model.keys import exchanged_tensors
from moe_async.recipe import parse_recipe
from moe_async.sync.server import RunDescription


def describe_run(text: str, folder: Path | None = None) -> RunDescription:
    """The run of a recipe, with a folder of its own.

    Args:
        text: the resolved recipe.
        folder: to write to; None: a new one for the recipe's name in its ``log.dir``.

    Raises:
        MoeAsyncError: the recipe is not valid, or not for several learners.
    """
    recipe = parse_recipe(text, "the first learner's recipe")
    model = build_model(recipe)
    groups = sync_groups(recipe, model)
    tensors = exchanged_tensors(model)
    fragments = [fragment for group in groups for fragment in group.fragments]
    if folder is None:
        folder = new_run(Path(recipe.log.dir).expanduser(), recipe.name or "run").path
    folder.mkdir(parents=True, exist_ok=True)
    return RunDescription(
        folder=folder,
        learners=recipe.sync.learners,
        num_experts=recipe.moe.num_experts if recipe.moe else 1,
        groups=groups,
        initial={fragment.number: fragment.flatten(tensors) for fragment in fragments},
        schedule=outer_schedule(recipe),
        timeout=recipe.sync.timeout,
    )
