"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_async.recipe import OptimSection


def learning_rate(optim: OptimSection, step: float, steps: int) -> float:
    """The rate of optimizer step ``step`` (0-based; a mean over learners need not be whole) in a run of ``steps``.

    A linear warm-up reaches ``lr`` at step ``warmup``. Then ``constant`` stays; ``cosine`` falls along half a cosine to
    ``final * lr`` at the last step (Loshchilov and Hutter 2017, arXiv 1608.03983); ``wsd`` stays and falls linearly to
    ``final * lr`` over the last ``decay`` share of the steps (Hu et al. 2024, arXiv 2404.06395).
    """
    schedule = optim.schedule
    if step < schedule.warmup:
        return optim.lr * (step + 1) / (schedule.warmup + 1)
    if schedule.kind == "constant":
        return optim.lr
    if schedule.kind == "cosine":
        done = _share(step - schedule.warmup, steps - 1 - schedule.warmup)
        return optim.lr * (schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * done)))
    length = max(1, round(schedule.decay * steps))
    done = _share(step - (steps - 1 - length), length)
    return optim.lr * (1 - (1 - schedule.final) * done)


def _share(part: float, whole: int) -> float:
    return min(max(part / max(whole, 1), 0.0), 1.0)
