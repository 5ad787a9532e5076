"""Figures of loads over real ranks equal those of one process that saw all micro-batches."""

import numpy as np
import pytest
import torch

import moe_async
from moe_async.comm import make_world
from moe_async.engine.load_meta import load_meta
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.start import initialize
from moe_async.model import build_model
from moe_async.moe.router import Router
from moe_async.observe import read_load
from moe_async.topology import Topology
from tests.helpers.numerics import assert_all_close
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

BATCHES, ROWS, LENGTH, STEPS = 4, 2, 6, 2
DOMAINS = ("code", "prose")


def micro_batch(index):
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, 32, (ROWS, LENGTH), generator=generator)
    mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.8
    return MicroBatch(tokens, (tokens * 3 + 1) % 32, mask, torch.randint(0, 3, (ROWS,), generator=generator))


def figures(rank, world_size, expert):
    """Loads of each step, whose micro-batches the ranks share out."""
    share = BATCHES // world_size
    recipe = small_recipe(
        moe=SMALL["moe"] | {"layers": [0, 1]},
        parallel={"expert": expert, "zero": 0},
        train={"steps": 10, "global_batch": BATCHES * ROWS, "precision": "float64", "accumulation": share},
    )
    world = make_world(Topology(world_size, expert, 4))
    engine = initialize(build_model(recipe, world), recipe, world)
    engine.observed = load_meta(recipe, world, DOMAINS)
    found = []
    for step in range(STEPS):
        batches = [micro_batch(100 * step + rank * share + place) for place in range(share)]
        found.append(engine.train_step(batches).load)
    return found, engine.observed.rank_experts


@pytest.mark.parametrize(("world_size", "expert"), [(2, 2), (4, 2)])
def test_over_ranks_as_in_one_process(world_size, expert):
    ((alone, _),) = run_ranks(1, figures, 1, 1)
    for load, rank_experts in run_ranks(world_size, figures, world_size, expert):
        for one, other in zip(alone, load, strict=True):
            names = set(one) - {"rank_load"}
            assert one["counts"].sum() > 0 and one["domain_counts"][:, :2].sum() > 0
            assert_all_close(
                {name: torch.from_numpy(np.asarray(other[name])) for name in names},
                {name: torch.from_numpy(np.asarray(one[name])) for name in names},
            )
            # Each rank computes what its expert group sent to its experts: over the groups, the experts' whole load.
            executed_LE = one["counts"] - one["dropped"]
            for experts in set(rank_experts):
                holders = [rank for rank, held in enumerate(rank_experts) if held == experts]
                assert np.array_equal(
                    other["rank_load"][:, holders].sum(axis=1), executed_LE[:, list(experts)].sum(axis=1)
                )


def watched(rank, path, world_size, expert):
    """The engine's figures of each step, while record_load watches its model."""
    share = BATCHES // world_size
    recipe = small_recipe(
        moe=SMALL["moe"] | {"layers": [0, 1], "capacity": {"factor": 0.8}},
        parallel={"expert": expert, "zero": 0},
        train={"steps": 10, "global_batch": BATCHES * ROWS, "precision": "float64", "accumulation": share},
    )
    world = make_world(Topology(world_size, expert, 4))
    model = build_model(recipe, world)
    engine = initialize(model, recipe, world)
    engine.observed = load_meta(recipe, world, DOMAINS)
    found = []
    with moe_async.record_load(model, path, accumulation=share):
        for step in range(STEPS):
            batches = [micro_batch(100 * step + rank * share + place) for place in range(share)]
            found.append(engine.train_step(batches).load)
    return found, engine.observed


@pytest.mark.parametrize(("world_size", "expert"), [(2, 2), (2, 1)])
def test_record_load_sees_what_the_engine_does(world_size, expert, tmp_path):
    (figures, meta), *_ = run_ranks(world_size, watched, tmp_path, world_size, expert)
    record = read_load(tmp_path)
    assert record.meta.experts == meta.experts and record.meta.top_k == meta.top_k
    # Without expert parallelism every rank holds all experts, and which rank computes what follows from its tokens.
    assert record.meta.rank_experts == (meta.rank_experts if expert > 1 else ())
    for step in range(STEPS):
        assert figures[step]["dropped"].sum() > 0
        for name in ("tokens", "counts", "dropped", "prob", "entropy", "z", "top", "margin", "micro_violation_peak"):
            np.testing.assert_allclose(record.windows[name][step], figures[step][name], rtol=1e-6, err_msg=name)
        if expert > 1:
            assert np.array_equal(record.windows["rank_load"][step], figures[step]["rank_load"])


def biased(rank, path, world_size):
    """The selection biases of each layer after each step, while record_load watches the model."""
    share = BATCHES // world_size
    recipe = small_recipe(
        moe=SMALL["moe"] | {"layers": [0, 1], "balance": [], "router": {"kind": "sigmoid_bias", "update": {"rule": "proportional", "rate": 0.1}}},
        parallel={"expert": world_size, "zero": 0},
        train={"steps": 10, "global_batch": BATCHES * ROWS, "precision": "float32", "accumulation": share},
    )
    world = make_world(Topology(world_size, world_size, 4))
    model = build_model(recipe, world)
    engine = initialize(model, recipe, world)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    found = []
    with moe_async.record_load(model, path, accumulation=share):
        for step in range(STEPS):
            engine.train_step([micro_batch(100 * step + rank * share + place) for place in range(share)])
            found.append(np.stack([router.bias_state.bias_E.numpy().copy() for router in routers]))
    return found


def test_recorded_biases_are_those_after_each_step(tmp_path):
    first, second = run_ranks(2, biased, tmp_path, 2)
    record = read_load(tmp_path)
    for step in range(STEPS):
        assert np.array_equal(first[step], second[step]) and np.abs(first[step]).max() > 0.01
        np.testing.assert_allclose(record.windows["bias"][step], first[step], rtol=1e-6)
    assert not np.array_equal(first[0], first[1])
