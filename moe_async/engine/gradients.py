"""Reducing, measuring and clipping gradients where DeepSpeed does not (ZeRO 0).

An expert receives the tokens of all ranks of its expert group through the all-to-all, so its local gradient is already
a sum over those ranks. With W ranks in all, the gradient of the mean over ranks is ``(1/W) * sum over its replicas``;
dividing by the replicas alone would make it too large by the expert-parallel size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_async.comm import Group, World
from moe_async.engine.delay import DelayedGradients


@dataclass(frozen=True)
class ParameterSplit:
    """A model's trainable parameters by how their gradients are reduced.

    Attributes:
        replicated: on every rank (dense layers and routers).
        sharded: on the ranks of one expert-data group (experts).
    """

    replicated: Sequence[nn.Parameter]
    sharded: Sequence[nn.Parameter]

    def gradients(self) -> list[Tensor]:
        """All gradients, replicated ones first."""
        return [p.grad for p in (*self.replicated, *self.sharded) if p.grad is not None]

    def parts(self) -> dict[str, Sequence[nn.Parameter]]:
        """The parameters by name of their part: ``dense`` and ``expert``."""
        return {"dense": self.replicated, "expert": self.sharded}


@dataclass(frozen=True)
class StepOutcome:
    """What came of one optimizer step.

    Attributes:
        grad_norm: global norm, before clipping, of all that was applied; not finite when nothing was, because of that.
        applied: False when nothing was applied, because no gradient of the step was finite.
        left_out: the parts whose gradients were not finite and so were not applied, of ``dense`` and ``expert``. Both
            or none, except with a delay, where the two come from different steps.
    """

    grad_norm: float
    applied: bool
    left_out: tuple[str, ...] = ()


def prepare_step(split: ParameterSplit, world: World, clip: float, delayed: DelayedGradients | None) -> StepOutcome:
    """Turn local gradients into what the optimizer is to apply: means over ranks, finite and clipped.

    Every rank calls it; blocks.

    Args:
        split: the parameters.
        world: this rank's view of the launch.
        clip: largest global norm; 0: no limit.
        delayed: the queue through which dense gradients go; None: they are reduced at once.
    """
    if delayed is None:
        reduce_gradients(split, world)
    else:
        # First what takes longest: the experts' reduction runs beside it.
        delayed.start()
        _reduce_mean(split.sharded, world.expert_data, world.size)
        delayed.take(delayed.delay)
    return keep_finite(split, world, clip, together=delayed is None or delayed.delay == 0)


def keep_finite(split: ParameterSplit, world: World, clip: float, together: bool) -> StepOutcome:
    """Drop reduced gradients that are not finite, and clip the others. Every rank calls it; blocks.

    Args:
        split: the parameters; a part without gradients takes no part in the step.
        world: this rank's view of the launch.
        clip: largest global norm of what is left; 0: no limit.
        together: dense and expert gradients come from one step, and are dropped both or not at all.
    """
    squares = _square_norms(split, world)
    left_out = tuple(name for name, square in squares.items() if not math.isfinite(square))
    if left_out and together:
        left_out = tuple(squares)
    present = [name for name, part in split.parts().items() if any(p.grad is not None for p in part)]
    for name in left_out:
        # Without a gradient the optimizer leaves weights and moments alone.
        for parameter in split.parts()[name]:
            parameter.grad = None
    applied = not left_out or any(name not in left_out for name in present)
    norm = math.sqrt(sum(square for name, square in squares.items() if not applied or name not in left_out))
    clip_gradients(split, norm, clip)
    return StepOutcome(norm, applied, left_out)


def reduce_gradients(split: ParameterSplit, world: World) -> None:
    """Turn local gradients into those of the mean over all ranks, in place. Every rank calls it; blocks.

    A parameter without a gradient gets zeros: another rank may have one, and the sums must match.
    """
    _reduce_mean(split.replicated, world.everyone, world.size)
    _reduce_mean(split.sharded, world.expert_data, world.size)


def _reduce_mean(parameters: Sequence[nn.Parameter], group: Group, ranks: int) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    group.all_reduce_many(gradients)
    for gradient in gradients:
        gradient.div_(ranks)


def clip_gradients(split: ParameterSplit, norm: float, limit: float) -> None:
    """Scale every gradient by one coefficient so that the global norm is at most ``limit`` (0: no limit)."""
    if limit > 0 and norm > limit:
        for gradient in split.gradients():
            gradient.mul_(limit / (norm + 1e-6))


def _square_norms(split: ParameterSplit, world: World) -> dict[str, float]:
    """The square of each part's Euclidean norm, the same on every rank; not finite where a gradient is not.

    Each expert shard counts once and each replicated parameter once. Every rank calls it; blocks.
    """
    sharded = _square_sum(split.sharded, world.device)
    world.expert.all_reduce(sharded)
    dense, expert = torch.stack([_square_sum(split.replicated, world.device), sharded]).tolist()
    return {"dense": dense, "expert": expert}


def _square_sum(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad.double().square().sum()
    return total
