"""What is said of a recipe's entries, and what recipes have there."""

import pytest

from moe_async.errors import RecipeError
from moe_async.recipe import Recipe, load_recipe
from moe_async.recipe.explain import entries, explain, values_of
from moe_async.recipe.messages import models_in


def one(path):
    (found,) = explain(path)
    return found


def test_meaning_range_and_default():
    rate = one("moe.router.update.rate")
    assert rate.path == "moe.router.update.rate" and rate.form == ""
    assert (rate.meaning, rate.value, rate.default) == ("Size of an update.", "number, 0 or more", "0.001")
    assert one("moe.top_k").default is None and one("moe.top_k").value == "whole number, 1 or more"
    assert one("moe.expert_dropout").value == "number, 0 or more, less than 1"
    assert one("moe.expert").value == "swiglu, gelu, relu2 or swiglu_clamped"
    assert one("moe.device_groups").value == "whole number or null, 2 or more"


def test_entries_below():
    balance = one("moe.balance")
    assert balance.value == "list of mapping" and balance.default == "none"
    assert balance.entries["coefficient"].endswith("(number, 0 or more; required)")
    assert list(balance.entries) == ["loss", "coefficient", "scope"]
    assert one("moe.balance.0.coefficient") == one("moe.balance.coefficient")


def test_forms_that_differ_are_told_apart():
    kinds = {found.form: found for found in explain("moe.router.kind")}
    assert {"kind: topk", "kind: sigmoid_bias", "kind: hash"} <= set(kinds)
    assert "topk or " in one("moe.router").entries["kind"]
    lr = {found.default for found in explain("sync.between.dense.lr")}
    assert len(lr) >= 1 and None not in lr


def every_path(model=Recipe, path="", depth=0):
    for name, field in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        yield here
        if depth < 4:
            for below in models_in(field.annotation):
                yield from every_path(below, here, depth + 1)


def test_every_entry_of_the_schema_can_be_explained():
    paths = sorted(set(every_path()))
    assert len(paths) > 100 and "sync.between.dense.then.every" in paths
    for path in paths:
        for found in explain(path):
            assert found.value and (found.meaning or found.entries), path
            assert found.default != "", path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "a recipe has no entry 'nothing'. The entries are: name, model, moe"),
        ("moe.balanc", "moe has no entry 'balanc'. Did you mean moe.balance?"),
        ("moe.top_k.more", "moe.top_k has no entries below it. Ask for moe.top_k itself"),
    ],
)
def test_unknown_entries(path, message):
    with pytest.raises(RecipeError, match=message.replace(".", r"\.").replace("?", r"\?")):
        explain(path)


def test_values_of_a_recipe():
    recipe = load_recipe("recipes/models/olmoe-1b-7b.yaml")
    assert values_of(recipe, "moe.top_k") == [8]
    assert values_of(recipe, "moe.balance.coefficient") == [0.01, 0.001]
    assert values_of(recipe, "moe.balance.1.coefficient") == [0.001]
    assert values_of(recipe, "moe.capacity.factor") == []


def test_entries_of_a_recipe_are_all_of_it():
    recipe = load_recipe("recipes/quickstart.yaml")
    flat = entries(recipe)
    assert flat["sync.between.dense.policy"] == "decoupled" and flat["data.source.0.builtin"] == "python"
    assert flat["moe.balance.0.loss"] == "switch" and flat["deepspeed"] == {}
    assert all(values_of(recipe, path) == [value] for path, value in flat.items())
