"""The closing table shows the figures of the summary, and the summary is made of the run's."""

import json
from types import SimpleNamespace

import pytest
import torch

from moe_async.comm import World
from moe_async.engine.evaluate import Evaluation
from moe_async.engine.summary import build_summary, format_summary
from moe_async.model.build import count_parameters
from moe_async.observe import LoadWindow
from moe_async.topology import Topology
from tests.helpers.small import small_recipe


def figures(start, end, trigram):
    return {
        "heldout_bits_per_byte_start": start, "heldout_bits_per_byte": end, "trigram_bits_per_byte": trigram
    }  # fmt: skip


SUMMARY = {
    **figures(8.0115, 2.5004, 3.25),
    "by_domain": {"plants": figures(7.9, 2.125, 3.0), "code": figures(8.1, 2.75, 3.5)},
    "tokens": 1_234_567, "step": 600, "tokens_per_second": 18_600.4,
    "params_total": 2_000_000, "params_active": 500_000, "dropped": 12_345, "skipped_steps": 0,
    "layers": [
        {"layer": 1, "max_over_mean": 1.256, "cv": 0.125, "dead": 0},
        {"layer": 3, "max_over_mean": 4.0, "cv": 2.0, "dead": 17},
    ],
}  # fmt: skip


def row(table, name):
    """The words behind a row's name."""
    (found,) = [line for line in table.splitlines() if line.strip().startswith(name)]
    return found.strip().removeprefix(name).split()


def test_the_table_by_hand():
    table = format_summary(SUMMARY)
    assert row(table, "start") == ["end", "trigram"]
    assert row(table, "held-out bits per byte") == ["8.011", "2.500", "3.250"]
    assert row(table, "plants") == ["7.900", "2.125", "3.000"] and row(table, "code") == ["8.100", "2.750", "3.500"]
    assert row(table, "tokens") == ["1,234,567", "in", "600", "steps,", "18,600", "tokens/s"]
    assert row(table, "parameters") == ["2,000,000,", "500,000", "active", "per", "token", "(25%)"]
    assert row(table, "dropped assignments") == ["12,345"]
    assert row(table, "balance of experts") == ["max/mean", "cv", "dead"]
    assert row(table, "layer 1") == ["1.26", "0.12", "0"] and row(table, "layer 3") == ["4.00", "2.00", "17"]


def test_what_is_unusual_is_shown_and_what_is_unknown_is_not():
    table = format_summary(SUMMARY | {"skipped_steps": 7, "tokens_per_second": None})
    assert row(table, "skipped steps")[0] == "7" and row(table, "tokens") == ["1,234,567", "in", "600", "steps"]
    assert "skipped" not in format_summary(SUMMARY)


def test_columns_stand_below_their_heads():
    lines = format_summary(SUMMARY).splitlines()
    for head in ("end", "trigram"):
        at = lines[0].index(head) + len(head)
        assert all(line[at - 1].isdigit() for line in lines[1:4])


def test_a_dense_model_has_no_table_of_experts():
    table = format_summary(SUMMARY | {"layers": []})
    assert (
        "balance of experts" not in table and "layer" not in table and row(table, "dropped assignments") == ["12,345"]
    )


def trainer_of(recipe, **changes):
    """The attributes of a trainer after a run of two ranks."""
    load = LoadWindow(4)
    if recipe.moe:
        load.add(4, torch.tensor([[9, 9, 9, 9]]))
        load.add(5, torch.tensor([[3, 1, 0, 0]]))
        load.add(6, torch.tensor([[1, 3, 0, 0]]))
    values = {
        "recipe": recipe, "engine": SimpleNamespace(global_step=10), "world": World(Topology(2, 2, 4)),
        "tokens": 640, "dropped": 3, "skipped": 1, "tokens_per_second": 99.5, "load": load, "saved_path": None,
        "first_evaluation": Evaluation(8.0, {"code": 8.25}), "last_evaluation": Evaluation(2.0, {"code": 2.25}),
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def test_a_summary_by_hand():
    recipe = small_recipe()
    actual = build_summary(trainer_of(recipe), (3.0, {"code": 3.25}), 61.5, None)
    total, active = count_parameters(recipe)
    assert actual == {
        "name": "small", "step": 10, "tokens": 640, **figures(8.0, 2.0, 3.0),
        "by_domain": {"code": figures(8.25, 2.25, 3.25)},
        "tokens_per_second": 99.5, "params_total": total, "params_active": active, "dropped": 3, "skipped_steps": 1,
        # The window holds (4, 4, 0, 0): mean 2, variance 4.
        "layers": [{"layer": 1, "max_over_mean": 2.0, "cv": 1.0, "dead": 2}],
        "world_size": 2, "expert_parallel": 2, "zero": 0, "precision": "float64",
        "seconds": 61.5, "first_step_seconds": None, "checkpoint": None,
    }  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"moe": None}], ids=["moe", "dense"])
def test_a_summary_is_json_and_the_table_takes_it(changes):
    recipe = small_recipe(**changes)
    summary = build_summary(trainer_of(recipe), (3.0, {"code": 3.25}), 61.5, 4.0)
    assert json.loads(json.dumps(summary)) == summary
    table = format_summary(summary)
    assert row(table, "held-out bits per byte") == ["8.000", "2.000", "3.000"]
    assert ("balance of experts" in table) == bool(recipe.moe)


def test_an_empty_window_shows_no_balance():
    summary = build_summary(trainer_of(small_recipe(), load=LoadWindow(99)), (3.0, {"code": 3.25}), 1.0, None)
    assert summary["layers"] == [] and "balance of experts" not in format_summary(summary)
