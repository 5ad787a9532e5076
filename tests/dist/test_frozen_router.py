"""A frozen router keeps its weights while everything else trains, and lives in checkpoints like all weights."""

import torch

from moe_async.comm import make_world
from moe_async.engine.checkpoint import load_checkpoint, save_checkpoint
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.model import build_model
from moe_async.recipe import dump_recipe
from moe_async.topology import Topology
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks


def recipe_of(stage):
    return small_recipe(
        moe={**SMALL["moe"], "layers": "all", "router": {"kind": "sigmoid_bias", "freeze": True}},
        parallel={"expert": 2, "zero": stage},
        optim={"kind": "adamw", "lr": 0.01, "schedule": {"kind": "constant"}},
        train={"steps": 10, "global_batch": 4, "precision": "float32"},
    )


def batch(step, rank):
    tokens = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return MicroBatch(tokens, (tokens + 1) % 32)


def train(rank, folder):
    found = []
    for stage in (0, 1, 2):
        world = make_world(Topology(2, 2, 4))
        engine = initialize(build_model(recipe_of(stage), world), recipe_of(stage), world)
        start = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        report = engine.train_step([batch(0, rank)])
        path = save_checkpoint(folder / str(stage), 1, engine.bridge, dump_recipe(recipe_of(stage)), {}, 1)
        changed = {name: not torch.equal(p, start[name]) for name, p in engine.module.named_parameters()}
        other = build_model(recipe_of(stage), world)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)
        resumed = initialize(other, recipe_of(stage), world)
        load_checkpoint(path, resumed.bridge)
        resumed.global_step = 1
        for running in (engine, resumed):
            running.train_step([batch(1, rank)])
        same = [torch.equal(a, b) for a, b in zip(engine.module.parameters(), resumed.module.parameters(), strict=True)]
        found.append((report.balance["switch"], changed, all(same)))
    return found


def test_only_the_router_stays_as_it_was(tmp_path):
    for found in run_ranks(2, train, tmp_path):
        for switch, changed, same in found:
            assert switch > 0 and same
            assert {name for name, moved in changed.items() if not moved} == {
                f"layers.{layer}.ffn.router.weight" for layer in range(2)
            }
