"""Scope `previous`: the load shares of the step before, with the probabilities of this one.

Two MoE layers, two ranks, two unequal and partly masked micro-batches each; SGD in float64 against a loop over tokens.
"""

import json

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.step import IGNORED_LABEL
from moe_async.model import build_model
from moe_async.moe.classes import expert_ids
from moe_async.topology import Topology
from tests.helpers.numerics import assert_close
from tests.helpers.reference import naive_sum, naive_switch_loss, naive_transformer
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

EXPERTS, TOP_K, VOCAB, COEFFICIENT, RATE = 4, 2, 32, 0.7, 0.3
SHAPES = [(1, 7), (2, 4), (3, 2), (2, 6)]


def micro_batch(step, index):
    """Steps have other numbers of tokens too, so that a wrong denominator shows."""
    rows, length = SHAPES[index]
    generator = torch.Generator().manual_seed(10 * step + index)
    tokens = torch.randint(0, VOCAB, (rows + step, length), generator=generator)
    live = torch.ones(tokens.shape, dtype=torch.bool)
    if index in (1, 3):
        live[-1, length // 2 :] = False
    labels = torch.where(live, (tokens * 3 + 1) % VOCAB, IGNORED_LABEL)
    return MicroBatch(tokens, labels, None if live.all() else live)


def recipe_of(scope, expert_parallel=1):
    return small_recipe(
        moe={
            **SMALL["moe"], "layers": "all",
            "balance": [{"loss": "switch", "coefficient": COEFFICIENT, "scope": scope}],
        },
        parallel={"expert": expert_parallel, "zero": 0},
        optim={"kind": "sgd", "lr": RATE, "weight_decay": 0.0, "clip": 0.0, "schedule": {"kind": "constant"}},
        train={"steps": 9, "global_batch": 8, "accumulation": 2, "precision": "float64"},
    )  # fmt: skip


def copies(engine):
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def engine_of(scope, weights=None):
    recipe, world = recipe_of(scope, 2), make_world(Topology(2, 2, EXPERTS))
    engine = initialize(build_model(recipe, world), recipe, world)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.copy_(parameter if weights is None else weights[name])
    return engine


def steps_of(rank, step):
    return [micro_batch(step, 2 * a + rank) for a in range(2)]


def train(rank):
    """Two steps by each scope, and the second one again by engines that were told what went before, and not."""
    results, ids, states = {}, {}, {"forgetful": json.dumps({"previous": None})}
    for scope in ("previous", "micro_batch"):
        engine = engine_of(scope)
        ids = expert_ids(engine.module)
        assert engine.balance.state_dict() == {"previous": None}
        for step in range(2):
            report = engine.train_step(steps_of(rank, step))
            results[scope, step] = report.balance["switch"], copies(engine)
            if (scope, step) == ("previous", 0):
                states["resumed"] = json.dumps(engine.balance.state_dict(), allow_nan=False)
    for name, state in states.items():
        other = engine_of("previous", results["previous", 0][1])
        other.balance.load_state_dict(json.loads(state))
        report = other.train_step(steps_of(rank, 1))
        results[name, 1] = report.balance["switch"], copies(other)
    return results, ids


def naive_step(weights, step, shares=None):
    """New weights, the shares ``f`` of each layer, and the Switch loss of the whole step and of its micro-batches.

    Args:
        weights: before the step.
        step: its index.
        shares: ``f`` of each layer for the balance loss; None: each micro-batch has its own.
    """
    weights = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    batches = [micro_batch(step, index) for index in range(4)]
    labels, tokens = sum(b.label_tokens() for b in batches), sum(b.routed_tokens() for b in batches)
    objective, local, parts = 0.0, 0.0, []
    for batch in batches:
        logits, routings = naive_transformer(
            batch.tokens, weights, layers=2, heads=4, kv_heads=2, top_k=TOP_K, mask=batch.token_mask
        )
        for b, t in (batch.labels != IGNORED_LABEL).nonzero().tolist():
            objective = objective - torch.log_softmax(logits[b, t], -1)[batch.labels[b, t]] / labels
        for layer, routing in enumerate(routings):
            own = routing.tokens * naive_switch_loss(routing, TOP_K) / tokens
            local = local + own.item()
            if shares is not None:
                own = EXPERTS * sum(shares[layer][i] * routing.prob_sum[i] for i in range(EXPERTS)) / tokens
            objective = objective + COEFFICIENT * own
        parts.append(routings)
    objective.backward()
    layers = [naive_sum(list(layer)) for layer in zip(*parts, strict=True)]
    found = [[count / (TOP_K * layer.tokens) for count in layer.counts] for layer in layers]
    whole = sum(naive_switch_loss(layer, TOP_K).item() for layer in layers)
    return {name: w.detach() - RATE * w.grad for name, w in weights.items()}, found, whole, local


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, train, timeout=120)


def check(weights, ids, expected):
    for name, value in weights.items():
        assert_close(value, expected[name][list(ids.get(name, [])) or slice(None)], what=name)


def test_the_second_step_has_the_shares_of_the_first(results):
    start = {name: p.detach() for name, p in build_model(recipe_of("previous")).named_parameters()}
    first, shares, whole, local = naive_step(start, 0)
    second, _, _, _ = naive_step(first, 1, shares)
    for found, ids in results:
        value, weights = found["previous", 0]
        assert value == pytest.approx(local, rel=1e-12)
        check(weights, ids, first)
        value, weights = found["previous", 1]
        # Reported is the loss that the shares belong to, that of the step before.
        assert value == pytest.approx(whole, rel=1e-12)
        check(weights, ids, second)
    # Others would not do.
    own, _, _, _ = naive_step(first, 1)
    router = "layers.0.ffn.router.weight"
    assert (own[router] - second[router]).norm() > 1e-3 * (second[router] - first[router]).norm()


def test_the_first_step_has_the_scope_micro_batch(results):
    for found, _ in results:
        assert found["previous", 0][0] == found["micro_batch", 0][0]
        for name, weight in found["previous", 0][1].items():
            assert torch.equal(weight, found["micro_batch", 0][1][name]), name


def test_a_resumed_run_goes_on_with_equal_numbers(results):
    for found, _ in results:
        assert found["resumed", 1][0] == found["previous", 1][0]
        for name, weight in found["previous", 1][1].items():
            assert torch.equal(weight, found["resumed", 1][1][name]), name
        assert found["forgetful", 1][0] != found["previous", 1][0]
        router = "layers.0.ffn.router.weight"
        assert not torch.equal(found["forgetful", 1][1][router], found["previous", 1][1][router])
