"""`sync.inside: {delay: D}`: dense gradients are applied D steps late, those of experts at once.

A delay of 0 is compared bit for bit with the blocking reduction, longer ones with a queue over a loop over tokens in
one process, in float64.
"""

import math
from collections import deque

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.step import IGNORED_LABEL, next_token_loss_sum
from moe_async.errors import EngineError
from moe_async.model import build_model
from moe_async.moe.classes import expert_ids
from moe_async.topology import Topology
from tests.helpers.numerics import assert_close
from tests.helpers.reference import naive_sum, naive_switch_loss, naive_transformer, naive_z_loss
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

STEPS, ROWS, LENGTH, VOCAB, IMPOSSIBLE = 5, 2, 6, 32, 31
CLIP, DECAY, RATE, WARMUP, SWITCH, Z = 0.3, 0.2, 0.02, 2, 0.5, 0.1
OPTIMIZERS = {
    "adamw": {"kind": "adamw", "betas": [0.7, 0.8], "eps": 1e-3},
    "momentum": {"kind": "sgd", "momentum": 0.9},
}
BAD_STEP = 2
"""Of the runs with a bad step; 0 is the first."""


def recipe_of(kind, inside, expert=2, accumulation=2, precision="float64", recompute="none", **changes):
    return small_recipe(
        **{
            "moe": {
                **SMALL["moe"],
                "balance": [
                    {"loss": "switch", "coefficient": SWITCH, "scope": "step"}, {"loss": "z", "coefficient": Z},
                ],
            },
            "parallel": {"expert": expert, "zero": 0},
            "sync": {"inside": inside},
            "optim": {
                **OPTIMIZERS[kind], "lr": RATE, "weight_decay": DECAY, "clip": CLIP, "router": {"lr_scale": 2.0},
                "schedule": {"kind": "cosine", "warmup": WARMUP},
            },
            "train": {
                "steps": STEPS, "global_batch": 16, "accumulation": accumulation, "precision": precision,
                "recompute": recompute,
            },
            **changes,
        }
    )  # fmt: skip


