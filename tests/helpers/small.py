"""A recipe small enough for a loop over tokens."""

from __future__ import annotations

import copy
from typing import Any

from moe_async.recipe import Recipe

SMALL: dict[str, Any] = {
    "name": "small",
    "model": {"dim": 8, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 12, "vocab_size": 32},
    "moe": {
        "layers": [1], "num_experts": 4, "top_k": 2, "expert_dim": 6,
        "balance": [{"loss": "switch", "coefficient": 0.5}, {"loss": "z", "coefficient": 0.1}],
    },
    "parallel": {"expert": 1, "zero": 0},
    "optim": {"kind": "sgd", "lr": 0.5, "weight_decay": 0.0, "clip": 0.0, "schedule": {"kind": "constant"}},
    "data": {"source": "builtin", "seq_len": 8},
    "train": {"steps": 10, "global_batch": 8, "precision": "float64"},
}  # fmt: skip


def small_recipe(**changes: Any) -> Recipe:
    """`SMALL` with entries replaced, addressed as ``section__entry=value``."""
    document = copy.deepcopy(SMALL)
    for key, value in changes.items():
        section, _, entry = key.partition("__")
        if entry:
            document[section][entry] = value
        else:
            document[section] = value
    return Recipe.model_validate(document)
