"""Bytes that one rank sends in a step, by purpose and by link.

Symbols: P ranks of an expert group, K experts per token, E experts, n ranks of a ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_async.plan.hardware import Accelerator
from moe_async.plan.layout import Layout
from moe_async.plan.memory import exchanged, policy_phases
from moe_async.plan.sizes import ModelSizes, widths
from moe_async.recipe import Recipe

_GRADIENT = 4
"""Bytes of a number in reductions and rounds."""


@dataclass(frozen=True)
class Transfer:
    """What one rank sends in a step for one purpose.

    Attributes:
        node: bytes to other ranks of its node.
        network: bytes to other nodes through its own port.
        exposed: whether the step waits for it.
    """

    node: float
    network: float
    exposed: bool = True

    def seconds(self, accelerator: Accelerator, efficiency: float) -> float:
        """Time on the slower of its links, at a share of their stated rates."""
        return max(self.node / accelerator.link, self.network / accelerator.network) / efficiency


def transfers(recipe: Recipe, sizes: ModelSizes, layout: Layout, accelerator: Accelerator) -> dict[str, Transfer]:
    """What a mean rank sends in a step; purposes that need nothing are left out."""
    found = {
        "tokens to experts": _tokens(recipe, sizes, layout, accelerator),
        "dense gradients": _dense(recipe, sizes, layout, accelerator),
        "expert gradients": _experts(recipe, sizes, layout, accelerator),
        "rounds between learners": _rounds(recipe, sizes, layout),
    }
    return {name: one for name, one in found.items() if one.node or one.network}


def forward_passes(recipe: Recipe, recompute: str, accumulation: int) -> int:
    """Forward passes for each backward pass: one more where blocks are recomputed, one more that counts loads."""
    moe = recipe.moe
    counts = False
    if moe is not None and any(term.scope == "step" for term in moe.balance):
        counts = moe.step_loads == "count" or (moe.step_loads == "auto" and accumulation > 1)
    return 1 + (recompute != "none") + counts


def _tokens(recipe: Recipe, sizes: ModelSizes, layout: Layout, accelerator: Accelerator) -> Transfer:
    moe, ranks = sizes.moe, layout.expert
    if moe is None or ranks == 1:
        return Transfer(0, 0)
    tokens = layout.micro_batch * recipe.data.seq_len
    width = widths(recipe)
    if moe.dispatcher == "all_gather":
        rows = tokens * (ranks - 1.0)
    else:
        journeys = moe.top_k * moe.num_experts / moe.choices
        if moe.deduplicate:
            journeys = _distinct(moe.num_experts, ranks, moe.top_k)
        rows = tokens * journeys * (ranks - 1) / ranks
    # There and back in each forward pass, and the gradients the other way round.
    passes = 2 * forward_passes(recipe, layout.recompute, layout.accumulation) + 2
    sent = rows * sizes.model.dim * width.wire * passes * len(sizes.moe_layers) * layout.accumulation
    away = max(ranks - accelerator.node, 0) / (ranks - 1)
    return Transfer(sent * (1 - away), sent * away)


def _distinct(experts: int, ranks: int, top_k: int) -> float:
    """Ranks that hold one of a token's experts, on average over even choices."""
    local = experts // ranks
    missed = math.comb(experts - local, top_k) / math.comb(experts, top_k)
    return ranks * (1 - missed)


def _dense(recipe: Recipe, sizes: ModelSizes, layout: Layout, accelerator: Accelerator) -> Transfer:
    size = sizes.replicated * _GRADIENT
    ring = _ring(size, layout.ranks, min(layout.ranks, accelerator.node))
    return _scaled(ring, _reductions(layout), exposed=recipe.sync.delay is None)


def _experts(recipe: Recipe, sizes: ModelSizes, layout: Layout, accelerator: Accelerator) -> Transfer:
    size = sizes.experts_here(layout.expert) * _GRADIENT
    together = max(min(layout.ranks, accelerator.node) // layout.expert, 1)
    return _scaled(_ring(size, layout.replicas, together), _reductions(layout), exposed=True)


def _reductions(layout: Layout) -> float:
    """Reductions of a step in units of an all-reduce: ZeRO 2 reduces after each micro-batch and gathers once."""
    return (layout.accumulation + 1) / 2 if layout.zero == 2 else 1.0


def _ring(size: float, ranks: int, together: int) -> Transfer:
    """An all-reduce over ranks of which so many share a node and the node's ports."""
    if ranks == 1:
        return Transfer(0, 0)
    nodes = -(-ranks // together)
    inside = 2 * (ranks - 1) / ranks * size if together > 1 else 0.0
    return Transfer(inside, 2 * (nodes - 1) / nodes * size / together)


def _scaled(one: Transfer, factor: float, exposed: bool) -> Transfer:
    return Transfer(one.node * factor, one.network * factor, exposed)


def _rounds(recipe: Recipe, sizes: ModelSizes, layout: Layout) -> Transfer:
    """Updates there and merged weights back, of a learner and by step; its ranks share them."""
    between = recipe.sync.between
    if between is None or layout.learners == 1:
        return Transfer(0, 0)
    sent, waits = 0.0, False
    for name, policy in between.policies().items():
        for phase in policy_phases(policy)[:1]:
            sent += 2 * exchanged(sizes, name) * _GRADIENT / (getattr(phase, "every", None) or 1)
            overlaps = getattr(phase, "ahead", 0) or getattr(phase, "overlap", 0)
            waits = waits or not overlaps
    return Transfer(0, sent / layout.ranks, waits)
