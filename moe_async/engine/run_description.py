"""What a syncer makes of the first learner's recipe: fragments, initial values, policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moe_async.engine.run_folder import new_run
from moe_async.errors import SyncError
from moe_async.model import build_model
from moe_async.model.keys import exchange_keys, exchanged_tensors
from moe_async.recipe import parse_recipe
from moe_async.sync.merger import constant
from moe_async.sync.plans import plan_groups
from moe_async.sync.server import RunDescription
from moe_async.sync.syncer import SyncGroup

if TYPE_CHECKING:
    from torch import nn

    from moe_async.recipe import Recipe


def sync_groups(recipe: Recipe, model: nn.Module) -> list[SyncGroup]:
    """What is exchanged of a model, the same at the syncer and on every rank.

    Raises:
        SyncError: the recipe says nothing of several learners, or something that a launch cannot do.
    """
    if recipe.sync.between is None:
        raise SyncError(
            "sync.between is null, so this recipe is for one learner alone. Start it without --join, or add a policy "
            "for each class of parameters to sync.between."
        )
    keys = exchange_keys(model, recipe.moe.num_experts if recipe.moe else 0)
    groups = plan_groups(recipe.sync.between, keys, recipe.sync.learners, recipe.train.steps)
    if groups[0].plan.phases[0].contribution == "grad":
        raise SyncError(
            f"sync.between.dense.policy is {recipe.sync.between.dense.policy}, under which learners send gradients; so "
            "far launches exchange deltas only. Use local_sgd, diloco, streaming_diloco, delayed_nesterov or decoupled."
        )
    return groups


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
        schedule=constant,
        timeout=recipe.sync.timeout,
    )
