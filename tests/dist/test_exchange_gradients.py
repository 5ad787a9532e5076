"""Learners that send gradients: real processes over gloo and a real syncer, whose optimizer is the only one."""

from __future__ import annotations

import json

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.schedule import learning_rate
from moe_async.engine.start import initialize
from moe_async.engine.sync_plan import outer_schedule
from moe_async.model import build_model
from moe_async.model.keys import exchanged_tensors
from moe_async.moe.classes import classify
from moe_async.recipe import dump_recipe, parse_recipe
from moe_async.sync.event_log import interleave, read_entries
from moe_async.sync.replay import Replay
from moe_async.sync.timing import Link, Links, StepTimes
from moe_async.sync.virtual_clock import VirtualRun
from moe_async.topology import Topology
from tests.helpers.learner_run import PlainLearner, batches, dense_hash, merged, run_learners, several
from tests.helpers.spawn import run_ranks

SAME = {"policy": "same"}
PLAIN_MOE = {"layers": [1], "num_experts": 4, "top_k": 2, "expert_dim": 6}
COSINE = {"kind": "cosine", "warmup": 2, "final": 0.1}
SGD = {"kind": "sgd", "lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "clip": 0.0, "schedule": COSINE}
ADAMW = {"kind": "adamw", "lr": 0.02, "weight_decay": 0.1, "clip": 0.0, "schedule": COSINE}


def recipe_for(policy, optim, **changes):
    between = {"dense": policy, "expert": SAME, "router": SAME}
    return several(between, **{"moe": PLAIN_MOE, "optim": optim, "train__steps": 6, **changes})


def torch_optimizer(recipe, model):
    """torch's own, with a group for each tensor: vectors do not decay, and experts have a rate of their own."""
    classes, optim, groups = classify(model), recipe.optim, []
    for name, parameter in model.named_parameters():
        vector = parameter.ndim <= (2 if classes[name] == "expert" else 1)
        scale = optim.expert.lr_scale if classes[name] == "expert" else 1.0
        groups.append({
            "params": [parameter], "scale": scale, "weight_decay": 0.0 if vector else optim.weight_decay,
        })  # fmt: skip
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


def one_process(recipe):
    """A plain loop over one model: the mean of what the learners' batches give, and torch's optimizer."""
    model, steps = build_model(recipe), recipe.train.steps
    optimizer = torch_optimizer(recipe, model)
    for step in range(1, steps + 1):
        for learner in range(2):
            parts = batches(recipe, learner, 0, 1, step)
            for batch in parts:
                logits = model(batch.tokens).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
                (loss / len(parts) / 2).backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe.optim, step - 1, steps) * group["scale"]
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    return exchanged_tensors(model)


def watch(engine, exchange, rank):
    """Before each step: the dense weights, the rate that is reported, and tensors that the learner's optimizer keeps."""
    keeps = sum(len(state) for state in engine.bridge._base_optimizer.state.values())
    return dense_hash(engine, exchange, rank), engine.learning_rate, keeps


@pytest.mark.parametrize(("optim", "ranks"), [(SGD, 1), (SGD, 2), (ADAMW, 2)], ids=["sgd-1", "sgd-2", "adamw-2"])
def test_bsp_equals_a_plain_loop_with_the_mean_gradient(tmp_path, optim, ranks):
    """Momentum, decay of matrices alone, a rate of the experts' own and a schedule, on 1 and 2 ranks a learner."""
    optim = {**optim, "expert": {"lr_scale": 0.5}}
    recipe = recipe_for({"policy": "bsp"}, optim, parallel={"expert": ranks, "zero": 0})
    syncer, results = run_learners(recipe, tmp_path, ranks=ranks, watch=watch)
    wanted = one_process(recipe_for({"policy": "bsp"}, optim, train__accumulation=ranks))
    start = exchanged_tensors(build_model(recipe))
    for learner in results:
        assert all(rank["seen"] == learner[0]["seen"] and rank["steps"] == 6 for rank in learner)
        _, rates, keeps = zip(*learner[0]["seen"], strict=True)
        assert rates == pytest.approx([learning_rate(recipe.optim, step, 6) for step in range(6)]) and not any(keeps)
        for name, tensor in merged(learner).items():
            assert (tensor - start[name]).abs().max() > 1e-3, name
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-12, msg=name)
    assert syncer.server.merger.syncer.pending() == set()


def one_step(rank, text):
    """Under DeepSpeed: the weights before and after a step, what it contributes, its norm, and the steps counted."""
    recipe = parse_recipe(text, "test")
    world = make_world(Topology(1, 1, recipe.moe.num_experts))
    engine = initialize(build_model(recipe, world), recipe, world)
    before = {name: tensor.clone() for name, tensor in exchanged_tensors(engine.module).items()}
    report = engine.train_step(batches(recipe, 0, 0, 1, 1))
    after = {name: tensor.clone() for name, tensor in exchanged_tensors(engine.module).items()}
    return before, after, engine.bridge.kept.release(), report.grad_norm, engine.global_step


