"""The shortest recipe that loads, for tests to change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_async.errors import RecipeError
from moe_async.recipe import Recipe, load_recipe

MINIMAL = """\
model: {dim: 64, layers: 4, heads: 4, ffn_dim: 128}
moe: {num_experts: 8, top_k: 2, expert_dim: 64}
optim: {lr: 3e-4}
data: {source: builtin}
train: {steps: 100, global_batch: 16}
"""


def write_recipe(folder: Path, text: str = MINIMAL, name: str = "tiny.yaml") -> Path:
    """Writes a recipe file and gives its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load_minimal(folder: Path, *overrides: str) -> Recipe:
    """Loads the shortest recipe with overrides."""
    return load_recipe(write_recipe(folder), overrides)


def error_of(path: Path, overrides: Sequence[str] = ()) -> str:
    """Gives the message with which loading a recipe fails."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)
