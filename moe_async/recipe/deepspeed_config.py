"""The DeepSpeed JSON that a recipe stands for, and the DeepSpeed options that a recipe may not pass.

The engine promises exact gradients, a float32 router and one meaning for each recipe entry. An option that would
break such a promise is refused with the reason and with what to use instead; all others pass through.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_async.recipe.schema import Recipe

_CASTS_ROUTER = "it casts every layer, the router too, which computes in float32. Use train.precision"
_OWNED_OPTIMIZER = "the optimizer and its schedule are built from the optim section. Use optim.{}"
_OWNED_BATCH = "it follows from the train section and the number of ranks. Use train.{}"
_GRADIENT_SCALE = "it changes how gradients are scaled or rounded when ranks add them, which must stay exact. Remove it"
_OTHER_BATCHES = "it changes batches or layers behind the recipe. Use the train and data sections"

# Options that people try first, and why each is refused: "reason. What to use instead".
_REFUSED: Mapping[str, str] = {
    "bf16": _CASTS_ROUTER,
    "bfloat16": _CASTS_ROUTER,
    "fp16": _CASTS_ROUTER,
    "amp": _CASTS_ROUTER,
    "torch_autocast": "it casts inside the router and sends linear gradients in bfloat16. Use train.precision",
    "data_types": "gradients accumulate in float32. Use train.precision",
    "optimizer": _OWNED_OPTIMIZER.format("kind and optim.lr"),
    "scheduler": _OWNED_OPTIMIZER.format("schedule"),
    "train_batch_size": _OWNED_BATCH.format("global_batch"),
    "train_micro_batch_size_per_gpu": _OWNED_BATCH.format("global_batch and train.accumulation"),
    "gradient_accumulation_steps": _OWNED_BATCH.format("accumulation"),
    "gradient_clipping": "one coefficient clips experts and dense layers alike. Use optim.clip",
    "communication_data_type": _GRADIENT_SCALE,
    "prescale_gradients": _GRADIENT_SCALE,
    "gradient_predivide_factor": _GRADIENT_SCALE,
    "gradient_allreduce_op": _GRADIENT_SCALE,
    "sparse_gradients": _GRADIENT_SCALE,
    "checkpoint": "checkpoints are written one key per expert, not by DeepSpeed. Use train.checkpoint_every",
    "expert_parallel": "experts are placed by this package. Use parallel.expert",
    "use_data_before_expert_parallelism": "expert groups are consecutive ranks. Use parallel.expert",
    "elasticity": _OTHER_BATCHES,
    "data_efficiency": _OTHER_BATCHES,
    "curriculum_learning": _OTHER_BATCHES,
    "progressive_layer_drop": _OTHER_BATCHES,
    "compression_training": _OTHER_BATCHES,
    "tensor_parallel": "tensor parallelism is not supported. Remove it",
    "zero_allow_untested_optimizer": "it follows from the optimizer. Use optim.kind",
}

# Options that leave weights and gradients alone. An option that is not known is refused: DeepSpeed ignores a misspelt
# one, and some change gradients without a word (`managed_gradient_accumulation` steps at every micro-batch).
_ALLOWED = (
    "comms_logger",
    "csv_monitor",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "steps_per_print",
    "tensorboard",
    "wall_clock_breakdown",
    "wandb",
    "zero_optimization",
)
# With `contiguous_gradients: false` DeepSpeed 0.19.8 adds gradients of *different* experts at ZeRO 1. These options
# give the same weights as none.
_ALLOWED_ZERO = (
    "allgather_bucket_size",
    "allgather_partitions",
    "elastic_checkpoint",
    "ignore_unused_parameters",
    "overlap_comm",
    "reduce_bucket_size",
    "round_robin_gradients",
    "use_multi_rank_bucket_allreduce",
)
_ZERO_STAGE = "the recipe chooses the stage; stage 3 is not supported. Use parallel.zero: 0, 1 or 2"
_OTHER = f"nothing shows that it keeps gradients exact. Allowed: {', '.join(_ALLOWED)}"
_OTHER_ZERO = f"nothing shows that it keeps gradients of experts exact. Allowed inside: {', '.join(_ALLOWED_ZERO)}"


def refused_options(options: Mapping[str, Any]) -> list[str]:
    """Gives one sentence for each option of a recipe's `deepspeed` section that is refused, in the given order."""
    refusals = []
    for name, value in options.items():
        if name not in _ALLOWED:
            refusals.append(_refusal(name, _REFUSED.get(name, _OTHER)))
        elif name == "zero_optimization" and not isinstance(value, Mapping):
            refusals.append(_refusal(name, "it must be a mapping of ZeRO options. Use parallel.zero for the stage"))
        elif name == "zero_optimization":
            refusals += [
                _refusal(f"{name}.{option}", _ZERO_STAGE if option == "stage" else _OTHER_ZERO)
                for option in value
                if option not in _ALLOWED_ZERO
            ]
    return refusals


def deepspeed_config(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """Gives the DeepSpeed JSON for a launch of `recipe` on `world_size` ranks.

    At ZeRO 0 DeepSpeed's clipping is switched off, because its norm is wrong with experts and the engine clips
    instead; leaving the key out would mean clipping at 1.0.

    Raises:
        RecipeError: if the recipe cannot be launched on that many ranks.
    """
    recipe.check_world(world_size)
    derived: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.micro_batch_size(world_size),
        "gradient_accumulation_steps": recipe.train.accumulation,
        "gradient_clipping": recipe.optim.clip if recipe.parallel.zero else 0.0,
        "zero_optimization": {"stage": recipe.parallel.zero},
    }
    if recipe.optim.kind == "sgd":
        derived["zero_allow_untested_optimizer"] = True
    return _merged(derived, recipe.deepspeed)


def _refusal(name: str, reason: str) -> str:
    return f"deepspeed.{name} is not allowed: {reason}."


def _merged(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Gives a deep copy of `base` in which `extra` wins wherever both hold a value."""
    merged = dict(base)
    for key, value in extra.items():
        inner = merged.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(inner, value)
        else:
            merged[key] = value
    return copy.deepcopy(merged)
