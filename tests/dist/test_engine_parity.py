"""Training gives the same numbers at every expert-parallel size, ZeRO stage and cut into micro-batches.

Plain SGD throughout: Adam divides a wrong scale of a gradient away.
"""

import math

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.deepspeed_bridge import deepspeed_expert_groups
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.step import IGNORED_LABEL
from moe_async.model import build_model
from moe_async.moe.classes import expert_ids
from moe_async.topology import Topology
from tests.helpers.numerics import assert_close
from tests.helpers.reference import naive_sum, naive_switch_loss, naive_transformer, naive_z_loss
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

STEPS, ROWS, LENGTH, VOCAB = 3, 2, 6, 32
STAGES = [(0, "float64"), (0, "float32"), (1, "float32"), (2, "float32")]


def micro_batch(step, index):
    """Unequal numbers of labels and of live tokens, one micro-batch without any."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = (tokens * 5 + 1) % VOCAB
    live = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    if index == 1:
        live[1, 3:] = False
    if index == 2:
        live[:] = False
    return MicroBatch(tokens, torch.where(live, labels, IGNORED_LABEL), None if live.all() else live)


def copies(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(
    rank,
    world_size,
    expert_parallel,
    stage,
    precision,
    accumulation,
    clip,
    recompute,
    scope="micro_batch",
    loads="auto",
):
    """Three steps over the same four micro-batches a step, however they are dealt to ranks."""
    recipe = small_recipe(
        moe={
            **SMALL["moe"],
            "step_loads": loads,
            "balance": [{"loss": "switch", "coefficient": 0.5, "scope": scope}, {"loss": "z", "coefficient": 0.1}],
        },
        parallel={"expert": expert_parallel, "zero": stage},
        train={
            "steps": 10, "global_batch": 4 * ROWS, "accumulation": accumulation,
            "precision": precision, "recompute": recompute,
        },
        optim={"kind": "sgd", "lr": 0.1, "weight_decay": 0.0, "clip": clip, "schedule": {"kind": "constant"}},
    )  # fmt: skip
    world = make_world(Topology(world_size, expert_parallel, 4))
    engine = initialize(build_model(recipe, world), recipe, world)
    weights, reports = [copies(engine.module)], []
    for step in range(STEPS):
        mine = [micro_batch(step, a * world_size + rank) for a in range(accumulation)]
        reports.append(engine.train_step(mine))
        weights.append(copies(engine.module))
    return {"weights": weights, "reports": reports, "experts": expert_ids(engine.module)}


def reference(clip, scope="micro_batch"):
    """The same steps in one process, in float64."""
    recipe = small_recipe()
    weights = {name: p.detach().clone() for name, p in build_model(recipe).named_parameters()}
    history, losses, norms = [weights], [], []
    for step in range(STEPS):
        weights = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        batches = [micro_batch(step, index) for index in range(4)]
        labels = sum(batch.label_tokens() for batch in batches)
        routed = sum(batch.routed_tokens() for batch in batches)
        lm, switch, z, step_routings = 0.0, 0.0, 0.0, []
        for batch in batches:
            logits, routings = naive_transformer(
                batch.tokens, weights, layers=2, heads=4, kv_heads=2, top_k=2, mask=batch.token_mask
            )
            for b, t in (batch.labels != IGNORED_LABEL).nonzero().tolist():
                lm = lm - torch.log_softmax(logits[b, t], -1)[batch.labels[b, t]] / labels
            share = routings[0].tokens / routed
            switch = switch + share * naive_switch_loss(routings[0], 2)
            z = z + share * naive_z_loss(routings[0])
            step_routings.append(routings[0])
        if scope == "step":
            switch = naive_switch_loss(naive_sum(step_routings), 2)
        (lm + 0.5 * switch + 0.1 * z).backward()
        norm = math.sqrt(sum(w.grad.square().sum().item() for w in weights.values()))
        # The 1e-6 is that of torch and DeepSpeed.
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        losses.append((lm.item(), switch.item(), z.item()))
        norms.append(norm)
        weights = {name: (w - 0.1 * scale * w.grad).detach() for name, w in weights.items()}
        history.append(weights)
    return history, losses, norms


def check(results, expected, dtype):
    history, losses, norms = expected
    for result in results:
        for step, (report, (lm, switch, z)) in enumerate(zip(result["reports"], losses, strict=True)):
            close = {"rel": 1e-11 if dtype == torch.float64 else 2e-5}
            assert report.lm_loss == pytest.approx(lm, **close)
            assert report.balance == pytest.approx({"switch": switch, "z": z}, **close)
            assert report.grad_norm == pytest.approx(norms[step], **close)
            assert report.applied and report.counts_LE.sum() == 2 * report.routed_tokens
        for actual, wanted in zip(result["weights"], history, strict=True):
            for name, value in actual.items():
                ids = list(result["experts"].get(name, [])) or slice(None)
                assert_close(value, wanted[name][ids], dtype, name)


def every_size_and_stage(rank, world_size, clip):
    results = {}
    for expert_parallel in (size for size in (1, 2, 4) if size <= world_size):
        for stage, precision in STAGES:
            key = (expert_parallel, stage, precision)
            results[key] = train(rank, world_size, *key, 4 // world_size, clip, "none")
            if expert_parallel > 1:
                own = Topology(world_size, expert_parallel, 4)
                groups = deepspeed_expert_groups(expert_parallel)
                assert groups == (list(own.expert_group(rank)), list(own.expert_data_group(rank)))
    return results


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("clip", [0.0, 0.3], ids=["unclipped", "clipped"])
def test_expert_parallel_sizes_and_zero_stages_equal_the_reference(world_size, clip):
    by_rank = run_ranks(world_size, every_size_and_stage, world_size, clip, timeout=240)
    expected = reference(clip)
    assert all(norm > clip for norm in expected[2])
    for key in by_rank[0]:
        dtype = torch.float64 if key[2] == "float64" else torch.float32
        check([results[key] for results in by_rank], expected, dtype)


def one_rank(rank, recompute):
    return [train(rank, 1, 1, stage, precision, 4, 0.3, recompute) for stage, precision in STAGES]


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_one_rank_with_four_micro_batches_equals_the_reference(recompute):
    expected = reference(0.3)
    for (_, precision), result in zip(STAGES, run_ranks(1, one_rank, recompute)[0], strict=True):
        check([result], expected, torch.float64 if precision == "float64" else torch.float32)


def recomputed(rank, world_size):
    return train(rank, world_size, 2, 0, "float64", 4 // world_size, 0.3, "block")


def test_recomputation_with_expert_parallelism_equals_the_reference():
    check(run_ranks(2, recomputed, 2), reference(0.3), torch.float64)


STEP_CASES = [
    (2, 0, "float64", "none", "count"), (2, 0, "float64", "block", "keep"), (1, 0, "float64", "none", "keep"),
    (2, 1, "float32", "none", "count"), (2, 1, "float32", "none", "keep"), (2, 2, "float32", "block", "count"),
    (2, 2, "float32", "reentrant", "keep"),
]  # fmt: skip


def step_scope(rank, world_size):
    return [
        train(rank, world_size, expert, stage, precision, 4 // world_size, 0.3, recompute, "step", loads)
        for expert, stage, precision, recompute, loads in STEP_CASES
        if expert <= world_size
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_scope_step_is_exactly_the_loss_of_one_large_batch(world_size):
    expected = reference(0.3, "step")
    by_rank = run_ranks(world_size, step_scope, world_size)
    cases = [case for case in STEP_CASES if case[0] <= world_size]
    for index, (_, _, precision, _, _) in enumerate(cases):
        check(
            [results[index] for results in by_rank],
            expected,
            torch.float64 if precision == "float64" else torch.float32,
        )
    # The two scopes are different losses, so the check can fail.
    assert abs(expected[1][0][1] - reference(0.3)[1][0][1]) > 1e-2


OPTIMIZERS = {
    "adamw": {"kind": "adamw", "betas": [0.7, 0.8], "eps": 1e-3},
    "momentum": {"kind": "sgd", "momentum": 0.9},
}
LONG, DECAY, CLIP = 6, 0.3, 0.5
CLASSES = {
    "dense": {"lr_scale": 1.5},
    "router": {"lr_scale": 0.25, "weight_decay": 0.0},
    "expert": {"lr_scale": 2.0, "weight_decay": 0.6},
}


def scheduled(kind, expert_parallel, stage, precision, accumulation):
    """Two MoE layers, a warm-up and a cosine, decay and clipping."""
    return small_recipe(
        moe={**SMALL["moe"], "layers": "all", "balance": [{"loss": "z", "coefficient": 0.1}]},
        parallel={"expert": expert_parallel, "zero": stage},
        optim={
            **OPTIMIZERS[kind], **CLASSES, "lr": 0.01, "weight_decay": DECAY, "clip": CLIP,
            "schedule": {"kind": "cosine", "warmup": 2, "final": 0.1},
        },
        train={"steps": LONG, "global_batch": 8, "precision": precision, "accumulation": accumulation},
    )  # fmt: skip


def optimize(rank, cases):
    results = []
    for kind, expert_parallel, stage, precision in cases:
        recipe = scheduled(kind, expert_parallel, stage, precision, 2)
        world = make_world(Topology(2, expert_parallel, 4))
        engine = initialize(build_model(recipe, world), recipe, world)
        for step in range(LONG):
            engine.train_step([micro_batch(step, 2 * a + rank) for a in range(2)])
        results.append((copies(engine.module), expert_ids(engine.module)))
    return results


def naive_optimizer(kind):
    """The same steps written out; the learning rate too."""
    weights = {name: p.detach() for name, p in build_model(scheduled(kind, 1, 0, "float64", 4)).named_parameters()}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(LONG):
        weights = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        batches = [micro_batch(step, index) for index in range(4)]
        labels, routed = sum(b.label_tokens() for b in batches), sum(b.routed_tokens() for b in batches)
        loss = 0.0
        for batch in batches:
            logits, routings = naive_transformer(
                batch.tokens, weights, layers=2, heads=4, kv_heads=2, top_k=2, mask=batch.token_mask
            )
            for b, t in (batch.labels != IGNORED_LABEL).nonzero().tolist():
                loss = loss - torch.log_softmax(logits[b, t], -1)[batch.labels[b, t]] / labels
            loss = loss + 0.1 * sum(routing.z_sum for routing in routings) / routed
        loss.backward()
        norm = math.sqrt(sum(w.grad.square().sum().item() for w in weights.values()))
        scale = min(1.0, CLIP / (norm + 1e-6))
        done = (step - 2) / (LONG - 1 - 2)
        rate = 0.01 * (step + 1) / 3 if step < 2 else 0.01 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
        plain = rate
        for name, w in weights.items():
            own = CLASSES["router" if "router" in name else "expert" if "experts" in name else "dense"]
            rate = plain * own["lr_scale"]
            g, decay = scale * w.grad, own.get("weight_decay", DECAY) if w.ndim > 1 else 0.0
            if kind == "adamw":
                first[name] = 0.7 * first[name] + 0.3 * g
                second[name] = 0.8 * second[name] + 0.2 * g * g
                mean, square = first[name] / (1 - 0.7 ** (step + 1)), second[name] / (1 - 0.8 ** (step + 1))
                weights[name] = (w * (1 - rate * decay) - rate * mean / (square.sqrt() + 1e-3)).detach()
            else:
                first[name] = 0.9 * first[name] + g + decay * w.detach()
                weights[name] = (w - rate * first[name]).detach()
    return weights


def test_optimizers_schedule_decay_and_clipping_equal_the_formulas():
    cases = [
        (kind, expert, stage, precision)
        for kind in OPTIMIZERS
        for expert, stage, precision in [(1, 0, "float64"), (2, 0, "float64"), (2, 1, "float32"), (2, 2, "float32")]
    ]
    expected = {kind: naive_optimizer(kind) for kind in OPTIMIZERS}
    for results in run_ranks(2, optimize, cases):
        for (kind, _, _, precision), (weights, experts) in zip(cases, results, strict=True):
            for name, value in weights.items():
                ids = list(experts.get(name, [])) or slice(None)
                dtype = torch.float64 if precision == "float64" else torch.float32
                assert_close(value, expected[kind][name][ids], dtype, f"{kind} {precision} {name}")
