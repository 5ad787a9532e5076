"""Files, YAML, overrides, and the way back to YAML."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moe_async.recipe import BalanceTerm, Recipe, dump_recipe, load_recipe
from moe_async.recipe.yaml_text import parse_yaml
from tests.recipe.minimal import MINIMAL, error_of, load_minimal, write_recipe


def test_floats_need_neither_point_nor_sign() -> None:
    text = "[3e-4, 1e6, 1E+3, 2.5e2, .5e1, -1e-3, 1_0e1, 0.1, 1., .inf]"

    values = parse_yaml(text, "text")

    assert values == [3e-4, 1e6, 1e3, 250.0, 5.0, -1e-3, 100.0, 0.1, 1.0, float("inf")]
    assert all(isinstance(value, float) for value in values)


def test_only_floats_change_and_only_here() -> None:
    text = "[1_500_000, e4, 1e, 0x1f, yes, null, '3e-4', 1e4x]"

    assert parse_yaml(text, "text") == [1500000, "e4", "1e", 31, True, None, "3e-4", "1e4x"]
    assert yaml.safe_load("3e-4") == "3e-4"


def test_a_name_in_the_file_wins_over_the_file_name(tmp_path: Path) -> None:
    assert load_recipe(write_recipe(tmp_path, f"name: given\n{MINIMAL}")).name == "given"
    assert load_recipe(str(write_recipe(tmp_path, name="a-b_1.2.yaml"))).name == "a-b_1.2"


def test_a_missing_file_names_the_recipes_near_it_most_alike_first(tmp_path: Path) -> None:
    for name in ("tiny.yaml", "quickstart.yaml", "notes.txt"):
        write_recipe(tmp_path, name=name)

    message = error_of(tmp_path / "quikstart.yaml")

    assert f"{tmp_path / 'quikstart.yaml'} does not exist" in message
    assert message.index("quickstart.yaml") < message.index("tiny.yaml")
    assert "notes.txt" not in message


def test_a_missing_file_finds_the_recipes_folder(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    write_recipe(tmp_path / "recipes")

    assert str(tmp_path / "recipes" / "tiny.yaml") in error_of(tmp_path / "tiny.yaml")


def test_a_missing_folder_is_no_trouble(tmp_path: Path) -> None:
    assert error_of(tmp_path / "no" / "x.yaml").endswith("does not exist. Give the path of a recipe file.")


def test_a_folder_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xfa")

    assert "cannot be read as a text file" in error_of(tmp_path)
    assert "cannot be read as a text file" in error_of(binary)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model:\n  dim: [1, 2\ntrain: 3\n", ["line 3, column 6", "not valid YAML"]),
        ("model:\n\tdim: 3\n", ["line 2, column 1", "'\\t'"]),
        ("a: 1\n---\nb: 2\n", ["line 2, column 1", "another document"]),
        ("a: !!python/object:os.system {}\n", ["line 1, column 4", "could not determine a constructor"]),
        ("a: \x07\n", ["not valid YAML"]),
        ("a: 2020-13-45\n", ["not valid YAML", "month"]),
    ],
)
def test_yaml_that_does_not_parse_names_its_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write_recipe(tmp_path, text)

    message = error_of(path)

    assert message.startswith(str(path))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "line", "first"),
    [("model:\n  dim: 1\n  layers: 2\n  dim: 3\n", 4, 2), ("a: 1\nb: {x: 1, x: 2}\n", 2, 2), ("a: 1\n'a': 2\n", 2, 1)],
)
def test_a_key_given_twice_is_an_error_with_both_lines(tmp_path: Path, text: str, line: int, first: int) -> None:
    message = error_of(write_recipe(tmp_path, text))

    assert f"line {line}, column" in message
    assert "appears twice" in message
    assert f"first in line {first}; remove one" in message


def test_aliases_are_read_and_merge_keys_refused(tmp_path: Path) -> None:
    assert parse_yaml("a: &a {x: 1}\nb: *a\n", "text") == {"a": {"x": 1}, "b": {"x": 1}}
    message = error_of(write_recipe(tmp_path, "a: &a {x: 1}\nb:\n  <<: *a\n"))
    assert "line 3, column 3" in message
    assert "merge keys (<<) are not read here; write the entries out" in message


@pytest.mark.parametrize(("text", "shown"), [("- 1\n- 2\n", "[1, 2]"), ("", "null"), ("just words\n", "'just words'")])
def test_the_top_level_must_be_a_mapping(tmp_path: Path, text: str, shown: str) -> None:
    message = error_of(write_recipe(tmp_path, text))

    assert f"holds {shown}; a recipe is a mapping of sections" in message


def test_keys_must_be_text(tmp_path: Path) -> None:
    assert "model is 1; a key must be text" in error_of(
        write_recipe(tmp_path, f"{MINIMAL}sync: {{}}\n").parent / "tiny.yaml", ["model={1: 2}"]
    )


def test_overrides_set_replace_create_and_clear(tmp_path: Path) -> None:
    text = MINIMAL.replace("expert_dim: 64", "expert_dim: 64, balance: [{loss: switch, coefficient: 1}]")
    overrides = [
        "moe.top_k=1",
        "moe.balance.0.coefficient=1e-2",
        " train.seed =7",
        "optim.schedule.kind=wsd",
        "parallel={expert: 2, zero: 0}",
        "log.prompts=['a=b', c]",
        "deepspeed.zero_optimization.overlap_comm=false",
        "name=other",
        "train.seed=8",
    ]

    recipe = load_recipe(write_recipe(tmp_path, text), overrides)

    assert recipe.moe is not None
    assert (recipe.moe.top_k, recipe.moe.balance) == (1, [BalanceTerm(loss="switch", coefficient=0.01)])
    assert (recipe.train.seed, recipe.optim.schedule.kind) == (8, "wsd")
    assert (recipe.parallel.expert, recipe.parallel.zero) == (2, 0)
    assert recipe.log.prompts == ["a=b", "c"]
    assert recipe.deepspeed == {"zero_optimization": {"overlap_comm": False}}
    assert recipe.name == "other"
    assert load_minimal(tmp_path, "moe=null").moe is None
    assert load_minimal(tmp_path, "moe=null", "moe={num_experts: 2, top_k: 1, expert_dim: 8}", "moe.top_k=2").moe


def test_an_override_changes_one_entry_of_an_alias(tmp_path: Path) -> None:
    text = MINIMAL.replace("{source: builtin}", "{source: [&a {path: x}, *a]}")

    recipe = load_recipe(write_recipe(tmp_path, text), ["data.source.1.path=y"])

    assert [entry.path for entry in recipe.data.source] == ["x", "y"]


def test_a_null_section_can_be_filled_key_by_key(tmp_path: Path) -> None:
    text = MINIMAL.replace("moe: {num_experts: 8, top_k: 2, expert_dim: 64}", "moe: null")

    recipe = load_recipe(write_recipe(tmp_path, text), ["moe.num_experts=4", "moe.top_k=1", "moe.expert_dim=8"])

    assert recipe.moe is not None and recipe.moe.num_experts == 4


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("moe.top_k", ["'moe.top_k'", "path=value", "moe.top_k=1"]),
        ("=3", ["'=3'", "path=value"]),
        ("moe..top_k=3", ["'moe..top_k=3'", "path=value"]),
        ("train.seed=", ["no value", "train.seed=null"]),
        ("train.seed=[1", ["the value '[1'", "not valid YAML"]),
        ("train.seed.x=1", ["train.seed is 3", "no entries inside", "Set train.seed as a whole"]),
        ("moe.balance.1.loss=z", ["moe.balance is a list of 1 entries", "'1' names none", "from 0 to 0"]),
        ("moe.balance.first.loss=z", ["'first' names none"]),
        ("log.prompts.0=x", ["log.prompts is a list of 0 entries", "log.prompts=[...]"]),
    ],
)
def test_a_malformed_override_is_quoted_with_the_repair(tmp_path: Path, override: str, parts: list[str]) -> None:
    text = MINIMAL.replace("expert_dim: 64", "expert_dim: 64, balance: [{loss: z, coefficient: 1}]")
    path = write_recipe(tmp_path, text.replace("steps: 100", "steps: 100, seed: 3") + "log: {prompts: []}\n")

    message = error_of(path, [override])

    assert message.startswith("1 error in the overrides:")
    for part in parts:
        assert part in message


def test_all_malformed_overrides_come_at_once(tmp_path: Path) -> None:
    message = error_of(write_recipe(tmp_path), ["a", "train.steps=5", "b"])

    assert message.startswith("2 errors in the overrides:")
    assert "'a'" in message and "'b'" in message


def test_dump_gives_every_section_in_order_with_defaults(tmp_path: Path) -> None:
    text = dump_recipe(load_minimal(tmp_path))

    assert list(yaml.safe_load(text)) == list(Recipe.model_fields)
    assert "head_dim: 16" in text
    assert "betas: [0.9, 0.95]" in text


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["moe=null"],
        ["name='1e5'", "log.prompts=['3e-4', 'null', ' a: b', \"line\\nbreak\", 'é']"],
        ["moe.layers={every: 2, offset: 1}", "moe.balance=[{loss: z, coefficient: 1e-3}]"],
        ["moe.layers=[2, 0]", "optim.lr=1e-05", "optim.eps=1e-30", "train.steps=1_000_000"],
        ["data.source=[builtin, 'x/*.txt', {path: y.jsonl, field: text, weight: 0.5}]", "parallel.zero=2"],
        ["deepspeed={steps_per_print: 100, zero_optimization: {overlap_comm: true, reduce_bucket_size: 5e7}}"],
    ],
)
def test_a_dumped_recipe_loads_back_equal(tmp_path: Path, overrides: list[str]) -> None:
    recipe = load_minimal(tmp_path, *overrides)

    text = dump_recipe(recipe)
    again = load_recipe(write_recipe(tmp_path, text, "recipe.yaml"))

    assert again == recipe
    assert dump_recipe(again) == text
