"""Every recipe that ships loads, launches on its ranks and resolves to its golden text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from moe_async.recipe import Recipe, deepspeed_config, dump_recipe, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("**/*.yaml"))
GOLDEN = ROOT / "tests" / "golden"

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def test_recipes_are_found() -> None:
    assert len(RECIPES) >= 1
    assert ROOT / "recipes" / "quickstart.yaml" in RECIPES
    assert len({path.stem for path in RECIPES}) == len(RECIPES), "golden files are named by stem"


@each_recipe
def test_a_recipe_resolves_to_its_golden_text(path: Path, update_golden: bool) -> None:
    golden = GOLDEN / f"{path.stem}.resolved.yaml"
    actual = dump_recipe(load_recipe(path))
    if update_golden:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(actual, encoding="utf-8")

    assert golden.exists(), "run pytest --update-golden, and read what it wrote"
    assert actual == golden.read_text(encoding="utf-8")
    assert load_recipe(golden).model_copy(update={"name": path.stem}) == load_recipe(path)


def test_every_golden_text_belongs_to_a_recipe() -> None:
    stems = {path.name.removesuffix(".resolved.yaml") for path in GOLDEN.glob("*.resolved.yaml")}

    assert stems <= {path.stem for path in RECIPES}


@each_recipe
def test_sections_come_in_the_fixed_order(path: Path) -> None:
    sections = list(yaml.safe_load(path.read_text(encoding="utf-8")))

    assert sections == [section for section in Recipe.model_fields if section in sections]


@each_recipe
def test_the_header_launches_this_recipe_on_ranks_that_fit(path: Path) -> None:
    header = path.read_text(encoding="utf-8").split("\nmodel:")[0]

    recipe = load_recipe(path)
    if recipe.sync.between is not None:
        # The ranks of each learner are the recipe's expert-parallel size.
        assert f"python -m moe_async.launch {path.relative_to(ROOT)}" in header
        assert deepspeed_config(recipe, recipe.parallel.expert)
        return

    command = re.search(r"deepspeed --num_gpus (\d+) --module moe_async\.train --recipe (\S+)", header)

    assert command is not None
    assert ROOT / command.group(2) == path
    assert deepspeed_config(recipe, int(command.group(1)))
