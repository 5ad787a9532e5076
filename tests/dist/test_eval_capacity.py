"""Capacity in evaluation depends on a rank's own tokens: one rank alone may evaluate, and gets what it would beside."""

import torch

from moe_async.comm import make_world
from moe_async.engine.start import initialize
from moe_async.model import build_model
from moe_async.topology import Topology
from tests.helpers.numerics import assert_close
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

# Sequences of each rank: the capacities differ.
ROWS = [1, 4]


def recipe_of(policy):
    capacity = {"factor": 1.0, "eval_factor": 0.5, "policy": policy}
    return small_recipe(
        moe={**SMALL["moe"], "layers": "all", "capacity": capacity}, train={"steps": 9, "global_batch": 4}
    )


def tokens_of(rank):
    return torch.randint(0, 32, (ROWS[rank], 7), generator=torch.Generator().manual_seed(rank))


def look(forward, tokens):
    """Logits, and the assignments that each layer dropped."""
    with torch.no_grad():
        logits, routing = forward(tokens)
    return logits, torch.stack([sums.total().dropped_E for sums in routing])


def evaluate(rank, policy):
    world = make_world(Topology(2, 1, 4))
    engine = initialize(build_model(recipe_of(policy), world), recipe_of(policy), world)
    engine.bridge.train(False)
    together = look(engine.forward, tokens_of(rank))
    world.everyone.barrier()
    alone = look(engine.forward, tokens_of(0)) if rank == 0 else None
    world.everyone.barrier()
    return together, alone


def both(rank):
    return [evaluate(rank, policy) for policy in ("position", "probability")]


def test_one_rank_alone_evaluates_as_both_do():
    by_rank = run_ranks(2, both, timeout=60)
    for index, policy in enumerate(("position", "probability")):
        together, alone = by_rank[0][index]
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
        assert by_rank[1][index][1] is None
        for rank in range(2):
            expected = look(build_model(recipe_of(policy)).eval(), tokens_of(rank))
            logits, dropped = by_rank[rank][index][0]
            assert_close(logits, expected[0], what=f"{policy} {rank}")
            assert torch.equal(dropped, expected[1]) and (dropped.sum(-1) > 0).all()
