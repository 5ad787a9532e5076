"""Losses and times of a run by step, and what uneven ranks cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from moe_async.observe.figures import LoadSummary
from moe_async.plan.sizes import model_sizes
from moe_async.plan.speed import operations
from moe_async.recipe import Recipe
from moe_async.sync.event_log import read_entries

MOST_POINTS = 400
"""Points of a curve, at most."""
_ALSO = ("lm_loss", "grad_norm", "tokens_per_second", "data_wait", "comm_wait")
_LOSS = "_loss"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of steps in a run's metrics; none where there is no such file."""
    if not path.is_file():
        return []
    return [line for line in read_entries(path) if "lm_loss" in line]


def balance_losses(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Curves by step: the balance losses, which are not multiplied with their coefficients, and some others."""
    chosen = _thinned(metrics)
    names = dict.fromkeys(name for line in metrics for name in line if name.endswith(_LOSS) and name != "lm_loss")
    return {
        "steps": [line["step"] for line in chosen],
        "balance": {name.removesuffix(_LOSS): [line.get(name) for line in chosen] for name in names},
        "others": {name: [line.get(name) for line in chosen] for name in _ALSO if any(name in line for line in chosen)},
    }


def rank_cost(recipe: Recipe | None, figures: LoadSummary, metrics: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What a step waits for the busiest ranks, estimated: the experts' share of a step's operations is taken as their
    share of its time, and of that the part beyond an even load is lost.

    None where ranks, recipe or times are not known.
    """
    imbalances = [layer.step_imbalance for layer in figures.layers]
    known = [value for value in imbalances if value is not None]
    rates = [line["tokens_per_second"] for line in metrics if line.get("tokens_per_second")]
    if recipe is None or not known or not rates:
        return None
    cost = operations(recipe, model_sizes(recipe))
    share = cost.experts / cost.total
    lost = share * sum(1.0 - 1.0 / value for value in known) / len(known)
    seconds = recipe.train.global_batch * recipe.data.seq_len / median(rates)
    return {
        "step_imbalance": sum(known) / len(known),
        "experts_share": share,
        "lost_share": lost,
        "step_seconds": seconds,
        "lost_seconds": lost * seconds,
    }


def _thinned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As many as a curve has, the last one among them."""
    size = max(-(-len(lines) // MOST_POINTS), 1)
    return list(reversed(lines[::-1][::size]))
