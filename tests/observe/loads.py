"""Made-up loads: figures of steps as `StepTally.over_ranks` gives them."""

from __future__ import annotations

import numpy as np

from moe_async.observe.paths import Paths
from moe_async.observe.store import LoadMeta
from moe_async.observe.windows import FIELDS, Windows, dtype_of


def meta_of(layers=2, experts=4, ranks=2, domains=("code", "(none)")):
    """Axes of a small record."""
    share = experts // ranks if ranks else 0
    return LoadMeta(
        layers=tuple(f"layer {layer}" for layer in range(layers)),
        experts=(experts,) * layers,
        top_k=(2,) * layers,
        domains=tuple(domains),
        rank_experts=tuple(tuple(range(rank * share, (rank + 1) * share)) for rank in range(ranks)),
    )


def windows_of(meta, number, seed=0, first=1):
    """Windows of one step each, from step ``first`` on, with seeded values."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, field in FIELDS.items():
        shape = (number, *meta.sizes.shape(field))
        value = rng.random(shape) * 9 if field.real else rng.integers(0, 9, shape)
        values[name] = value.astype(np.float32).astype(dtype_of(field))
    steps = np.arange(first, first + number)
    return Windows(values | {"first_step": steps, "last_step": steps, "steps": np.ones(number)})


def paths_of(meta, steps, seed=0):
    """One sampled token for each of the steps."""
    rng = np.random.default_rng(seed)
    number = len(steps)
    experts = rng.integers(0, max(meta.experts) + meta.zero_experts, (number, len(meta.layers), max(meta.top_k)))
    return Paths(steps, rng.integers(0, 256, number), np.zeros(number), experts)


def figures_of(meta, counts, **others):
    """Figures of a step with those counts [L, E]; whatever is not given is 0."""
    sizes = meta.sizes
    figures = {name: np.zeros(sizes.shape(field)) for name, field in FIELDS.items()}
    figures["counts"] = np.asarray(counts, dtype=np.float64)
    figures["tokens"] = figures["counts"].sum(axis=1) / 2
    figures["micro_batches"] = np.ones(1)
    return figures | {name: np.asarray(value, dtype=np.float64) for name, value in others.items()}


def equal(one, other):
    """Whether all figures are the same."""
    return all(np.array_equal(one[name], other[name]) for name in FIELDS)
