"""Where the experts' loads of a whole step come from before its first backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_async.comm import World
from moe_async.engine.deepspeed_bridge import random_states, set_random_states
from moe_async.ops.balance import load_fractions

if TYPE_CHECKING:
    from moe_async.engine.step import MicroBatch


@torch.no_grad()
def count_step(forward: Callable[..., Any], micro_batches: Sequence[MicroBatch], world: World) -> list[Tensor]:
    """The load fractions of each MoE layer over all micro-batches and ranks of a step: float64 [E] per layer.

    A balance loss takes no gradient through the loads, so a forward pass without gradients that only counts is enough
    for it to be exact. The random states are put back, so that the pass with gradients draws the same numbers and
    routes the same way. Every rank calls it with equally many micro-batches; blocks. Costs one forward pass,
    all-to-alls included.
    """
    states = random_states()
    totals: list[Tensor] = []
    for batch in micro_batches:
        counts = [sums.counts_E for sums in forward(batch.tokens, batch.token_mask).routing]
        totals = [a + b for a, b in zip(totals, counts, strict=True)] if totals else counts
    set_random_states(states)
    return [load_fractions(world.everyone.all_reduce(counts_E)) for counts_E in totals]
