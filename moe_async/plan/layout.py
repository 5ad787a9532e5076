"""How a recipe lies on accelerators: ranks, expert groups, learners, micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moe_async.errors import RecipeError
from moe_async.plan.sizes import ModelSizes
from moe_async.recipe import Recipe


@dataclass(frozen=True)
class Layout:
    """A recipe on a number of accelerators, one rank on each.

    Attributes:
        gpus: accelerators in all.
        learners: launches that train the model together.
        expert: ranks of an expert group.
        zero: stage.
        accumulation: micro-batches of a step on each rank.
        recompute: as in ``train.recompute``.
        micro_batch: sequences of a micro-batch.
    """

    gpus: int
    learners: int
    expert: int
    zero: int
    accumulation: int
    recompute: str
    micro_batch: int

    @property
    def ranks(self) -> int:
        """Of a learner."""
        return self.gpus // self.learners

    @property
    def replicas(self) -> int:
        """Ranks of a learner that hold the same expert."""
        return self.ranks // self.expert

    def entries(self) -> dict[str, object]:
        """The recipe entries that say so."""
        return {
            "sync.learners": self.learners,
            "parallel.expert": self.expert,
            "parallel.zero": self.zero,
            "train.accumulation": self.accumulation,
            "train.recompute": self.recompute,
        }

    def __str__(self) -> str:
        """In a line."""
        learners = f"{self.learners} learners of " if self.learners > 1 else ""
        return (
            f"{learners}{self.ranks} ranks, expert groups of {self.expert}, ZeRO {self.zero}, {self.accumulation} "
            f"micro-batches of {self.micro_batch}, recompute {self.recompute}"
        )


def layout_of(recipe: Recipe, gpus: int) -> Layout:
    """A recipe as it is, on so many accelerators.

    Raises:
        RecipeError: it does not fit so many.
    """
    learners = recipe.sync.learners
    if gpus < 1:
        raise RecipeError(f"there are {gpus} accelerators; give 1 or more.")
    if gpus % learners:
        raise RecipeError(
            f"{gpus} accelerators cannot be shared out among {learners} learners (sync.learners) evenly; give a "
            f"multiple of {learners}."
        )
    ranks = gpus // learners
    recipe.check_world(ranks)
    return Layout(
        gpus,
        learners,
        recipe.parallel.expert,
        recipe.parallel.zero,
        recipe.train.accumulation,
        recipe.train.recompute,
        recipe.micro_batch_size(ranks),
    )


def candidates(recipe: Recipe, sizes: ModelSizes, gpus: int) -> list[Layout]:
    """Layouts of a recipe on so many accelerators that keep its global batch and its learners.

    Expert groups of every size that divides ranks and experts, every ZeRO stage that the recipe allows, with and
    without recomputation, and every number of micro-batches. Where routing depends on the micro-batch (a capacity,
    experts that choose tokens), micro-batches stay as the recipe has them.
    """
    learners = recipe.sync.learners
    if gpus % learners or recipe.train.global_batch % (gpus // learners):
        return []
    ranks = gpus // learners
    share = recipe.train.global_batch // ranks
    experts = sizes.moe.num_experts if sizes.moe is not None else 1
    local = sizes.moe is not None and sizes.moe.dispatcher == "local"
    return [
        Layout(gpus, learners, expert, zero, accumulation, recompute, share // accumulation)
        for expert in _divisors(experts)
        if ranks % expert == 0 and (expert == 1 or not local)
        for zero in _stages(recipe)
        for recompute in ("none", "block")
        for accumulation in ([recipe.train.accumulation] if _routes_by_micro_batch(recipe) else _divisors(share))
        if share % accumulation == 0
    ]


def with_micro_batch(layout: Layout, sequences: int) -> Layout:
    """The same with other micro-batches; the global batch follows."""
    return replace(layout, micro_batch=sequences)


def _routes_by_micro_batch(recipe: Recipe) -> bool:
    return recipe.moe is not None and (recipe.moe.capacity is not None or recipe.moe.router.kind == "expert_choice")


def _stages(recipe: Recipe) -> tuple[int, ...]:
    """ZeRO stages that keep what the recipe says."""
    only_zero = (
        recipe.train.precision == "float64"
        or recipe.optim.kind == "muon"
        or recipe.sync.delay is not None
        or (recipe.sync.between is not None and recipe.sync.between.sends_gradients)
    )
    return (0,) if only_zero else (0, 1, 2)


def _divisors(number: int) -> list[int]:
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})
