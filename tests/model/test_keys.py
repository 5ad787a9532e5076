"""What is exchanged of a model: everything that trains, once, under names that do not depend on where it is."""

from __future__ import annotations

import pytest
import torch

from moe_async.comm import World
from moe_async.model import build_model
from moe_async.model.build import make_transformer
from moe_async.model.keys import exchange_keys, exchanged_tensors, expert_modules
from moe_async.topology import Topology
from tests.helpers.small import SMALL, small_recipe

KINDS = {
    "topk": {},
    "tied": {"model": SMALL["model"] | {"tie_embeddings": True}},
    "bias": {"moe": SMALL["moe"] | {"balance": [], "router": {"kind": "sigmoid_bias"}}},
    "frozen": {"moe": SMALL["moe"] | {"balance": [], "router": {"kind": "topk", "freeze": True}}},
    "shared": {"moe": SMALL["moe"] | {"layers": "all", "shared_dim": 6, "expert_bias": True}},
    "dense": {"moe": None},
}


@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_trains_is_exchanged_once(kind):
    model = build_model(small_recipe(**KINDS[kind]))
    keys = [key for keys in exchange_keys(model, 4).values() for key in keys]
    tensors = exchanged_tensors(model)
    assert len({key.name for key in keys}) == len(keys)
    assert {key.name for key in keys} == tensors.keys()
    assert all(tensors[key.name].numel() == key.elements for key in keys)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if name in tensors)
    assert sum(key.elements for key in keys) == trained + biases
    assert bool(biases) == (kind == "bias")


def test_a_selection_bias_is_the_routers_and_its_controller_stays_at_home():
    model = build_model(small_recipe(**KINDS["bias"]))
    names = {key.name for key in exchange_keys(model, 4)["router"]}
    buffers = {name for name, _ in model.named_buffers()}
    assert len(names & buffers) == 1 < len(buffers)


def test_classes():
    keys = exchange_keys(build_model(small_recipe()), 4)
    assert {key.name.rpartition(".")[2] for key in keys["expert"]} == {"0", "1", "2", "3"}
    assert all("router" in key.name for key in keys["router"]) and keys["router"]
    assert not any("experts" in key.name or "router" in key.name for key in keys["dense"])


@pytest.mark.parametrize("rank", [0, 1])
def test_keys_do_not_depend_on_who_holds_what(rank):
    """A rank of two has half of the experts and the same keys, in the same order."""
    recipe = small_recipe(parallel={"expert": 2, "zero": 0})
    whole = exchange_keys(build_model(recipe), 4)
    with torch.device("meta"):
        half = make_transformer(recipe, World(Topology(2, 2, 4), rank=rank))
    assert exchange_keys(half, 4) == whole
    assert expert_modules(half) == expert_modules(build_model(recipe))


def test_tensors_are_views():
    model = build_model(small_recipe())
    tensors = exchanged_tensors(model)
    for tensor in tensors.values():
        tensor.fill_(0.5)
    assert all(bool((parameter == 0.5).all()) for parameter in model.parameters())
