"""The noise of a run follows from train.seed alone: not from the launch, the expert-parallel size or earlier draws."""

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.model import build_model
from moe_async.moe.classes import expert_ids
from moe_async.topology import Topology
from tests.helpers.numerics import assert_close
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

EXPERTS = 4
NOISY = {
    "jitter": {"router": {"kind": "topk", "jitter": 0.3}},
    "input noise": {"router": {"kind": "topk", "input_noise": 0.3}},
    "gshard": {"router": {"kind": "gshard"}},
    "noisy_topk": {"router": {"kind": "noisy_topk"}},
    "dropout": {"expert_dropout": 0.4},
    "capacity": {"capacity": {"factor": 0.6, "policy": "random"}},
    "all": {
        "router": {"kind": "gshard", "jitter": 0.2}, "expert_dropout": 0.3,
        "capacity": {"factor": 0.8, "policy": "random"},
    },
}  # fmt: skip
RUNS = {"one": (1, 3), "two": (2, 3), "other": (1, 4)}
"""Expert-parallel size and train.seed."""


def recipe_of(options, expert_parallel, seed):
    return small_recipe(
        moe={**SMALL["moe"], "layers": "all", **options},
        parallel={"expert": expert_parallel, "zero": 0},
        train={"steps": 9, "global_batch": 4, "precision": "float64", "seed": seed},
    )


def batch(step, rank):
    tokens = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return MicroBatch(tokens, (tokens * 3 + 1) % 32)


def two_steps(rank, launch):
    results = {}
    for name, options in NOISY.items():
        for run, (expert_parallel, seed) in RUNS.items():
            world = make_world(Topology(2, expert_parallel, EXPERTS))
            # Always the same initial weights, so that only the noise can differ.
            model = build_model(recipe_of(options, expert_parallel, 0), world)
            # What a user's code did before is its own business.
            torch.manual_seed(100 * launch + rank)
            torch.rand(rank + 1)
            engine = initialize(model, recipe_of(options, expert_parallel, seed), world)
            losses = [engine.train_step([batch(step, rank)]).lm_loss for step in range(2)]
            weights = {key: p.detach().clone() for key, p in engine.module.named_parameters()}
            results[name, run] = losses, weights, expert_ids(engine.module)
    return results


@pytest.fixture(scope="module")
def launches():
    return [run_ranks(2, two_steps, launch) for launch in (1, 2)]


@pytest.mark.parametrize("name", NOISY)
def test_another_launch_of_the_same_seed_is_equal_bit_by_bit(launches, name):
    for run in RUNS:
        for first, second in zip(*launches, strict=True):
            assert first[name, run][0] == second[name, run][0]
            for key, weight in first[name, run][1].items():
                assert torch.equal(weight, second[name, run][1][key]), key


@pytest.mark.parametrize("name", NOISY)
def test_another_seed_gives_other_noise(launches, name):
    for rank in launches[0]:
        assert rank[name, "one"][0] != rank[name, "other"][0]
        routers = [key for key in rank[name, "one"][1] if key.endswith("router.weight")]
        assert routers and not any(
            torch.equal(rank[name, "one"][1][key], rank[name, "other"][1][key]) for key in routers
        )


@pytest.mark.parametrize("name", NOISY)
def test_the_noise_is_the_same_at_every_expert_parallel_size(launches, name):
    for rank in launches[0]:
        losses, whole, _ = rank[name, "one"]
        others, weights, ids = rank[name, "two"]
        assert others == pytest.approx(losses, rel=1e-12)
        for key, weight in weights.items():
            assert_close(weight, whole[key][list(ids.get(key, [])) or slice(None)], what=key)
