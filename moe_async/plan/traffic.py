"""Bytes that one rank sends in a step, by purpose and by link."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from moe_async.plan.hardware import Accelerator
from moe_async.plan.layout import Layout
from moe_async.plan.memory import exchanged, policy_phases, step_scoped
from moe_async.plan.sizes import ModelSizes, journeys, real_choices, widths
from moe_async.recipe import Recipe

_ROUND = 4
"""Bytes of a number in rounds between learners."""


@dataclass(frozen=True)
class Transfer:
    """What one rank sends in a step for one purpose.

    Attributes:
        node: bytes to other ranks of its node.
        network: bytes to other nodes through its own port.
        exposed: whether the step waits for it.
        busiest_port: bytes through the busiest port of all in one direction, where that is another host's.
    """

    node: float
    network: float
    exposed: bool = True
    busiest_port: float = 0.0

    def seconds(self, accelerator: Accelerator, efficiency: float) -> float:
        """Time on the slower of its links, at a share of their stated rates."""
        port = max(self.network, self.busiest_port)
        return max(self.node / accelerator.link, port / accelerator.network) / efficiency


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
    return 1 + (recompute != "none") + counts_first(recipe, accumulation)


def counts_first(recipe: Recipe, accumulation: int) -> bool:
    """Whether a step runs its micro-batches forward once only to count loads."""
    moe = recipe.moe
    if moe is None or not step_scoped(moe):
        return False
    return moe.step_loads == "count" or (moe.step_loads == "auto" and accumulation > 1)


def _tokens(recipe: Recipe, sizes: ModelSizes, layout: Layout, accelerator: Accelerator) -> Transfer:
    moe, ranks = sizes.moe, layout.expert
    if moe is None or ranks == 1:
        return Transfer(0, 0)
    tokens = layout.micro_batch * recipe.data.seq_len
    width = widths(recipe)
    if moe.dispatcher == "all_gather":
        rows = tokens * (ranks - 1.0)
    else:
        going = journeys(moe, ranks) if moe.deduplicate else real_choices(moe)
        rows = tokens * going * (ranks - 1) / ranks
    # There and back in each forward pass, and the gradients the other way round.
    passes = 2 * forward_passes(recipe, layout.recompute, layout.accumulation) + 2
    sent = rows * sizes.model.dim * width.wire * passes * len(sizes.moe_layers) * layout.accumulation
    away = _away(ranks, accelerator.node)
    return Transfer(sent * (1 - away), sent * away)


def _away(ranks: int, node: int) -> float:
    """Share of the other members of an expert group that are in other nodes: of the mean member of the worst group.

    Groups are runs of consecutive ranks; one whose size does not divide the node may lie across two.
    """
    worst = 0.0
    for start in range(0, math.lcm(ranks, node), ranks):
        nodes = Counter((start + place) // node for place in range(ranks))
        together = sum(number * (number - 1) for number in nodes.values())
        worst = max(worst, 1 - together / (ranks * (ranks - 1)))
    return worst


def _dense(recipe: Recipe, sizes: ModelSizes, layout: Layout, accelerator: Accelerator) -> Transfer:
    size = sizes.replicated * widths(recipe).stored
    ring = _ring(size, layout.ranks, min(layout.ranks, accelerator.node))
    return _scaled(ring, _reductions(layout), exposed=recipe.sync.delay is None)


def _experts(recipe: Recipe, sizes: ModelSizes, layout: Layout, accelerator: Accelerator) -> Transfer:
    size = sizes.experts_here(layout.expert) * widths(recipe).stored
    together = max(min(layout.ranks, accelerator.node) // layout.expert, 1)
    return _scaled(_ring(size, layout.replicas, together), _reductions(layout), exposed=True)


def _reductions(layout: Layout) -> float:
    """Reductions of a step in units of an all-reduce.

    DeepSpeed reduces whole buckets at ZeRO 1 and 2, after each micro-batch at ZeRO 2, and gathers the new weights once,
    which is half of an all-reduce.
    """
    return {0: 1.0, 1: 1.5, 2: layout.accumulation + 0.5}[layout.zero]


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
    """Updates of a learner by step, which its ranks share; of a switch, the phase that sends most.

    Through the syncer all learners' updates pass one host's port, in each direction once.
    """
    between = recipe.sync.between
    if between is None or layout.learners == 1:
        return Transfer(0, 0)
    sent, waits = 0.0, False
    for name, policy in between.policies().items():
        phase = min(policy_phases(policy), key=lambda one: getattr(one, "every", None) or 1)
        sent += exchanged(sizes, name) * _ROUND / (getattr(phase, "every", None) or 1)
        waits = waits or not (getattr(phase, "ahead", 0) or getattr(phase, "overlap", 0))
    learners = layout.learners
    if recipe.sync.via == "all_reduce":
        return Transfer(0, 2 * (learners - 1) / learners * sent / layout.ranks, waits)
    return Transfer(0, sent / layout.ranks, waits, busiest_port=learners * sent)
