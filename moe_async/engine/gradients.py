"""Reducing, measuring and clipping gradients where DeepSpeed does not (ZeRO 0).

An expert receives the tokens of all ranks of its expert group through the all-to-all, so its local gradient is already
a sum over those ranks. With W ranks in all, the gradient of the mean over ranks is ``(1/W) * sum over its replicas``;
dividing by the replicas alone would make it too large by the expert-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_async.comm import World


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


def reduce_gradients(split: ParameterSplit, world: World) -> None:
    """Turn local gradients into those of the mean over all ranks, in place. Every rank calls it; blocks.

    A parameter without a gradient gets zeros: another rank may have one, and the sums must match.
    """
    for parameters, group in ((split.replicated, world.everyone), (split.sharded, world.expert_data)):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        group.all_reduce_many(gradients)
        for gradient in gradients:
            gradient.div_(world.size)


def global_norm(split: ParameterSplit, world: World) -> float:
    """Euclidean norm of the whole model's reduced gradient, the same on every rank.

    Each expert shard counts once and each replicated parameter once. Every rank calls it; blocks. Not a number or
    infinite when any gradient is.
    """
    square = _square_sum(split.sharded, world.device)
    world.expert.all_reduce(square)
    square += _square_sum(split.replicated, world.device)
    return float(square.sqrt().item())


def clip_gradients(split: ParameterSplit, norm: float, limit: float) -> None:
    """Scale every gradient by one coefficient so that the global norm is at most ``limit`` (0: no limit)."""
    if limit > 0 and norm > limit:
        for gradient in split.gradients():
            gradient.mul_(limit / (norm + 1e-6))


def _square_sum(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad.double().square().sum()
    return total
