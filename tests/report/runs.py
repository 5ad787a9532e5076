"""Made-up runs: folders as training leaves them, without training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from moe_async.observe.recorder import LoadRecorder
from moe_async.observe.store import LoadStore
from moe_async.recipe import dump_recipe, load_recipe
from tests.observe.loads import figures_of, meta_of, paths_of

ROOT = Path(__file__).parents[2]


def make_learner(folder, layers=3, experts=8, steps=30, ranks=2, domains=("code", "prose", "(none)"), seed=0, zeros=0):
    """A folder of one learner: its record, its recipe and its metrics."""
    rng = np.random.default_rng(seed)
    meta = dataclasses.replace(meta_of(layers, experts, ranks, domains), zero_experts=zeros)
    sizes = meta.sizes
    recorder = LoadRecorder(LoadStore(folder / "expert_load", meta))
    for step in range(1, steps + 1):
        counts = rng.integers(50, 400, (layers, experts + zeros))
        counts[0, 1] = 0
        share = rng.random((layers, sizes.domains, experts + zeros))
        others = {
            "domain_counts": np.round(counts[:, None] * share / share.sum(axis=1, keepdims=True)),
            "domain_tokens": np.full(sizes.domains, 100.0),
            "dropped": np.minimum(counts, rng.integers(0, 9, counts.shape)),
            "top": np.full(layers, 0.4 * counts.sum(axis=1).mean() / 2),
        }
        if ranks:
            others["rank_load"] = counts[:, :experts].reshape(layers, ranks, -1).sum(axis=2)
        recorder.add(step, figures_of(meta, counts, **others), None, paths_of(meta, [step] * 16, seed + step))
    recorder.flush()
    recipe = load_recipe(ROOT / "recipes" / "quickstart-sync.yaml", [f"model.layers={layers}"])
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    lines = [{"step": 0, "heldout_bits_per_byte": 8.0}]
    for step in range(1, steps + 1):
        lines.append({"step": step, "lm_loss": 5.0 / step, "switch_loss": 1.0 + 1 / step, "z_loss": 3.0})
        lines[-1] |= {"tokens_per_second": 2000.0 + step, "grad_norm": 1.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_run(folder, learners=2):
    """A run of several learners, with the syncer's log."""
    for learner in range(learners):
        (folder / f"learner-{learner}").mkdir(parents=True)
        make_learner(folder / f"learner-{learner}", seed=learner)
    events = [{"event": "welcome", "time": 0.0, "learner": 0, "incarnation": 0, "clock": 0}]
    for number in range(12):
        update = {"learner": number % learners, "incarnation": 0, "sequence": number, "fragment": 0}
        staleness = [[number % 3, number % 2, 5]]
        events.append({"event": "merge", "time": 1.0, "version": number, "updates": [update], "staleness": staleness})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
