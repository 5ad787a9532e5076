"""Every router under the engine: one step gives the same weights at each expert-parallel size, way of getting the
loads and kind of recomputation. Float64, SGD, noise on, partly masked micro-batches of unequal sizes."""

import itertools

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.step import IGNORED_LABEL
from moe_async.model import build_model
from moe_async.moe.classes import expert_ids
from moe_async.topology import Topology
from tests.helpers.numerics import assert_close
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

EXPERTS, VOCAB = 4, 32
SHAPES = [(1, 7), (2, 4), (3, 2), (2, 6)]
USUAL = ["switch", "gshard", "importance", "z", "sequence"]
GATHER, DEDUPLICATE = {"dispatcher": "all_gather"}, {"dispatcher": "all_to_all", "deduplicate": True}
# What a layer has, its balance losses, and how tokens travel where they do.
ROUTERS = {
    "gshard": ({"router": {"kind": "gshard"}}, USUAL, {}),
    "gshard, capacity, all_gather": (
        {"router": {"kind": "gshard", "jitter": 0.2}, "capacity": {"factor": 0.7, "policy": "probability"}},
        USUAL, GATHER,
    ),
    "noisy_topk": ({"router": {"kind": "noisy_topk"}}, [*USUAL, "load"], {}),
    "expert_choice": (
        {"router": {"kind": "expert_choice", "sees_the_future": True}}, ["importance", "z"], {},
    ),
    "expert_choice, deduplicate": (
        {"router": {"kind": "expert_choice", "sees_the_future": True}}, ["importance", "z"], DEDUPLICATE,
    ),
    "hash": ({"router": {"kind": "hash"}}, USUAL, {}),
    "sigmoid with groups": (
        {
            "router": {"kind": "sigmoid_bias", "groups": {"number": 2, "keep": 1}, "update": {"rate": 0.1}},
            "device_groups": 2, "shared_dim": 4, "shared_gate": True,
        },
        [*USUAL, "device", "communication"], DEDUPLICATE,
    ),
    "zero experts": (
        {"zero_experts": 2, "device_groups": 2, "expert_dropout": 0.3},
        [*USUAL, "device", "communication"], GATHER,
    ),
    "random capacity": (
        {"capacity": {"factor": 0.6, "policy": "random", "normalise": "after"}, "expert_bias": True},
        USUAL, DEDUPLICATE,
    ),
}  # fmt: skip
WAYS = [(1, "count", "none"), *itertools.product((2,), ("count", "keep"), ("none", "block", "reentrant"))]
"""Expert-parallel size, loads, recomputation; the first is what the others are compared with."""


def micro_batch(index):
    rows, length = SHAPES[index]
    tokens = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(index))
    live = torch.ones(rows, length, dtype=torch.bool)
    if index in (1, 3):
        live[-1, length // 2 :] = False
    labels = torch.where(live, (tokens * 3 + 1) % VOCAB, IGNORED_LABEL)
    return MicroBatch(tokens, labels, None if live.all() else live)


def recipe_of(name, expert_parallel, loads, recompute):
    options, losses, travel = ROUTERS[name]
    balance = [
        {"loss": loss, "coefficient": 0.1 + 0.05 * index, "scope": "sequence" if loss == "sequence" else "step"}
        for index, loss in enumerate(losses)
    ]
    return small_recipe(
        moe={
            **SMALL["moe"], "layers": "all", **options, "balance": balance, "step_loads": loads,
            **(travel if expert_parallel > 1 else {}),
        },
        parallel={"expert": expert_parallel, "zero": 0},
        train={
            "steps": 9, "global_batch": 8, "accumulation": 2, "precision": "float64", "recompute": recompute, "seed": 5,
        },
    )  # fmt: skip


def one_step(rank):
    results = {}
    for name, way in itertools.product(ROUTERS, WAYS):
        recipe = recipe_of(name, *way)
        world = make_world(Topology(2, way[0], EXPERTS))
        engine = initialize(build_model(recipe, world), recipe, world)
        start = {key: p.detach().clone() for key, p in engine.module.named_parameters()}
        report = engine.train_step([micro_batch(rank), micro_batch(2 + rank)])
        assert report.applied
        weights = {key: p.detach().clone() for key, p in engine.module.named_parameters()}
        weights |= {key: buffer.clone() for key, buffer in engine.module.named_buffers()}
        still = [key for key, value in start.items() if torch.equal(value, weights[key])]
        counts = report.counts_LE, report.zero_LE, report.dropped_LE
        results[name, way] = weights, expert_ids(engine.module), report, counts, still
    return results


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, one_step, timeout=240)


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: "-".join(map(str, way)))
@pytest.mark.parametrize("name", ROUTERS)
def test_the_same_weights_every_way(results, name, way):
    for rank in results:
        expected, _, first, counts, _ = rank[name, WAYS[0]]
        weights, ids, report, found, still = rank[name, way]
        assert report.lm_loss == pytest.approx(first.lm_loss, rel=1e-12)
        assert report.balance == pytest.approx(first.balance, rel=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(found, counts, strict=True))
        assert weights.keys() == expected.keys()
        for key, value in weights.items():
            assert_close(value, expected[key][list(ids.get(key, [])) or slice(None)], torch.float64, key)
        assert not [key for key in still if "router" in key]


def test_counts_hold_real_experts_and_zero_experts_apart(results):
    for rank in results:
        for (name, _), (_, _, report, (counts_LE, zero_LE, dropped_LE), _) in rank.items():
            zero = ROUTERS[name][0].get("zero_experts", 0)
            assert counts_LE.shape == dropped_LE.shape == (2, EXPERTS) and zero_LE.shape == (2, zero)
            assert (dropped_LE.sum() > 0) == ("capacity" in name)
            if not name.startswith(("gshard", "expert_choice")):
                assert (counts_LE.sum(-1) + zero_LE.sum(-1)).tolist() == [2 * report.routed_tokens] * 2
            assert (zero_LE.sum(-1) > 0).all() or not zero
