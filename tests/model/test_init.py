"""How weights begin: the standard deviations that papers state, for every matrix, at every expert-parallel size."""

import math

import pytest
import torch

from moe_async.comm import World
from moe_async.model import build_model
from moe_async.ops.initialise import Init, normal_by_name_
from moe_async.topology import Topology
from tests.helpers.small import SMALL, small_recipe

DIM, HIDDEN, LAYERS = 64, 96, 2

# Of a standard normal variable that is drawn anew beyond two (three) standard deviations.
CUT = {2: 0.87963, 3: 0.98658}


def model_of(**init):
    return build_model(
        small_recipe(
            model={
                "dim": DIM, "layers": LAYERS, "heads": 4, "ffn_dim": HIDDEN, "vocab_size": 512, "tie_embeddings": False,
                "init": init,
            },
            moe={**SMALL["moe"], "num_experts": 16, "expert_dim": HIDDEN, "shared_dim": HIDDEN, "shared_gate": True},
        )
    )  # fmt: skip


def fan_in_of(name, parameter):
    return parameter.shape[-1] if parameter.ndim > 1 else None


@pytest.mark.parametrize(
    ("init", "std_of", "cut"),
    [
        ({}, lambda fan_in: fan_in**-0.5, None),
        ({"scale": 0.1, "truncate": 2, "depth_scaled": False}, lambda fan_in: math.sqrt(0.1 / fan_in), 2),
        ({"std": 0.02, "truncate": 3, "depth_scaled": False}, lambda fan_in: 0.02, 3),
        ({"std": 0.006, "depth_scaled": True}, lambda fan_in: 0.006, None),
    ],
    ids=["default", "Switch", "OLMoE", "DeepSeek"],
)
def test_standard_deviations(init, std_of, cut):
    seen = 0
    for name, parameter in model_of(**init).named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        std = std_of(parameter.shape[-1])
        if name == "embedding.weight":
            std = init.get("std", 0.02)
        if init.get("depth_scaled", True) and name.endswith(("attention.out.weight", "w_out")):
            std *= (2 * LAYERS) ** -0.5
        if cut:
            assert parameter.abs().max() <= cut * std * (1 + 1e-6), name
            std *= CUT[cut]
        # The standard deviation of n values is known to 1 / sqrt(2 n); four of those.
        assert parameter.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * parameter.numel())), name
        assert abs(parameter.mean().item()) < 4 * std / math.sqrt(parameter.numel()), name
        seen += 1
    assert seen == 2 + LAYERS * 2 + 2 + 2 + 1 + 2 + 1


def test_truncated_values_follow_from_name_and_seed():
    init, first, again = Init(scale=0.1, truncate=2.0), torch.empty(8, 9), torch.empty(8, 9)
    init.fill_(first, 9, 3, "a")
    init.fill_(again, 9, 3, "a")
    assert torch.equal(first, again)
    init.fill_(again, 9, 3, "b")
    assert not torch.equal(first, again)
    normal_by_name_(again, std=math.sqrt(0.1 / 9), seed=3, name="a", truncate=2.0)
    assert torch.equal(first, again)


def test_shards_begin_like_the_whole_with_biases_and_zero_experts():
    recipe = small_recipe(
        moe={**SMALL["moe"], "zero_experts": 2, "expert_bias": True, "router": {"kind": "topk", "bias": True}}
    )
    whole = build_model(recipe).layers[1].ffn
    assert whole.router.weight.shape == (6, 8)
    for bias in (whole.router.bias, whole.experts.b_in, whole.experts.b_out):
        assert torch.equal(bias, torch.zeros_like(bias))
    shard = build_model(recipe, World(Topology(2, 2, 4), rank=1)).layers[1].ffn
    assert torch.equal(shard.experts.w_in, whole.experts.w_in[2:])
    assert torch.equal(shard.router.weight, whole.router.weight)