def test_a_learner_moves_nothing_itself_and_clips_by_its_own_norm():
    recipe = recipe_for({"policy": "asp"}, {**ADAMW, "clip": 0.1}, parallel={"expert": 1, "zero": 0})
    ((before, after, contribution, norm, steps),) = run_ranks(1, one_step, dump_recipe(recipe))
    assert steps == 1 and before.keys() == after.keys() == contribution.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    plain = PlainLearner(recipe, 0)
    plain.step(1, 0.0)
    assert norm == pytest.approx(float(torch.cat([g.flatten() for g in plain.gradients.values()]).norm())) and norm > 0.1
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(contribution[name], gradient * 0.1 / (norm + 1e-6), rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("policy", "optim"),
    [({"policy": "m_sync", "count": 1}, SGD), ({"policy": "ssp", "bound": 1}, ADAMW)],
    ids=["m_sync", "ssp"],
)
def test_every_gradient_is_merged_or_discarded_once(tmp_path, policy, optim):
    """And the ranks of a learner never differ, whatever they take when."""
    recipe = recipe_for(policy, optim, train__steps=8, parallel={"expert": 2, "zero": 0})
    syncer, results = run_learners(recipe, tmp_path, ranks=2, watch=dense_hash, paces=(0.01, 0.06))
    entries = list(read_entries(tmp_path / "run" / "events.jsonl"))
    merges = [tuple(update.values()) for entry in entries if entry["event"] == "merge" for update in entry["updates"]]
    discards = [tuple(entry["update"].values()) for entry in entries if entry["event"] == "discard"]
    sent = [
        tuple(entry["header"]["id"].values())
        for learner in (0, 1)
        for entry in read_entries(tmp_path / "run" / f"learner-{learner}" / "events.jsonl")
        if entry["event"] == "send"
    ]
    assert sorted(merges + discards) == sorted(sent) and len(set(sent)) == len(sent)
    assert bool(discards) == (policy["policy"] == "m_sync")
    for learner in results:
        assert learner[0]["seen"] == learner[1]["seen"] and learner[0]["outbox"] == 0
    first, second = (merged(learner) for learner in results)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    if policy["policy"] == "ssp":
        steps = [learner[0]["steps"] for learner in results]
        assert abs(steps[0] - steps[1]) <= 2


@pytest.mark.slow
def test_a_paced_asp_run_equals_the_virtual_clock_and_replays(tmp_path):
    """Steps that sleep to deadlines far apart: the same merges in the same order, and the same weights."""
    paces, steps = (1.2, 1.9), 5
    recipe = recipe_for({"policy": "asp", "discount": 0.5}, SGD, train__steps=steps)
    syncer, results = run_learners(recipe, tmp_path, paces=paces)
    groups, schedule = syncer.server.run.groups, outer_schedule(recipe)

    def make_model(learner, life, clock):
        return PlainLearner(recipe, learner)

    run = VirtualRun(
        groups,
        make_model,
        2,
        until_progress=steps,
        times=StepTimes(given={learner: [pace] for learner, pace in enumerate(paces)}),
        links=Links(up=Link(latency=0.01), down=Link(latency=0.01)),
        schedule=schedule,
        flush=True,
    )
    run.run()

    def merges(entries):
        kept = ("version", "updates", "weights", "progress", "portion")
        return json.loads(json.dumps([[entry[name] for name in kept] for entry in entries if entry["event"] == "merge"]))

    folder = tmp_path / "run"
    assert merges(read_entries(folder / "events.jsonl")) == merges(run.log.entries)
    logs = [list(read_entries(folder / f"learner-{learner}" / "events.jsonl")) for learner in (0, 1)]
    entries = interleave(read_entries(folder / "events.jsonl"), logs)
    replay = Replay(groups, make_model, entries, schedule)
    for number, shared in run.merger.values.items():
        real = syncer.server.merger.values[number].value_X
        torch.testing.assert_close(real, shared.value_X, rtol=0, atol=1e-12, msg=f"virtual fragment {number}")
        again = replay.shared[number].value_X
        torch.testing.assert_close(real, again, rtol=0, atol=1e-12, msg=f"replayed fragment {number}")
    lags = [lag for entry in entries if entry["event"] == "merge" for _, lag, _ in entry["staleness"]]
    assert max(lags) > 0


def test_selection_biases_follow_the_mean_of_the_moves(tmp_path):
    """Each learner's bias moves by its own load; the shared one by the mean of that, from step to step."""
    router = {"kind": "sigmoid_bias", "update": {"rule": "proportional", "rate": 0.05}}
    recipe = recipe_for({"policy": "bsp"}, SGD, moe={**PLAIN_MOE, "router": router})
    _, results = run_learners(recipe, tmp_path)
    model = build_model(recipe)
    optimizer = torch_optimizer(recipe, model)
    (router,) = [layer for layer in model.modules() if getattr(layer, "bias_state", None) is not None]
    for step in range(1, 7):
        before, moves = router.selection_bias.clone(), []
        for learner in range(2):
            (batch,) = batches(recipe, learner, 0, 1, step)
            output = model(batch.tokens)
            loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch.labels.flatten())
            (loss / 2).backward()
            router.update_bias(output.routing[0].total().counts_E, step)
            moves.append(router.selection_bias - before)
            router.selection_bias.copy_(before)
        assert not torch.equal(*moves)
        router.selection_bias.copy_(before + (moves[0] + moves[1]) / 2)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe.optim, step - 1, 6)
        optimizer.step()
        optimizer.zero_grad()
    wanted = exchanged_tensors(model)
    for learner in results:
        for name, tensor in merged(learner).items():
            tolerance = 1e-6 if tensor.dtype == torch.float32 else 1e-12
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=tolerance, msg=name)
