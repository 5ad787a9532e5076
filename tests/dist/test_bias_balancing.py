"""Selection biases follow the load of whole steps: the same at every cut, saved, and left alone by evaluation."""

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.checkpoint import load_checkpoint, load_weights, save_checkpoint
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.model import build_model
from moe_async.recipe import dump_recipe
from moe_async.topology import Topology
from tests.helpers.numerics import assert_close
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

EXPERTS, VOCAB, RATE = 4, 32, 0.05


def recipe_of(expert_parallel=1, accumulation=1, stage=0, lr=0.1, **update):
    return small_recipe(
        moe={
            **SMALL["moe"], "layers": "all", "balance": [{"loss": "sequence", "coefficient": 0.01}],
            "router": {"kind": "sigmoid_bias", "scale": 2.5, "update": {"rate": RATE, **update}},
        },
        parallel={"expert": expert_parallel, "zero": stage},
        optim={"kind": "sgd", "lr": lr, "weight_decay": 0.0, "clip": 0.0, "schedule": {"kind": "constant"}},
        train={
            "steps": 60, "global_batch": 4, "accumulation": accumulation,
            "precision": "float32" if stage else "float64",
        },
    )  # fmt: skip


def batch(step, index):
    """Few different tokens, so that the load is uneven."""
    generator = torch.Generator().manual_seed(10 * step + index)
    tokens = torch.randint(0, 5, (2, 6), generator=generator)
    return MicroBatch(tokens, (tokens + 1) % VOCAB)


def biases(engine):
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers() if "error" not in name}


def engine_of(recipe, world_size):
    world = make_world(Topology(world_size, recipe.parallel.expert, EXPERTS))
    return initialize(build_model(recipe, world), recipe, world)


def three_steps(rank, world_size, expert_parallel, stage):
    accumulation = 2 // world_size
    engine = engine_of(recipe_of(expert_parallel, accumulation, stage), world_size)
    history = []
    for step in range(3):
        report = engine.train_step([batch(step, a * world_size + rank) for a in range(accumulation)])
        history.append((report.counts_LE, biases(engine)))
    return history


@pytest.mark.parametrize(("world_size", "expert_parallel", "stage"), [(1, 1, 0), (2, 1, 0), (2, 2, 0), (2, 2, 1)])
def test_the_bias_follows_the_counts_of_all_ranks_and_micro_batches(world_size, expert_parallel, stage):
    for history in run_ranks(world_size, three_steps, world_size, expert_parallel, stage):
        expected = torch.zeros(2, EXPERTS, dtype=torch.float64)
        for counts_LE, found in history:
            assert counts_LE.sum(-1).tolist() == [2 * 2 * 2 * 6] * 2
            for layer in range(2):
                mean = counts_LE[layer].double().mean()
                signs = [(c < mean).double() - (c > mean).double() for c in counts_LE[layer].double()]
                expected[layer] += RATE * (torch.stack(signs) - sum(signs) / EXPERTS)
            assert sorted(found) == [f"layers.{layer}.ffn.router.selection_bias" for layer in range(2)]
            for layer in range(2):
                bias = found[f"layers.{layer}.ffn.router.selection_bias"]
                assert bias.dtype == torch.float32
                assert_close(bias, expected[layer], torch.float32)
        assert expected.abs().max() > 0


def fall_of_the_load(rank):
    # The weights hardly move, so what evens the load is the bias.
    engine = engine_of(recipe_of(lr=1e-9, rate=0.005), 1)
    tokens = torch.arange(VOCAB).repeat(3).view(4, 24)
    worst = []
    for _ in range(50):
        counts_LE = engine.train_step([MicroBatch(tokens, (tokens + 1) % VOCAB)]).counts_LE.double()
        worst.append((counts_LE.amax(-1) / counts_LE.mean(-1)).max().item())
    return worst


def test_an_uneven_load_becomes_even():
    (worst,) = run_ranks(1, fall_of_the_load)
    assert worst[0] > 1.4 and max(worst[-5:]) < 1.2, worst


def with_and_without_evaluation(rank):
    found = []
    for evaluates in (False, True):
        engine = engine_of(recipe_of(), 1)
        for step in range(3):
            engine.train_step([batch(step, 0)])
            if evaluates:
                engine.bridge.train(False)
                with torch.no_grad():
                    engine.forward(batch(9, 9).tokens)
                engine.bridge.train(True)
        found.append((biases(engine), [p.detach() for p in engine.module.parameters()]))
    return found


def test_evaluation_moves_no_bias():
    ((plain, weights), (evaluated, others)) = run_ranks(1, with_and_without_evaluation)[0]
    assert all(torch.equal(plain[name], evaluated[name]) for name in plain)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def until(rank):
    engine = engine_of(recipe_of(until=2), 1)
    found = []
    for step in range(4):
        engine.train_step([batch(step, 0)])
        found.append(biases(engine))
    poisoned = engine_of(recipe_of(), 1)
    poisoned.train_step([batch(0, 0)])
    before = biases(poisoned)
    poisoned.module.norm.weight.data[0] = torch.inf
    skipped = poisoned.train_step([batch(1, 0)])
    return found, (skipped.applied, before, biases(poisoned))


def test_the_rate_ends_and_a_skipped_step_moves_nothing():
    found, (applied, before, after) = run_ranks(1, until)[0]
    name = "layers.0.ffn.router.selection_bias"
    assert not torch.equal(found[0][name], found[1][name])
    assert torch.equal(found[1][name], found[2][name]) and torch.equal(found[2][name], found[3][name])
    assert not applied and torch.equal(before[name], after[name])


def save_and_resume(rank, folder):
    options = {"rule": "pid", "integral": 0.1, "derivative": 0.2}
    recipe = recipe_of(2, stage=1, **options)
    engine = engine_of(recipe, 2)
    engine.train_step([batch(0, rank)])
    path = save_checkpoint(folder, 1, engine.bridge, dump_recipe(recipe), {}, 1)
    other = engine_of(recipe, 2)
    load_checkpoint(path, other.bridge)
    other.global_step = 1
    for running in (engine, other):
        for step in (1, 2):
            running.train_step([batch(step, rank)])
    whole = build_model(recipe_of(1, stage=1, **options))
    load_weights(path, whole)
    states = [dict(model.named_buffers()) for model in (engine.module, other.module, whole)]
    return states, [
        torch.equal(a, b) for a, b in zip(engine.module.parameters(), other.module.parameters(), strict=True)
    ]


def test_biases_and_their_controllers_are_in_checkpoints(tmp_path):
    for (running, resumed, whole), weights in run_ranks(2, save_and_resume, tmp_path):
        assert len(running) == 6 and all(weights)
        assert all(torch.equal(running[name], resumed[name]) for name in running)
        assert any(value.abs().sum() > 0 for name, value in whole.items() if "selection_bias" in name)