def micro_batch(step, index, bad=False):
    """Unequal numbers of labels and of live tokens. A bad one has a label whose score is minus infinity."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    live = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    if index == 1:
        live[1, 3:] = False
    labels = torch.where(live, (tokens * 5 + 1) % IMPOSSIBLE, IGNORED_LABEL)
    if bad:
        labels[0, 2] = IMPOSSIBLE
    return MicroBatch(tokens, labels, None if live.all() else live)


def forbid(module, inputs, output):
    """The loss is infinite where the label is the impossible one, and no gradient is."""
    never = torch.arange(VOCAB) == IMPOSSIBLE
    return output._replace(logits=torch.where(never, -torch.inf, output.logits))


def engine_of(recipe, world_size, spoilt=False):
    world = make_world(Topology(world_size, recipe.parallel.expert, 4))
    model = build_model(recipe, world)
    if spoilt:
        model.register_forward_hook(forbid)
    return initialize(model, recipe, world)


def batches(step, rank, world_size, accumulation, spoilt=False):
    """Of one rank; in a run with a bad step, the last rank has the bad micro-batch."""
    bad = spoilt and step == BAD_STEP and rank == world_size - 1
    return [micro_batch(step, a * world_size + rank, bad and a == 0) for a in range(accumulation)]


def copies(engine):
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def train(rank, world_size, recipe, spoilt=False):
    """All steps, then the drain: what each reported and the weights after each."""
    engine = engine_of(recipe, world_size, spoilt)
    reports, weights = [], []
    for step in range(STEPS):
        reports.append(engine.train_step(batches(step, rank, world_size, recipe.train.accumulation, spoilt)))
        weights.append(copies(engine))
    drained = engine.drain()
    weights.append(copies(engine))
    assert engine.drain() == [] and engine.global_step == STEPS
    # What was applied is not added to what comes next.
    assert all(p.grad is None or not p.grad.any() for p in engine.module.parameters())
    return {
        "norms": [step.grad_norm for step in (*reports, *drained)], "weights": weights, "reports": reports,
        "left out": [step.left_out for step in (*reports, *drained)], "drained": len(drained),
        "applied": [step.applied for step in (*reports, *drained)], "experts": expert_ids(engine.module),
        "updates": engine.bridge.optimizer_steps(),
    }  # fmt: skip


BITS = [
    (kind, precision, spoilt)
    for kind in OPTIMIZERS
    for precision in ("float32", "float64")
    for spoilt in (False, True)
]  # fmt: skip


def both_ways(rank, world_size):
    return [
        [
            train(rank, world_size, recipe_of(kind, inside, precision=precision), spoilt)
            for inside in ("blocking", {"delay": 0})
        ]
        for kind, precision, spoilt in BITS
    ]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_delay_of_0_is_the_blocking_reduction_bit_for_bit(world_size):
    for by_case in run_ranks(world_size, both_ways, world_size, timeout=240):
        for (_, _, spoilt), (blocking, delayed) in zip(BITS, by_case, strict=True):
            assert delayed["drained"] == 0
            assert blocking["applied"] == [not spoilt or step != BAD_STEP for step in range(STEPS)]
            for key in ("applied", "left out", "updates"):
                assert blocking[key] == delayed[key]
            assert torch.equal(*(torch.tensor(found["norms"]).nan_to_num(-1.0) for found in (blocking, delayed)))
            for step, (wanted, actual) in enumerate(zip(blocking["weights"], delayed["weights"], strict=True)):
                for name, value in wanted.items():
                    assert torch.equal(value, actual[name]), (step, name)


def rate_of(step):
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / (STEPS - 1 - WARMUP)
    return RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


class Queue:
    """The same training written out: a loop over tokens, and a queue of dense gradients.

    Args:
        kind: of optimizer.
        delay: steps.
        bad: the step that has an infinite loss, if any.
    """

    def __init__(self, kind, delay, bad=None):
        self.kind, self.delay, self.bad = kind, delay, bad
        model = build_model(recipe_of(kind, "blocking", expert=1))
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.updates = dict.fromkeys(self.weights, 0)
        self.norms, self.history, queue = [], [], deque()
        for step in range(STEPS):
            gradients = self.gradients(step)
            experts = {name: g for name, g in gradients.items() if "experts" in name}
            queue.append({name: g for name, g in gradients.items() if "experts" not in name})
            self.apply(experts | (queue.popleft() if len(queue) > delay else {}), rate_of(step))
        while queue:
            self.apply(queue.popleft(), rate_of(STEPS - 1))

    def gradients(self, step):
        """Of one step; none when its loss is infinite, which is to drop them as soon as they are due."""
        if step == self.bad:
            return {}
        weights = {name: w.detach().clone().requires_grad_() for name, w in self.weights.items()}
        found = [micro_batch(step, index) for index in range(4)]
        labels, routed = sum(b.label_tokens() for b in found), sum(b.routed_tokens() for b in found)
        loss, routings = 0.0, []
        for batch in found:
            logits, layers = naive_transformer(
                batch.tokens, weights, layers=2, heads=4, kv_heads=2, top_k=2, mask=batch.token_mask
            )
            if self.bad is not None:
                logits = torch.where(torch.arange(VOCAB) == IMPOSSIBLE, -torch.inf, logits)
            for b, t in (batch.labels != IGNORED_LABEL).nonzero().tolist():
                loss = loss - torch.log_softmax(logits[b, t], -1)[batch.labels[b, t]] / labels
            loss = loss + Z * layers[0].tokens / routed * naive_z_loss(layers[0])
            routings.append(layers[0])
        (loss + SWITCH * naive_switch_loss(naive_sum(routings), 2)).backward()
        return {name: w.grad for name, w in weights.items()}

    def apply(self, gradients, rate):
        """One step of the optimizer over the parameters that have a gradient."""
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        scale = min(1.0, CLIP / (norm + 1e-6))
        for name, gradient in gradients.items():
            w, g = self.weights[name], scale * gradient
            decay = DECAY if w.ndim > 1 else 0.0
            own = rate * (2.0 if "router" in name else 1.0)
            self.updates[name] += 1
            if self.kind == "adamw":
                self.first[name] = 0.7 * self.first[name] + 0.3 * g
                self.second[name] = 0.8 * self.second[name] + 0.2 * g * g
                mean = self.first[name] / (1 - 0.7 ** self.updates[name])
                square = self.second[name] / (1 - 0.8 ** self.updates[name])
                self.weights[name] = w * (1 - own * decay) - own * mean / (square.sqrt() + 1e-3)
            else:
                self.first[name] = 0.9 * self.first[name] + g + decay * w
                self.weights[name] = w - own * self.first[name]
        self.norms.append(norm)
        self.history.append(dict(self.weights))


# Optimizer, delay, bad step, ranks of an expert group, recomputation.
CASES = [
    ("adamw", 1, False, 2, "none"), ("adamw", 2, False, 1, "block"), ("momentum", 1, False, 1, "none"),
    ("momentum", 2, False, 2, "reentrant"), ("adamw", 1, True, 2, "none"), ("momentum", 2, True, 2, "none"),
    ("adamw", 9, False, 2, "none"),
]  # fmt: skip


def all_cases(rank, world_size):
    return [
        train(rank, world_size, recipe_of(kind, {"delay": delay}, expert, 4 // world_size, "float64", again), spoilt)
        for kind, delay, spoilt, expert, again in CASES
    ]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_delays_equal_a_queue(world_size):
    by_rank = run_ranks(world_size, all_cases, world_size, timeout=240)
    for index, (kind, delay, spoilt, _, _) in enumerate(CASES):
        expected = Queue(kind, delay, BAD_STEP if spoilt else None)
        for found in (results[index] for results in by_rank):
            assert found["drained"] == min(delay, STEPS)
            # Steps come first, then what is drained; where nothing is dropped, both have as many entries.
            history = [*expected.history[:STEPS], expected.history[-1]]
            for step, (actual, wanted) in enumerate(zip(found["weights"], history, strict=True)):
                for name, value in actual.items():
                    ids = list(found["experts"].get(name, [])) or slice(None)
                    assert_close(value, wanted[name][ids], what=f"{kind} delay {delay} step {step} {name}")
            norms = [norm for norm, wanted in zip(found["norms"], expected.norms, strict=True) if wanted]
            assert norms == pytest.approx([norm for norm in expected.norms if norm], rel=1e-11)
            assert max(norms) > CLIP
            if kind == "adamw":
                dense, expert = (expected.updates[name] for name in ("embedding.weight", "layers.1.ffn.experts.w_in"))
                assert found["updates"] == {"dense": dense, "expert": expert}


def test_a_delay_changes_the_weights():
    ends = [Queue("adamw", delay).history[-1] for delay in (0, 1, 2)]
    for late in ends[1:]:
        for name in ("embedding.weight", "layers.1.ffn.router.weight"):
            assert (late[name] - ends[0][name]).abs().max() > 1e-4


def outcomes_with_a_bad_step(rank):
    results = {}
    for delay in (1, 2):
        recipe = recipe_of(
            "adamw", {"delay": delay},
            moe={
                **SMALL["moe"], "router": {"kind": "sigmoid_bias", "update": {"rate": 0.05}},
                "balance": [{"loss": "switch", "coefficient": 0.01, "scope": "previous"}],
            },
        )  # fmt: skip
        engine, story = engine_of(recipe, 2, spoilt=True), []
        for step in range(STEPS):
            biases = {name: b.clone() for name, b in engine.module.named_buffers() if name.endswith("bias")}
            previous = engine.balance.previous
            report = engine.train_step(batches(step, rank, 2, 2, spoilt=True))
            moved = any(not torch.equal(b, dict(engine.module.named_buffers())[name]) for name, b in biases.items())
            assert biases and moved == (engine.balance.previous is not previous)
            story.append((report.applied, report.left_out, moved, math.isfinite(report.grad_norm)))
        results[delay] = story
    return results


def test_a_bad_loss_drops_its_own_gradients_alone():
    fine = (True, (), True, True)
    for results in run_ranks(2, outcomes_with_a_bad_step):
        for delay, story in results.items():
            expected = [fine] * STEPS
            # Its counts are not believed either, nor are its experts applied; its dense gradients come later.
            expected[BAD_STEP] = (True, ("expert",), False, True)
            expected[BAD_STEP + delay] = (True, ("dense",), True, True)
            assert story == expected


class Late:
    """A reducer whose sums are there only when the test says that the step has come for which they are due."""

    def __init__(self, plain, delay):
        self.plain, self.delay, self.step, self.waits = plain, delay, 0, []

    def __call__(self, tensors):
        return LateReduction(self, [tensor.clone() for tensor in tensors])


class LateReduction:
    def __init__(self, late, tensors):
        self.late, self.tensors, self.started = late, tensors, late.step

    def wait(self):
        if self.late.step < self.started + self.late.delay:
            raise AssertionError(f"step {self.late.step} waits for step {self.started}")
        self.late.waits.append((self.started, self.late.step))
        return self.late.plain(self.tensors).wait()


def with_a_late_reducer(rank, delay):
    recipe = recipe_of("adamw", {"delay": delay})
    engine, twin = engine_of(recipe, 2), engine_of(recipe, 2)
    late = Late(engine.bridge.delayed.start_reduction, delay)
    engine.bridge.delayed.start_reduction = late
    for step in range(STEPS):
        late.step = step
        for running in (engine, twin):
            running.train_step(batches(step, rank, 2, 2))
    before = list(late.waits)
    late.step = STEPS - 1 + delay
    engine.drain(), twin.drain()
    ends = [copies(running) for running in (engine, twin)]
    return before, late.waits[len(before) :], [n for n, value in ends[0].items() if not torch.equal(value, ends[1][n])]


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_step_is_first_waited_for_when_it_is_due(delay):
    for before, drained, different in run_ranks(2, with_a_late_reducer, delay):
        assert before == [(step, step + delay) for step in range(STEPS - delay)]
        assert [started for started, _ in drained] == list(range(STEPS - delay, STEPS))
        assert different == []


def a_loop_of_ones_own(rank):
    """The three calls with the objective of `train_step`, and the calls that are refused."""
    recipe = recipe_of("momentum", {"delay": 1}, moe={**SMALL["moe"], "balance": []})
    engine, twin = engine_of(recipe, 2), engine_of(recipe, 2)
    for step in range(STEPS):
        mine = batches(step, rank, 2, 2)
        twin.train_step(mine)
        labels = sum(b.label_tokens() for r in range(2) for b in batches(step, r, 2, 2))
        for batch in mine:
            output = engine(batch.tokens, batch.token_mask)
            engine.backward(4 * next_token_loss_sum(output.logits, batch.targets()) / labels)
            if batch is mine[0]:
                with pytest.raises(EngineError, match=r"drain was called in the middle of a step; .* step\(\)"):
                    engine.drain()
            outcome = engine.step()
        assert outcome.applied and outcome.left_out == ()
    assert [len(running.drain()) for running in (engine, twin)] == [1, 1]
    for zero in (1, 2):
        blocking = small_recipe(parallel={"expert": 2, "zero": zero}, train=SMALL["train"] | {"precision": "float32"})
        with pytest.raises(EngineError, match=rf"a delay of 1 steps was asked for at ZeRO {zero}.*parallel\.zero=0"):
            engine.bridge.__class__(
                build_model(blocking, engine.world), blocking.optim, {"zero_optimization": {"stage": zero}},
                engine.world, 1,
            )  # fmt: skip
    return copies(engine), copies(twin)


def test_a_loop_of_ones_own_has_the_same_numbers():
    for own, wanted in run_ranks(2, a_loop_of_ones_own):
        for name, value in own.items():
            assert_close(value, wanted[name], what=name)
