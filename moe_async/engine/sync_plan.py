"""What learners exchange under a recipe, and what the syncer does with it: a launch and the simulator plan alike.

Where learners send gradients, the optimizer is the syncer's: what the ``optim`` section says becomes outer optimizers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moe_async.engine.optimizer import treatment
from moe_async.engine.schedule import learning_rate
from moe_async.errors import SyncError
from moe_async.model.keys import exchange_keys
from moe_async.ops.outer import Outer
from moe_async.sync.merger import Schedule, constant
from moe_async.sync.plans import plan_groups
from moe_async.sync.syncer import SyncGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from moe_async.moe.classes import ParameterClass
    from moe_async.recipe import OptimSection, Recipe
    from moe_async.sync.fragments import Key


def sync_groups(recipe: Recipe, model: nn.Module) -> list[SyncGroup]:
    """What is exchanged of a model and what moves it, the same at the syncer, on every rank and in the simulator.

    Args:
        recipe: the resolved recipe.
        model: its model, or any rank's part of it; its values do not matter.

    Raises:
        SyncError: the recipe says nothing of several learners.
    """
    between = recipe.sync.between
    if between is None:
        raise SyncError(
            "sync.between is null, so this recipe is for one learner alone. Start it without --join, or add a policy "
            "for each class of parameters to sync.between."
        )
    keys = exchange_keys(model, recipe.moe.num_experts if recipe.moe else 0)
    optimizer, rules = None, {}
    if between.sends_gradients:
        optimizer, rules = _optimizer(recipe.optim), _rules(recipe.optim, keys, model)
    return plan_groups(between, keys, recipe.sync.learners, recipe.train.steps, optimizer, rules)


def outer_schedule(recipe: Recipe) -> Schedule:
    """The factor on the outer learning rate by the run's progress: constant for deltas, for gradients the recipe's."""
    if recipe.sync.between is None or not recipe.sync.between.sends_gradients:
        return constant
    optim, steps = recipe.optim, recipe.train.steps
    # A merge is told of the steps that it contains, of which the first has the number 0 in the schedule.
    return lambda progress: learning_rate(optim, max(progress - 1, 0.0), steps) / optim.lr


def _optimizer(optim: OptimSection) -> Outer:
    if optim.kind == "sgd":
        return Outer("sgd", optim.lr, optim.momentum)
    return Outer("adamw", optim.lr, betas=optim.betas, eps=optim.eps)


def _rules(optim: OptimSection, keys: Mapping[ParameterClass, Sequence[Key]], model: nn.Module) -> dict[str, Outer]:
    """The optimizer of each key: its class's rate and decay, as one learner alone would have them."""
    plain, parameters = _optimizer(optim), dict(model.named_parameters())
    rules: dict[str, Outer] = {}
    for kind, members in keys.items():
        for key in members:
            parameter = parameters.get(key.name if key.expert_id < 0 else key.name.rpartition(".")[0])
            if parameter is None:
                # A selection bias contributes its own moves.
                rules[key.name] = Outer()
                continue
            lr_scale, decay = treatment(optim, kind, parameter)
            rules[key.name] = replace(plain, lr=optim.lr * lr_scale, weight_decay=decay)
    return rules
