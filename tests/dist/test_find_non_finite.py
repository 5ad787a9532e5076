"""What is said of a step that is not finite, for each kind of recomputation and ZeRO stage, with experts on two ranks.

The causes are on rank 1 alone and in the second micro-batch where that is possible; both ranks name the same place.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.diagnose import find_non_finite
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.model import build_model
from moe_async.topology import Topology
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

RARE = 31
WAYS = [("none", 0), ("block", 0), ("reentrant", 0), ("block", 1), ("none", 2), ("reentrant", 2)]
"""Recomputation and ZeRO stage."""


def batches(rank):
    """Only the second micro-batch of rank 1 has the rare id."""
    found = []
    for index in range(2):
        tokens = torch.randint(0, RARE, (2, 6), generator=torch.Generator().manual_seed(10 * index + rank))
        if (rank, index) == (1, 1):
            tokens[1, 2] = RARE
        found.append(MicroBatch(tokens, (tokens * 3 + 1) % 32))
    return found


def engine_of(recompute, stage, coefficient=0.5):
    recipe = small_recipe(
        moe={
            **SMALL["moe"], "layers": "all", "router": {"kind": "topk", "jitter": 0.1},
            "balance": [
                {"loss": "switch", "coefficient": coefficient, "scope": "step"},
                {"loss": "importance", "coefficient": 0.1, "scope": "previous"},
            ],
        },
        parallel={"expert": 2, "zero": stage},
        optim={"kind": "adamw", "lr": 0.01, "schedule": {"kind": "constant"}},
        train={
            "steps": 9, "global_batch": 8, "accumulation": 2, "precision": "float32" if stage else "float64",
            "recompute": recompute,
        },
    )  # fmt: skip
    world = make_world(Topology(2, 2, 4))
    return initialize(build_model(recipe, world), recipe, world)


class Breaks(torch.autograd.Function):
    """The same values; gradients that are no numbers."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


@contextmanager
def hooked(module, change):
    handle = module.register_forward_hook(lambda module, inputs, output: change(output))
    yield
    handle.remove()


@contextmanager
def with_weight(weight, place):
    before = weight.detach().clone()
    with torch.no_grad():
        weight[place] = torch.inf
    yield
    with torch.no_grad():
        weight.copy_(before)


def ills(rank, module):
    """What is done to rank 1, and the phrase."""
    first, last = module.layers
    found = {
        "healthy": (nullcontext(), ""),
        "weight": (with_weight(first.attention.out.weight, (0, 0)), "the output of layers.0.attention.out"),
        "rare id": (with_weight(module.embedding.weight, RARE), "the output of embedding"),
        "backward": (hooked(last.attention_norm, Breaks.apply), "the gradient of layers.1.attention_norm.weight"),
        "backward of a router": (
            hooked(last.ffn.router, lambda out: (out[0], out[1]._replace(weights_TK=Breaks.apply(out[1].weights_TK)))),
            "the gradient of layers.1.ffn.router.weight",
        ),
        "backward, first layer": (hooked(first.ffn_norm, Breaks.apply), "the gradient of layers.0.ffn_norm.weight"),
    }
    return found if rank == 1 else {name: (nullcontext(), phrase) for name, (_, phrase) in found.items()}


def all_ills(rank, recompute, stage):
    engine = engine_of(recompute, stage)
    engine.train_step(batches(rank))
    module, answers, skipped = engine.module, {}, {}
    start = [p.detach().clone() for p in module.parameters()]
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    hooks = sum(len(part._forward_hooks) for part in module.modules())
    for name, (ill, phrase) in ills(rank, module).items():
        with ill:
            answers[name] = find_non_finite(module, batches(rank), engine.micro_batch_objective, engine.world), phrase
    same = [torch.equal(p, q) for p, q in zip(module.parameters(), start, strict=True)]
    for p, before in zip(module.parameters(), gradients, strict=True):
        same.append((p.grad is None) == (before is None) and (before is None or torch.equal(p.grad, before)))
    left = module.recompute, sum(len(part._forward_hooks) for part in module.modules()) - hooks
    # The search leaves nothing behind that a step would take along, and a step of the same kind is indeed skipped.
    for name, (ill, _) in ills(rank, module).items():
        with ill:
            skipped[name] = not engine.train_step(batches(rank)).applied
    flooded = engine_of(recompute, stage, 1e308 if stage == 0 else 3e38)
    phrase = find_non_finite(flooded.module, batches(rank), flooded.micro_batch_objective, flooded.world)
    answers["coefficient"] = phrase, "the loss"
    return answers, all(same), left, skipped


def all_ways(rank):
    return [all_ills(rank, *way) for way in WAYS]


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, all_ways, timeout=180)


@pytest.mark.parametrize("way", range(len(WAYS)), ids=lambda index: f"{WAYS[index][0]}-zero{WAYS[index][1]}")
def test_both_ranks_name_the_place_and_nothing_changes(results, way):
    for rank in results:
        answers, same, left, skipped = rank[way]
        assert {name: found for name, (found, _) in answers.items()} == {
            name: phrase for name, (_, phrase) in answers.items()
        }
        assert same and left == (WAYS[way][0], 0)
        assert {name for name, bad in skipped.items() if not bad} == {"healthy"}
