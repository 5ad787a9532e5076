"""Parameters of a plan are those of the model."""

from pathlib import Path

import pytest

from moe_async.model.build import count_parameters
from moe_async.plan.sizes import model_sizes
from moe_async.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("**/*.yaml"))
SYNC = ROOT / "recipes" / "quickstart-sync.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_parameters_of_every_recipe(path):
    recipe = load_recipe(path)
    sizes = model_sizes(recipe)
    assert (sizes.total, sizes.active) == count_parameters(recipe)


@pytest.mark.parametrize(
    "overrides",
    [
        ["moe.shared_dim=64", "moe.shared_gate=true"],
        ["moe.expert_bias=true", "moe.expert=gelu"],
        ["moe.router={kind: noisy_topk}"],
        ["moe.router={kind: topk, bias: true}", "moe.zero_experts=4"],
        ["moe.router={kind: sigmoid_bias}", "moe.zero_experts=4"],
        ["moe.router={kind: hash}"],
        ["moe.layers={every: 2, offset: 1}", "model.qk_norm=head", "model.tie_embeddings=false"],
        ["moe=null", "model.qk_norm=full", "model.head_dim=48", "parallel.expert=1"],
    ],
)
def test_parameters_of_options(overrides):
    recipe = load_recipe(SYNC, overrides)
    sizes = model_sizes(recipe)
    assert (sizes.total, sizes.active) == count_parameters(recipe)
