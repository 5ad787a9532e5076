"""Simulated learners against plain training, and the simulator's figures against arithmetic by hand."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from moe_async import build_model
from moe_async.data import load_corpus, make_tokenizer
from moe_async.engine.simulate import Machine, Simulation
from moe_async.engine.simulated import SimulatedLearner
from moe_async.model.keys import exchange_keys, exchanged_tensors
from moe_async.sync.fragments import cut
from moe_async.sync.timing import Link, Links, StepTimes, Transient
from tests.helpers.small import SMALL, small_recipe

TOKENS = 16


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i}: {i * i % 977} {chr(97 + i % 26) * 9}\n" for i in range(2000)))
    return str(path)


def recipe_of(text, policy, learners=2, steps=4, batch=2, optim=None, router=None):
    between = {"dense": policy, "router": {"policy": "same"}, "expert": {"policy": "same"}}
    return small_recipe(
        model={**SMALL["model"], "vocab_size": None},
        moe={**SMALL["moe"], "balance": [], **({"router": router} if router else {})},
        sync={"learners": learners, "between": between},
        optim={**SMALL["optim"], "lr": 0.05, **(optim or {})},
        data={"source": [{"path": text, "document_bytes": 1000}], "seq_len": 8, "heldout": 0.2, "heldout_bytes": 500},
        train={"steps": steps, "global_batch": batch, "precision": "float64"},
    )


def corpus_of(recipe):
    return load_corpus(recipe.data, make_tokenizer(recipe.data.tokenizer))


def stub(text, policy, machine, seconds, learners=4, steps=20):
    outcome = Simulation(recipe_of(text, policy, learners, steps), machine).run(seconds)
    return outcome.at_time, outcome.at_tokens


# The learners train as learners do


def final_values(recipe, corpus):
    simulation = Simulation(recipe, Machine(), corpus)
    run = simulation._start(recipe.train.steps, 1.0, watched=False)
    run.run()
    fragments = {fragment.number: fragment for group in run.groups for fragment in group.fragments}
    return {
        name: part
        for number, shared in run.merger.values.items()
        for name, part in fragments[number].split(shared.value_X).items()
    }


@pytest.mark.parametrize(
    ("optim", "batch"),
    [
        ({"momentum": 0.9, "weight_decay": 0.1}, 16),
        ({"expert": {"lr_scale": 0.5, "weight_decay": 0.3}, "weight_decay": 0.1}, 16),
        ({"kind": "adamw", "weight_decay": 0.1, "router": {"lr_scale": 0.5}}, 16),
        # One window of eight tokens, so that some experts get none; they decay all the same.
        ({"momentum": 0.9, "weight_decay": 0.1}, 1),
    ],
)
def test_bsp_is_one_learner_with_the_batches_of_all(text, optim, batch):
    # Warm-up shows that the syncer's rate is that of the step.
    optim = {**optim, "schedule": {"kind": "cosine", "warmup": 2}}
    together = recipe_of(text, {"policy": "bsp"}, learners=2, batch=batch, optim=optim)
    alone = recipe_of(text, {"policy": "bsp"}, learners=2, batch=2 * batch, optim=optim)
    corpus = corpus_of(together)
    keys = [key for keys in exchange_keys(build_model(alone), 4).values() for key in keys]
    learner = SimulatedLearner(alone, corpus, cut(keys, 1), 0, 1)
    for number in range(1, 5):
        learner.step(number, number - 1.0)
    expected = dict(zip([key.name for key in cut(keys, 1)[0].keys], learner.read(0).split([
        key.elements for key in cut(keys, 1)[0].keys
    ]), strict=True))  # fmt: skip
    values = final_values(together, corpus)
    assert values.keys() == expected.keys()
    start = exchanged_tensors(build_model(alone))
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
    assert any((value - start[name].reshape(-1)).abs().max() > 1e-3 for name, value in values.items())


def test_learners_read_the_windows_of_one_sequence(text):
    # With a rate of 0 weights stay, so the losses of two learners average to that of one with the batches of both.
    recipe, whole = (recipe_of(text, {"policy": "bsp"}, batch=batch, optim={"lr": 1e-12}) for batch in (4, 8))
    corpus = corpus_of(recipe)
    fragments = cut([key for keys in exchange_keys(build_model(recipe), 4).values() for key in keys], 1)
    pair = [SimulatedLearner(recipe, corpus, fragments, learner, 2) for learner in range(2)]
    one = SimulatedLearner(whole, corpus, fragments, 0, 1)
    for number in range(1, 4):
        losses = [learner.step(number, number - 1.0).loss for learner in pair]
        assert one.step(number, number - 1.0).loss == pytest.approx(sum(losses) / 2, rel=1e-9)
    late = SimulatedLearner(recipe, corpus, fragments, 1, 2, clock=2)
    assert late.step(3, 2.0).loss == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize(
    "policy", [{"policy": "diloco", "every": 2}, {"policy": "decoupled", "every": 2}, {"policy": "asp"}]
)
def test_a_run_learns_and_follows_from_its_arguments(text, policy):
    recipe = recipe_of(text, policy, steps=12, batch=4, optim={"lr": 0.1})
    machine = Machine(StepTimes(1.0, {0: 3.0}, jitter=0.1), Links(Link(latency=0.1), Link(latency=0.2)))
    corpus = corpus_of(recipe)
    first, second = (Simulation(recipe, machine, corpus, points=3).run(5.0) for _ in range(2))
    assert first == second
    assert first.at_tokens.loss < first.course[0][2] - 0.1
    shares = [tokens / first.at_tokens.tokens for _, tokens, _ in first.course]
    assert shares == pytest.approx([0, 1 / 3, 2 / 3, 1], abs=0.08)


def test_equal_tokens_are_equal_and_all_merged(text):
    for policy in ({"policy": "local_sgd", "every": 3}, {"policy": "decoupled", "every": 3}, {"policy": "asp"}):
        _, end = stub(text, policy, Machine(StepTimes(1.0, {0: 2.5})), 10.0, steps=40)
        assert end.steps == pytest.approx(40, abs=1), policy
        assert end.tokens == round(end.steps * 4) * TOKENS
        merged = end.goodput * end.seconds * (3 + 1 / 2.5)
        assert merged == pytest.approx(end.steps * 4), policy


# Times by hand


def test_bsp_is_as_fast_as_the_slowest(text):
    at_time, end = stub(text, {"policy": "bsp"}, Machine(StepTimes(1.0, {0: 5.0})), 20.0)
    assert (end.seconds, end.tokens) == (100.0, 4 * 20 * TOKENS)
    assert end.tokens_per_second == pytest.approx(4 * TOKENS / 5)
    assert end.utilisation == pytest.approx((1 + 3 / 5) / 4)
    assert end.goodput == pytest.approx(4 / 5 / (3 + 1 / 5))
    # After 20 s the last barrier has just let everybody go.
    assert (at_time.seconds, at_time.steps, at_time.discards) == (20.0, 4.0, 0)
    assert at_time.staleness["version_lag"] == {"median": 0, "p95": 0, "max": 0}


def test_a_run_that_ended_before_the_time_goes_on(text):
    at_time, end = stub(text, {"policy": "decoupled", "every": 2}, Machine(), 50.0)
    assert (end.seconds, end.steps) == (20.0, 20.0)
    assert (at_time.seconds, at_time.steps) == (50.0, 50.0)


def test_asp_never_waits_and_m_sync_drops(text):
    machine = Machine(StepTimes(1.0, {0: 5.0}))
    at_time, _ = stub(text, {"policy": "asp"}, machine, 20.0)
    assert at_time.utilisation == at_time.goodput == 1.0
    assert at_time.staleness["version_lag"]["max"] == 15
    at_time, _ = stub(text, {"policy": "m_sync", "count": 3}, machine, 20.0)
    assert at_time.utilisation == 1.0 and at_time.discards == 4
    assert at_time.goodput == pytest.approx(60 / 64)


def test_links_carry_what_the_model_weighs(text):
    policy = {"policy": "local_sgd", "every": 5}
    recipe = recipe_of(text, policy, 4, 20)
    model = build_model(recipe)
    size = 8 * sum(parameter.numel() for parameter in model.parameters())
    links = Links(Link(bandwidth=size / 2), Link(bandwidth=size), header_bytes=0)
    for corpus in (None, corpus_of(recipe)):
        end = Simulation(recipe, Machine(links=links), corpus).run(5.0).at_tokens
        assert end.down == pytest.approx(4 * size), "everybody gets every merge"
        assert end.up <= 4 * size and (corpus is not None or end.up == 4 * size)
        # Two seconds up, one down, four times.
        assert corpus is not None or end.seconds == pytest.approx(20 + 4 * 2 + 4 * 1)


def test_failures_cost_a_barrier_more_than_those_who_never_wait(text):
    machine = Machine(failure_rate=1 / 100, downtime=20.0, noticed=5.0, seed=1)
    barrier, _ = stub(text, {"policy": "diloco", "every": 5}, machine, 400.0, steps=400)
    free, _ = stub(text, {"policy": "decoupled", "every": 5}, machine, 400.0, steps=400)
    assert barrier.goodput < free.goodput - 0.05
    assert free.utilisation == pytest.approx(100 / 120, abs=0.06)
    assert free.lost > 0 and math.isclose(free.seconds, 400.0)


def test_transient_stragglers_are_no_part_of_the_undisturbed_pace(text):
    machine = Machine(StepTimes(1.0, transient=Transient(0.5, 3.0), given={0: [1.0, 3.0]}))
    assert machine.pace(0) == 0.5 and machine.pace(1) == 1.0
    at_time, _ = stub(text, {"policy": "asp"}, machine, 300.0, steps=300)
    assert at_time.utilisation > 0.98
    assert at_time.goodput < 0.75


# The syncer's optimizer


def test_muon_is_refused_under_gradients(text):
    with pytest.raises(ValidationError, match=r"optim.kind is muon but sync.between.dense.policy is asp"):
        recipe_of(text, {"policy": "asp"}, optim={"kind": "muon"})


def test_selection_biases_move_by_the_mean_of_what_the_learners_would_move_them(text):
    """One step: each learner's own bias, after the same step under a policy of deltas, is its move."""
    router = {"kind": "sigmoid_bias", "update": {"rule": "proportional", "rate": 0.1}}
    recipe = recipe_of(text, {"policy": "bsp"}, steps=1, router=router)
    corpus = corpus_of(recipe)
    fragments = cut([key for keys in exchange_keys(build_model(recipe), 4).values() for key in keys], 1)
    moved = []
    for learner in range(2):
        model = SimulatedLearner(recipe, corpus, fragments, learner, 2)
        model.step(1, 0.0)
        moved.append(fragments[0].split(model.read(0)))
    values = final_values(recipe, corpus)
    (name,) = [name for name in values if name.endswith("selection_bias")]
    assert not torch.equal(moved[0][name], moved[1][name])
    torch.testing.assert_close(values[name], (moved[0][name] + moved[1][name]) / 2, rtol=0, atol=1e-7)


def test_a_learner_that_sends_gradients_moves_nothing_itself(text):
    router = {"kind": "sigmoid_bias"}
    recipe = recipe_of(text, {"policy": "asp"}, router=router, optim={"weight_decay": 0.3, "kind": "adamw"})
    corpus = corpus_of(recipe)
    fragments = cut([key for keys in exchange_keys(build_model(recipe), 4).values() for key in keys], 1)
    model = SimulatedLearner(recipe, corpus, fragments, 0, 2, sends_gradients=True)
    before = model.read(0)
    model.step(1, 0.0)
    assert torch.equal(model.read(0), before) and model.gradient(0).count_nonzero() > 0
