"""A wrong micro-batch on one rank: every rank raises at once, that rank with the value and the rule."""

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.errors import EngineError
from moe_async.model import build_model
from moe_async.topology import Topology
from tests.helpers.small import small_recipe
from tests.helpers.spawn import run_ranks


def good(rank=0):
    tokens = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(rank))
    return MicroBatch(tokens, (tokens + 1) % 32, torch.ones(2, 6, dtype=torch.bool))


def wrong():
    """The micro-batches of rank 1, and what it is told."""
    batch = good(1)
    tokens, labels, mask = batch.tokens, batch.labels, batch.token_mask
    shape = "with the shape of tokens [sequences, positions], which is (2, 6)"
    return {
        "mask of another shape": (
            [MicroBatch(tokens, labels, mask[:, :5])],
            f"token_mask of a micro-batch is torch.bool (2, 5); it must be torch.bool {shape}",
        ),
        "mask that only broadcasts": (
            [MicroBatch(tokens, labels, mask[:1])],
            f"token_mask of a micro-batch is torch.bool (1, 6); it must be torch.bool {shape}",
        ),
        "mask of numbers": (
            [MicroBatch(tokens, labels, mask.long())],
            f"token_mask of a micro-batch is torch.int64 (2, 6); it must be torch.bool {shape}",
        ),
        "labels of another shape": (
            [MicroBatch(tokens, labels[:1], mask)],
            f"labels of a micro-batch is torch.int64 (1, 6); it must be torch.int64 {shape}",
        ),
        "labels of another type": (
            [MicroBatch(tokens, labels.int(), mask)],
            f"labels of a micro-batch is torch.int32 (2, 6); it must be torch.int64 {shape}",
        ),
        "tokens of another type": (
            [MicroBatch(tokens.int(), labels, mask)],
            f"tokens of a micro-batch is torch.int32 (2, 6); it must be torch.int64 {shape}",
        ),
        "tokens in one row": (
            [MicroBatch(tokens[0], labels[0], mask[0])],
            "tokens of a micro-batch is torch.int64 (6,); it must be torch.int64",
        ),
        "no labels": ([MicroBatch(tokens, None, mask)], "labels of a micro-batch is None; it must be torch.int64"),
        "none": ([], "train_step got 0 micro-batches but the recipe's train.accumulation is 1"),
        "two": ([batch, batch], "train_step got 2 micro-batches but the recipe's train.accumulation is 1"),
    }


def messages(rank):
    found, world = {}, make_world(Topology(2, 2, 4))
    recipe = small_recipe(parallel={"expert": 2, "zero": 0}, train={"steps": 9, "global_batch": 4})
    engine = initialize(build_model(recipe, world), recipe, world)
    before = [p.detach().clone() for p in engine.module.parameters()]
    for name, (batches, _) in wrong().items():
        with pytest.raises(EngineError) as error:
            engine.train_step(batches if rank == 1 else [good()])
        found[name] = str(error.value)
    unchanged = all(torch.equal(p, q) for p, q in zip(engine.module.parameters(), before, strict=True))
    report = engine.train_step([good(rank)])
    return found, unchanged, (report.applied, report.step)


def test_all_ranks_raise_and_can_go_on():
    first, second = run_ranks(2, messages, timeout=60)
    for name, (_, part) in wrong().items():
        assert first[0][name] == "another rank was given a wrong step; its error says what is wrong."
        assert part in second[0][name], name
    assert first[1:] == second[1:] == (True, (True, 1))
