"""A loss that is not finite on one rank, with gradients that all are: the step is skipped everywhere."""

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.step import IGNORED_LABEL, next_token_loss_sum
from moe_async.model import build_model
from moe_async.topology import Topology
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

VOCAB, IMPOSSIBLE = 32, 31
# ZeRO stage, micro-batches in a step, which of them is bad on rank 1, and what the last one of all ranks is like.
CASES = [
    (stage, accumulation, bad, last)
    for stage in (0, 1, 2)
    for accumulation, bad, last in ((1, 0, "full"), (2, 0, "full"), (2, 1, "full"), (2, 0, "without labels"))
]
IDS = [f"zero {stage}, {bad + 1} of {accumulation}, last {last}" for stage, accumulation, bad, last in CASES]


def recipe_of(stage, accumulation):
    return small_recipe(
        moe={
            **SMALL["moe"], "layers": "all", "router": {"kind": "sigmoid_bias", "update": {"rate": 0.05}},
            "balance": [{"loss": "switch", "coefficient": 0.01, "scope": "previous"}],
        },
        parallel={"expert": 2, "zero": stage},
        optim={"kind": "adamw", "lr": 0.01, "weight_decay": 0.1, "schedule": {"kind": "constant"}},
        train={"steps": 9, "global_batch": 8, "accumulation": accumulation, "precision": "float32"},
    )  # fmt: skip


def forbid(module, inputs, output):
    """The score of one id is minus infinity: the loss is infinite where it is the label, and no gradient is."""
    never = torch.arange(VOCAB) == IMPOSSIBLE
    return output._replace(logits=torch.where(never, -torch.inf, output.logits))


def engine_of(stage, accumulation):
    recipe, world = recipe_of(stage, accumulation), make_world(Topology(2, 2, 4))
    model = build_model(recipe, world)
    model.register_forward_hook(forbid)
    return initialize(model, recipe, world)


def batches(step, rank, accumulation):
    found = []
    for index in range(accumulation):
        generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
        tokens = torch.randint(0, VOCAB, (2, 6), generator=generator)
        found.append(MicroBatch(tokens, (tokens * 3 + 1) % IMPOSSIBLE))
    return found


def spoilt(step, rank, accumulation, bad, last):
    found = batches(step, rank, accumulation)
    if last == "without labels":
        tokens = found[-1].tokens
        found[-1] = MicroBatch(tokens, torch.full_like(tokens, IGNORED_LABEL), torch.zeros_like(tokens) > 0)
    if rank == 1:
        found[bad].labels[1, 2] = IMPOSSIBLE
    return found


def everything(engine):
    """Weights, biases and their controllers, the optimizer's state, and the loads of the step before."""
    module, bridge = engine.module, engine.bridge
    found = {f"weight {name}": p for name, p in module.named_parameters()}
    found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    for name, parameter in module.named_parameters():
        found |= {f"{key} {name}": value for key, value in bridge.optimizer_state(parameter)}
    for layer, sums in enumerate(engine.balance.previous or ()):
        found |= {f"{key} {layer}": value for key, value in sums._asdict().items()}
    found["updates"] = torch.tensor(list(bridge.optimizer_steps().values()))
    return {name: value.detach().clone() for name, value in found.items()}


def gradients_are_finite(engine, micro_batches):
    """And whether the losses are; every rank calls it."""
    losses, good = [], True
    for batch in micro_batches:
        loss = next_token_loss_sum(engine.module(batch.tokens, batch.token_mask).logits, batch.targets())
        gradients = torch.autograd.grad(loss, list(engine.module.parameters()), allow_unused=True)
        good &= all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
        losses.append(bool(loss.isfinite()))
    return good, all(losses)


def one_case(rank, stage, accumulation, bad, last):
    engine, twin = engine_of(stage, accumulation), engine_of(stage, accumulation)
    for running in (engine, twin):
        assert running.train_step(batches(0, rank, accumulation)).applied
    before, wrong = everything(engine), spoilt(1, rank, accumulation, bad, last)
    finite = gradients_are_finite(engine, wrong)
    report = engine.train_step(wrong)
    after = everything(engine)
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert len(before) > 20 and before.keys() == after.keys()
    good = [running.train_step(batches(2, rank, accumulation)) for running in (engine, twin)]
    ends = [everything(running) for running in (engine, twin)]
    # Only the number of steps done may differ, on which nothing depends here.
    others = [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]
    return {
        "finite": finite, "applied": report.applied, "loss": report.lm_loss, "changed": changed,
        "next": [step.applied for step in good], "others": others,
        "moved": not torch.equal(ends[0]["weight norm.weight"], after["weight norm.weight"]),
    }  # fmt: skip


def all_cases(rank):
    return [one_case(rank, *case) for case in CASES]


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, all_cases, timeout=240)


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_the_step_is_skipped_on_all_ranks(results, case):
    for rank, found in enumerate(results):
        found = found[case]
        assert found["finite"] == (True, rank == 0)
        assert not found["applied"] and found["loss"] == torch.inf
        assert found["changed"] == []


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_the_next_good_step_is_that_of_a_run_that_never_saw_it(results, case):
    for found in results:
        found = found[case]
        assert found["next"] == [True, True] and found["moved"]
        assert found["others"] == []
