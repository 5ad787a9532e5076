"""Differences between two recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_async.recipe.schema import Recipe

# The entries that say what saved weights and optimizer state mean; an empty list stands for the whole section.
_STATE_ENTRIES: Mapping[str, Sequence[str]] = {
    "model": (),
    "moe": (
        "layers",
        "num_experts",
        "zero_experts",
        "top_k",
        "router.kind",
        "router.bias",
        "router.score",
        "router.softmax",
        "router.weights",
        "router.scale",
        "router.groups",
        "router.apply",
        "router.freeze",
        "expert_dim",
        "expert",
        "expert_bias",
        "shared_dim",
        "shared_gate",
        "device_groups",
    ),
    "optim": ("kind", "momentum", "betas"),
}


def state_differences(saved: Recipe, given: Recipe) -> list[str]:
    """Gives every entry for which training with `given` cannot go on from the weights and moments of `saved`.

    Lengths, rates, batches, ranks and coefficients may differ. Each difference reads like `moe.top_k was 2 and is 1`.
    """
    differences = []
    for section, chosen in _STATE_ENTRIES.items():
        before, after = _entries(saved, section), _entries(given, section)
        names = chosen or sorted({*before, *after})
        differences += [
            f"{section}.{name} was {before.get(name)!r} and is {after.get(name)!r}"
            for name in names
            if before.get(name) != after.get(name)
        ]
    return differences


def _entries(recipe: Recipe, section: str) -> dict[str, Any]:
    """Gives a section's entries; an absent section has none."""
    content = getattr(recipe, section)
    entries: dict[str, Any] = {} if content is None else content.model_dump()
    # How weights began says nothing of what they are now.
    entries.pop("init", None)
    if "router" in entries:
        router = entries.pop("router")
        entries |= {f"router.{name}": value for name, value in router.items()}
    return entries
