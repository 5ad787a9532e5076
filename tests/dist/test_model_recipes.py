"""The recipes of published models: their sizes, and that what they describe trains in small."""

from pathlib import Path

import pytest
import torch

from moe_async.comm import World, make_world
from moe_async.data import TrainStream, load_corpus, make_tokenizer
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.model import build_model
from moe_async.model.build import count_parameters, make_transformer
from moe_async.recipe import load_recipe
from moe_async.topology import Topology
from tests.helpers.spawn import run_ranks

MODELS = Path(__file__).parents[2] / "recipes" / "models"

# Parameters in all and active for a token, in billions. Totals are those of the published checkpoints' tensors; active
# ones are published with two or three digits (Switch-Base: its paper's Table 7, which has no active ones).
PUBLISHED = {
    "switch-base": (7.4, None),
    "mixtral-8x7b": (46.702792704, 12.9),
    "olmoe-1b-7b": (6.919161856, 1.3),
    "qwen3-30b-a3b": (30.532122624, 3.3),
}


# Of its size and routing, without its latent attention and its second head, so that it has no small twin to train.
ALIKE = {"deepseek-v3-like": (671.026419200, 37.0)}


@pytest.mark.parametrize("name", PUBLISHED | ALIKE)
def test_sizes_are_the_published_ones(name, capsys):
    recipe = load_recipe(MODELS / f"{name}.yaml")
    with torch.device("meta"):
        model = make_transformer(recipe, World(Topology(num_experts=recipe.moe.num_experts)))
    size = count_parameters(recipe)
    assert sum(p.numel() for p in model.parameters()) == size.total
    total, active = (PUBLISHED | ALIKE)[name]
    with capsys.disabled():
        print(f"\n{name}: {size.total:,} parameters, {size.active:,} active for a token")
    assert size.total / 1e9 == pytest.approx(total, rel=0.01)
    if active is not None:
        # A figure of two digits is known to 2 %.
        digits = len(str(active).replace(".", "").rstrip("0"))
        assert size.active / 1e9 == pytest.approx(active, rel=0.01 if digits > 2 else 0.02)


def twenty_steps(rank, names):
    curves = {}
    for name in names:
        recipe = load_recipe(MODELS / f"{name}-small.yaml", ["train.steps=20", "data.source.0.max_bytes=60000"])
        world = make_world(Topology(2, 2, recipe.moe.num_experts))
        engine = initialize(build_model(recipe, world), recipe, world)
        corpus = load_corpus(recipe.data, make_tokenizer(recipe.data.tokenizer))
        stream = TrainStream(corpus, recipe.data.seq_len, recipe.data.seed)
        torch.manual_seed(0)
        reports = []
        for _ in range(20):
            batches = stream.next_step(recipe.train.global_batch, rank, 2, recipe.train.accumulation)
            reports.append(engine.train_step([MicroBatch(batch.tokens, batch.labels) for batch in batches]))
        curves[name] = [(report.lm_loss, report.applied, report.counts_LE.sum().item()) for report in reports]
    return curves


def test_each_in_small_trains_for_twenty_steps():
    first, second = run_ranks(2, twenty_steps, list(PUBLISHED), timeout=240)
    assert first == second
    for name, curve in first.items():
        recipe = load_recipe(MODELS / f"{name}-small.yaml")
        layers = len(recipe.moe.moe_layers(recipe.model.layers))
        assert all(applied for _, applied, _ in curve)
        assert {count for _, _, count in curve} == {16 * 64 * recipe.moe.top_k * layers}
        assert curve[-1][0] < curve[0][0] - 1.5, (name, curve[0][0], curve[-1][0])
