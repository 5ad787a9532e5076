"""The blocks of a model, and the ways that sampled tokens took through its experts.

Shape letters: N sampled tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_async.observe.store import LoadMeta, LoadRecord
from moe_async.plan.sizes import model_sizes
from moe_async.recipe import Recipe

MOST_WAYS = 80
"""Ways between two layers that are shown, at most."""


def structure(recipe: Recipe | None, meta: LoadMeta) -> dict[str, Any]:
    """Blocks in their order, each with what it is; MoE blocks name their layer of the record.

    Without a recipe, as for a record of one's own loop, the MoE layers alone are known.
    """
    if recipe is None:
        known = [{"title": name, "lines": [], "layer": place} for place, name in enumerate(meta.layers)]
        return {"title": "", "blocks": known}
    model, moe, sizes = recipe.model, recipe.moe, model_sizes(recipe)
    heads = f"{model.heads} heads" + (f" over {model.kv_heads} for keys" if model.kv_heads != model.heads else "")
    blocks: list[dict[str, Any]] = [
        {"title": "embedding", "lines": [f"{sizes.vocabulary} x {model.dim}"], "layer": None}
    ]
    for index in range(model.layers):
        if moe is not None and index in sizes.moe_layers:
            lines = [heads, f"{moe.num_experts} experts of {moe.expert_dim} ({moe.expert}), {moe.top_k} a token"]
            lines.append(
                f"router: {moe.router.kind}" + (f", shared expert of {moe.shared_dim}" if moe.shared_dim else "")
            )
            place = sizes.moe_layers.index(index)
        else:
            lines, place = [heads, f"dense network of {model.ffn_dim} ({model.ffn})"], None
        blocks.append({"title": f"block {index}", "lines": lines, "layer": place})
    tied = "the embedding again" if model.tie_embeddings else f"{model.dim} x {sizes.vocabulary}"
    blocks.append({"title": "output", "lines": [tied], "layer": None})
    return {"title": f"{sizes.total:,} parameters, {sizes.active:,} active for a token", "blocks": blocks}


def flows(record: LoadRecord) -> list[list[list[float]]]:
    """Between each MoE layer and the next: from which expert to which how large a share of the sampled tokens' ways
    went, the largest first. A token that takes K experts in both has K * K ways, which share it."""
    paths_NLK = record.paths.experts
    found = []
    for layer in range(paths_NLK.shape[1] - 1):
        before_NK, after_NK = paths_NLK[:, layer], paths_NLK[:, layer + 1]
        first, second = np.broadcast_arrays(before_NK[:, :, None], after_NK[:, None, :])
        taken = (first >= 0) & (second >= 0)
        weight_N = 1.0 / np.maximum(taken.sum(axis=(1, 2)), 1)
        ways = np.zeros((int(before_NK.max(initial=0)) + 1, int(after_NK.max(initial=0)) + 1))
        np.add.at(ways, (first[taken], second[taken]), np.broadcast_to(weight_N[:, None, None], taken.shape)[taken])
        ways /= max(len(paths_NLK), 1)
        chosen = np.argsort(-ways, axis=None, kind="stable")[:MOST_WAYS]
        rows, columns = np.unravel_index(chosen, ways.shape)
        found.append(
            [
                [int(one), int(other), round(float(ways[one, other]), 5)]
                for one, other in zip(rows, columns, strict=True)
                if ways[one, other] > 0
            ]
        )
    return found
