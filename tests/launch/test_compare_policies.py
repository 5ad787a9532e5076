"""The comparison of policies over real launches. Which one is better is not asserted: that is what it measures."""

import json

import pytest

from moe_async.errors import MoeAsyncError
from moe_async.recipe import load_recipe
from tests.helpers.texts import tiny_document, write_recipe, write_texts
from tools import compare_policies
from tools.compare_policies import Comparison, default_policies, staleness


@pytest.fixture
def recipe(tmp_path):
    document = tiny_document(write_texts(tmp_path / "texts"), tmp_path / "runs")
    document["parallel"] = {"expert": 1, "zero": 0}
    document["train"] |= {"steps": 4, "accumulation": 1}
    return str(write_recipe(tmp_path / "tiny.yaml", document))


def test_all_runs_have_the_tokens_of_all_learners(recipe):
    comparison = Comparison(recipe, ["optim.lr=0.02"], learners=3, ranks=2)
    entries = {policy: comparison.entries(policy, 1) for policy in ("diloco:every=2", "alone", "alone:delay=2")}
    several, alone, late = (load_recipe(recipe, entries[policy]) for policy in entries)
    assert (several.sync.learners, several.train.global_batch) == (3, 8)
    assert several.sync.between.dense.policy == several.sync.between.expert.policy == "diloco"
    assert (alone.sync.learners, alone.train.global_batch, alone.sync.inside) == (1, 24, "blocking")
    assert late.sync.inside.delay == 2 and late.train.global_batch == 24
    for found in (several, alone, late):
        assert found.train.steps == 4 and found.optim.lr == 0.02
        assert (found.train.seed, found.data.seed) == (load_recipe(recipe).train.seed + 1, found.data.seed)


def test_what_is_wrong_is_said_before_the_first_run(recipe, capsys):
    comparison = Comparison(recipe, [], learners=2, ranks=1)
    for policy, message in (
        ("alone:late=1", "'alone:late=1' is unknown; one learner is alone or alone:delay=1"),
        ("diloco", "sync.between.dense.every is missing"),
        ("m_sync:count=3", "sync.between.dense.count is 3 but sync.learners is 2"),
    ):
        with pytest.raises(MoeAsyncError, match=message):
            comparison.entries(policy, 0)
    assert compare_policies.main([recipe, "--policy", "alone", "--policy", "none"]) == 1
    assert "alone, seed 0" not in (text := capsys.readouterr().err) and "error: " in text
    assert default_policies(4, 300) == [
        "decoupled:every=15", "diloco:every=15", "m_sync:count=3", "bsp", "alone", "alone:delay=1",
    ]  # fmt: skip


def test_the_place_of_a_run_is_the_mean_of_what_was_printed():
    text = "[learner 0] step 3/9  loss\n[learner 1] step 1/9 loss\n[learner 0] step 4/9 loss\nlearner 2 is here\n"
    assert compare_policies._mean_steps(text, 4) == 5 / 4


def test_staleness_is_the_largest_of_all_learners():
    rows = [{"median": 0, "p95": 2, "max": 2}, {"median": 1, "p95": 1, "max": 5}, None]
    learners = {str(n): {"staleness": {"version_lag": row}} for n, row in enumerate(rows)}
    assert staleness({"learners": learners}, "version_lag") == "1/2/5"
    assert staleness({"learners": learners}, "data_age") == staleness({}, "version_lag") == "-"


@pytest.mark.slow
def test_runs_and_their_figures(recipe, capsys):
    options = ["--policy", "decoupled:every=2", "--policy", "alone:delay=1", "--json"]
    assert compare_policies.main([recipe, *options]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["decoupled:every=2", "alone:delay=1"]
    # Learners that wait for nobody may have begun a step when the last one of the run is made.
    assert found["alone:delay=1"][0]["tokens"] == 4 * 16 * 16
    assert 4 * 16 * 16 <= found["decoupled:every=2"][0]["tokens"] <= 5 * 16 * 16
    for runs in found.values():
        assert runs[0]["heldout_bits_per_byte"] > 0
