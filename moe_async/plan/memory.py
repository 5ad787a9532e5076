"""Memory of one rank by what takes it, at the worst moment of a step; and of the syncer's host.

The moments and what lives in them follow the engine: `tests/plan` holds them against real runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_async.plan.activations import Activations, Load, activations
from moe_async.plan.layout import Layout
from moe_async.plan.sizes import ModelSizes, dense_matrices, widths
from moe_async.recipe import MoeSection, Recipe
from moe_async.recipe.policies import SwitchPolicy

REDUCE_BUCKET = 500_000_000
"""Numbers in the bucket that DeepSpeed reduces gradients in at ZeRO 1 and 2, unless told otherwise."""
_MASTER = 4
"""Bytes of a number in the float32 copies of ZeRO 1 and 2."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the busiest rank.

    Attributes:
        backward: by consumer, when the most activations live.
        step: by consumer, while the optimizer works.
        reserve: beside tensors, of the runtime and of fragmentation.
        activations: those of a micro-batch.
    """

    backward: dict[str, int]
    step: dict[str, int]
    reserve: int
    activations: Activations

    @property
    def worst(self) -> dict[str, int]:
        """By consumer at the worst moment."""
        return max((self.backward, self.step), key=lambda moment: sum(moment.values()))

    @property
    def moment(self) -> str:
        """Which moment that is."""
        return "backward pass" if self.worst is self.backward else "optimizer step"

    @property
    def total(self) -> int:
        """All of it at the worst moment."""
        return sum(self.worst.values()) + self.reserve

    def largest(self, most: int = 3) -> list[tuple[str, int]]:
        """The largest consumers."""
        return sorted(self.worst.items(), key=lambda one: -one[1])[:most]


def rank_memory(recipe: Recipe, sizes: ModelSizes, layout: Layout, skew: float = 1.0, reserve: int = 0) -> RankMemory:
    """What a layout needs on its busiest rank.

    Args:
        recipe: the recipe.
        sizes: of its model.
        layout: how it lies.
        skew: load of the busiest rank over the mean, in each layer; a capacity bounds it.
        reserve: bytes beside tensors.
    """
    width = widths(recipe)
    load = Load(layout.micro_batch, recipe.data.seq_len, rows_of(recipe, layout, skew), layout.expert)
    acts = activations(sizes, width, load, layout.recompute)
    experts = sizes.experts_here(layout.expert)
    everything = sizes.replicated + experts
    part = sizes.replicated / layout.ranks + experts / layout.replicas if layout.zero else float(everything)
    stored = width.stored
    base = {"weights": everything * stored, "optimizer": round(_moments(recipe, sizes, experts, part) * stored)}
    if layout.zero:
        base["master weights"] = round(part * _MASTER)
    gradients = round((part if layout.zero == 2 else everything) * stored)
    backward = base | {
        "gradients": gradients,
        "activations": acts.kept - acts.cast_weights,
        "cast weights": acts.cast_weights,
        "dispatch buffers": acts.dispatch,
        "temporary buffers": max(acts.temporary - acts.dispatch, 0),
    }
    if layout.accumulation == 1:
        # Gradients appear as activations go.
        late = gradients + acts.one_block
        if late > acts.peak:
            backward |= {"activations": acts.one_block, "cast weights": 0, "temporary buffers": 0}
        else:
            backward["gradients"] = 0
    graphs = graphs_at_once(recipe, layout.accumulation)
    if graphs > 1:
        # All graphs without a gradient, or all but the one whose gradients are there.
        kept = graphs if acts.kept > gradients else graphs - 1
        backward["gradients"] = 0 if kept == graphs else gradients
        backward["activations"] *= kept
        backward["cast weights"] *= kept
    if recipe.sync.delay:
        # Dense gradients of earlier steps, on their way.
        base["delayed gradients"] = backward["delayed gradients"] = recipe.sync.delay * sizes.replicated * stored
    if layout.zero:
        backward["reduction bucket"] = _bucket(recipe) * stored
        if layout.zero == 1:
            backward["temporary buffers"] = max(backward["temporary buffers"], round(part * stored) - acts.kept)
    return RankMemory(backward, base | _step(sizes, layout, experts, part, stored), reserve, acts)


def _step(sizes: ModelSizes, layout: Layout, experts: int, part: float, stored: int) -> dict[str, int]:
    """Gradients, and the roots that the optimizer makes of all second moments of a group at once."""
    if not layout.zero:
        everything = sizes.replicated + experts
        return {"gradients": everything * stored, "temporary buffers": everything * stored}
    group = max(sizes.replicated / layout.ranks, experts / layout.replicas)
    return {"gradients": round(2 * part * stored), "temporary buffers": round(group * stored)}


def graphs_at_once(recipe: Recipe, accumulation: int) -> int:
    """Micro-batches whose activations are kept at once: all of a step where a loss over it keeps their graphs."""
    moe = recipe.moe
    if moe is None or moe.step_loads != "keep" or not step_scoped(moe):
        return 1
    return accumulation


def step_scoped(moe: MoeSection) -> bool:
    """Whether a balance loss needs the loads of a whole step first; the z loss is the same in every scope."""
    return any(term.scope == "step" and term.loss != "z" for term in moe.balance)


def rows_of(recipe: Recipe, layout: Layout, skew: float) -> float:
    """Rows of the busiest rank over those of an even load; a capacity bounds those of each expert."""
    if layout.expert == 1 or recipe.moe is None:
        return 1.0
    factor = recipe.moe.capacity.factor if recipe.moe.capacity is not None else None
    most = float(layout.expert)
    return min(skew, most if factor is None else min(factor, most))


def _moments(recipe: Recipe, sizes: ModelSizes, experts: int, part: float) -> float:
    """Numbers that the optimizer keeps."""
    optim = recipe.optim
    if recipe.sync.between is not None and recipe.sync.between.sends_gradients:
        return 0.0
    if optim.kind == "sgd":
        return part if optim.momentum else 0.0
    if optim.kind == "muon":
        # One momentum for hidden matrices, AdamW for all else.
        return 2 * part - experts - sum(number * rows * columns for number, rows, columns in dense_matrices(sizes))
    return 2 * part


def _bucket(recipe: Recipe) -> int:
    """Numbers in the buckets of reductions; a second one where DeepSpeed overlaps them with the backward pass."""
    options = recipe.deepspeed.get("zero_optimization")
    given = options if isinstance(options, dict) else {}
    size = given.get("reduce_bucket_size")
    bucket = int(size) if isinstance(size, int | float) else REDUCE_BUCKET
    return bucket * (2 if given.get("overlap_comm") is True else 1)


def syncer_memory(recipe: Recipe, sizes: ModelSizes) -> dict[str, int]:
    """Bytes of the syncer's host by consumer; nothing for one learner, or without a syncer."""
    between = recipe.sync.between
    if between is None or recipe.sync.learners == 1 or recipe.sync.via != "syncer":
        return {}
    total: dict[str, int] = {}
    for name, policy in between.policies().items():
        size = exchanged(sizes, name) * _MASTER
        phases = policy_phases(policy)
        fragments = min(getattr(phase, "fragments", None) or 1 for phase in phases)
        found = {
            "weights": size,
            "outer optimizer": size * max(_outer_states(recipe, phase) for phase in phases),
            "published versions": size,
            "updates under way": recipe.sync.learners * -(-size // fragments),
        }
        total = {key: total.get(key, 0) + value for key, value in found.items()}
    return total


def policy_phases(policy: object) -> list[object]:
    """A policy; the two of a switch."""
    return [policy.first, policy.then] if isinstance(policy, SwitchPolicy) else [policy]


def exchanged(sizes: ModelSizes, name: str) -> int:
    """Parameters of a class."""
    routers = len(sizes.moe_layers) * (sizes.router - sizes.model.dim)
    return {"expert": sizes.experts, "router": routers, "dense": sizes.replicated - routers}[name]


def _outer_states(recipe: Recipe, policy: object) -> int:
    """Numbers that the syncer's optimizer keeps for each parameter."""
    if recipe.sync.between is not None and recipe.sync.between.sends_gradients:
        return {"adamw": 2, "sgd": 1 if recipe.optim.momentum else 0}.get(recipe.optim.kind, 2)
    outer = getattr(policy, "outer", policy)
    return 1 if getattr(outer, "momentum", 0) else 0
