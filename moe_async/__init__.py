"""Trains sparse Mixture-of-Experts language models on PyTorch and DeepSpeed.

Experts are sharded across ranks with exact gradients at every expert-parallel size; routing is float32, experts
bfloat16. Importing the package is quick: each public name brings its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_async.engine.micro_batch import MicroBatch
    from moe_async.engine.start import initialize, join_world
    from moe_async.model.build import build_model
    from moe_async.moe.layer import MoELayer, MoEOutput
    from moe_async.observe.watch import record_load
    from moe_async.recipe import Recipe, load_recipe
    from moe_async.topology import Topology

__version__ = "0.1.0"

_HOMES = {
    "MicroBatch": "moe_async.engine.micro_batch",
    "MoELayer": "moe_async.moe.layer",
    "MoEOutput": "moe_async.moe.layer",
    "Recipe": "moe_async.recipe",
    "Topology": "moe_async.topology",
    "build_model": "moe_async.model.build",
    "initialize": "moe_async.engine.start",
    "join_world": "moe_async.engine.start",
    "load_recipe": "moe_async.recipe",
    "record_load": "moe_async.observe.watch",
}

__all__ = [
    "MicroBatch",
    "MoELayer",
    "MoEOutput",
    "Recipe",
    "Topology",
    "__version__",
    "build_model",
    "initialize",
    "join_world",
    "load_recipe",
    "record_load",
]


def __getattr__(name: str) -> Any:
    """A public name, imported on first use."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, for completion."""
    return sorted(__all__)
