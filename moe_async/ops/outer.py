"""Outer optimizers: how a merged contribution moves the shared value of a fragment.

A direction points where the loss falls when it is *subtracted*: a pseudo-gradient ``base - local`` of learners that
trained on their own, or a gradient. All updates work in place on flat tensors of one shape [X] and keep their state in
a mapping of tensors of that shape, and of counters [1], so that it can be saved like the value itself.

Sources: DiLoCo (Douillard et al. 2023, algorithm 1) for Nesterov momentum; Asynchronous Local-SGD (Liu et al. 2024,
algorithm 3) for delayed Nesterov; `torch.optim.SGD` and `torch.optim.AdamW` (Loshchilov and Hutter 2019), whose numbers
``sgd`` and ``adamw`` give, for gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outer:
    """An outer optimizer.

    Attributes:
        kind: ``none`` (subtract the direction), ``sgd``, ``adamw``, ``nesterov`` or ``delayed_nesterov``.
        lr: factor on the direction; ``none`` has none.
        momentum: of the velocity.
        delay: delayed_nesterov: directions that are gathered before the velocity changes.
        share: delayed_nesterov: how much of the velocity each direction in between applies, the paper's c: 0 applies it
            all at once, ``1/delay`` in equal parts.
        weight_decay: sgd: times the value it is added to the direction; adamw: times rate and value it is taken off
            the value, apart from the direction.
        betas: adamw: decay rates of the first and second moment.
        eps: adamw: added to the denominator.
    """

    kind: str = "none"
    lr: float = 1.0
    momentum: float = 0.0
    delay: int = 1
    share: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@torch.no_grad()
def outer_step(
    outer: Outer,
    value: Tensor,
    direction: Tensor,
    state: MutableMapping[str, Tensor],
    lr_factor: float,
    portion: float = 1.0,
) -> None:
    """Move ``value`` [X] by ``direction`` [X], in place.

    Args:
        outer: the rule.
        value: the shared value.
        direction: what was merged; left as it is.
        state: of this value; empty before its first step.
        lr_factor: on the learning rate, for a schedule.
        portion: how much of the mean over all contributors the direction is: 1/N where one of N makes a step of its
            own. The weight decay of sgd, a part of each contributor's gradient, is scaled by it as the rest of it was;
            that of adamw, whose steps have one length whatever the direction's, is not.
    """
    if outer.kind == "sgd" and outer.weight_decay:
        direction = direction.add(value, alpha=outer.weight_decay * portion)
    _RULES[outer.kind](outer, value, direction, state, outer.lr * lr_factor)


def _none(outer: Outer, value: Tensor, direction: Tensor, state: MutableMapping[str, Tensor], rate: float) -> None:
    value.sub_(direction)


def _sgd(outer: Outer, value: Tensor, direction: Tensor, state: MutableMapping[str, Tensor], rate: float) -> None:
    value.sub_(_velocity(outer, direction, state), alpha=rate)


def _adamw(outer: Outer, value: Tensor, direction: Tensor, state: MutableMapping[str, Tensor], rate: float) -> None:
    first = state.setdefault("first", torch.zeros_like(direction))
    second = state.setdefault("second", torch.zeros_like(direction))
    count = state.setdefault("count", torch.zeros(1, dtype=torch.int64))
    count += 1
    (beta, beta_of_squares), steps = outer.betas, int(count)
    value.mul_(1 - rate * outer.weight_decay)
    first.lerp_(direction, 1 - beta)
    second.mul_(beta_of_squares).addcmul_(direction, direction, value=1 - beta_of_squares)
    denominator = (second.sqrt() / math.sqrt(1 - beta_of_squares**steps)).add_(outer.eps)
    value.addcdiv_(first, denominator, value=-rate / (1 - beta**steps))


def _nesterov(outer: Outer, value: Tensor, direction: Tensor, state: MutableMapping[str, Tensor], rate: float) -> None:
    velocity = _velocity(outer, direction, state)
    value.sub_(direction + outer.momentum * velocity, alpha=rate)


def _velocity(outer: Outer, direction: Tensor, state: MutableMapping[str, Tensor]) -> Tensor:
    """The velocity after ``direction`` has been added to it."""
    velocity = state.setdefault("velocity", torch.zeros_like(direction))
    return velocity.mul_(outer.momentum).add_(direction)


def _delayed_nesterov(
    outer: Outer, value: Tensor, direction: Tensor, state: MutableMapping[str, Tensor], rate: float
) -> None:
    velocity = state.setdefault("velocity", torch.zeros_like(direction))
    gathered = state.setdefault("gathered", torch.zeros_like(direction))
    count = state.setdefault("count", torch.zeros(1, dtype=torch.int64))
    gathered.add_(direction)
    count += 1
    applied = outer.share
    if int(count) % outer.delay == 0:
        velocity.mul_(outer.momentum).add_(gathered, alpha=1 / outer.delay)
        gathered.zero_()
        applied = 1 - outer.share * outer.delay + outer.share
    value.sub_(applied * outer.momentum * velocity + direction / outer.delay, alpha=rate)


Rule = Callable[[Outer, Tensor, Tensor, MutableMapping[str, Tensor], float], None]
_RULES: Mapping[str, Rule] = {
    "none": _none,
    "sgd": _sgd,
    "adamw": _adamw,
    "nesterov": _nesterov,
    "delayed_nesterov": _delayed_nesterov,
}
