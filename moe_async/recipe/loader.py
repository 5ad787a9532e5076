"""Reads a recipe file, applies overrides and reports everything that is wrong with it at once."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moe_async.errors import RecipeError
from moe_async.recipe.messages import describe_errors, shown
from moe_async.recipe.schema import Recipe
from moe_async.recipe.yaml_text import dump_yaml, parse_yaml


def load_recipe(path: str | PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Gives the recipe in a YAML file.

    Args:
        path: the file; its name without the ending becomes the recipe's name where the file gives none.
        overrides: entries such as `moe.top_k=1`, applied in order. The part before the first `=` is a dotted path,
            in which a number counts a list's entries from 0; the part after it is read as YAML.

    Raises:
        RecipeError: if the file cannot be read, or its entries are not valid; lists every error.
    """
    return parse_recipe(_read(Path(path)), str(path), overrides)


def parse_recipe(text: str, source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Gives the recipe in YAML text; `source` is named in errors. Otherwise as `load_recipe`."""
    data = parse_yaml(text, source)
    if not isinstance(data, dict):
        raise RecipeError(
            f"{source} holds {shown(data)}; a recipe is a mapping of sections. Begin with a line such as `model:`."
        )
    _apply_overrides(data, overrides)
    if data.get("name") is None:
        data["name"] = Path(source).stem
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(_listed(source, describe_errors(error, Recipe, data))) from error


def dump_recipe(recipe: Recipe) -> str:
    """Gives a recipe as YAML with every default written out, in the order of its sections.

    The text loads back to an equal recipe.
    """
    data = recipe.model_dump(mode="json")
    return "\n".join(dump_yaml({section: content}) for section, content in data.items())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = _recipes_near(path)
        repair = f"Recipes near there: {', '.join(near)}." if near else "Give the path of a recipe file."
        raise RecipeError(f"{path} does not exist. {repair}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read as a text file: {error}. Give the path of a YAML file.") from error


def _recipes_near(path: Path, limit: int = 8) -> list[str]:
    """Gives the YAML files beside a missing file, and in a `recipes` folder there, the most alike first."""
    found = [*path.parent.glob("*.yaml"), *path.parent.glob("recipes/*.yaml")]
    found.sort(key=lambda file: (-difflib.SequenceMatcher(None, file.stem, path.stem).ratio(), file))
    return [str(file) for file in found[:limit]]


def _listed(source: str, problems: Sequence[str]) -> str:
    count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
    return "\n".join([f"{count} in {source}:", *(f"  - {problem}" for problem in problems)])


def _apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> None:
    problems = []
    for override in overrides:
        try:
            keys, value = _parse_override(override)
            _set(data, keys, value)
        except RecipeError as error:
            problems.append(f"{override!r}: {error}")
    if problems:
        raise RecipeError(_listed("the overrides", problems))


def _parse_override(override: str) -> tuple[list[str], Any]:
    path, equals, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise RecipeError("it is not of the form path=value. Write it like moe.top_k=1.")
    if not text.strip():
        raise RecipeError(f"it gives no value. Write {path.strip()}=null to clear the entry.")
    return keys, parse_yaml(text, f"the value {text!r}")


def _set(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Sets the entry at a path; mappings on the way that are missing, or null, are made."""
    node: Any = data
    for depth, key in enumerate(keys):
        place = ".".join(keys[:depth])
        slot: Any = key
        if isinstance(node, list):
            slot = _index(node, key, place)
        elif not isinstance(node, dict):
            raise RecipeError(f"{place} is {shown(node)}, which has no entries inside. Set {place} as a whole.")
        if depth == len(keys) - 1:
            node[slot] = value
            return
        if isinstance(node, dict) and node.get(slot) is None:
            node[slot] = {}
        # A copy, because a YAML alias makes two entries one object, of which the path names only one.
        node[slot] = copy.copy(node[slot])
        node = node[slot]


def _index(entries: list[Any], key: str, place: str) -> int:
    if key.isdecimal() and int(key) < len(entries):
        return int(key)
    allowed = f"an index from 0 to {len(entries) - 1}" if entries else f"{place}=[...], because it is empty"
    raise RecipeError(f"{place} is a list of {len(entries)} entries, so {key!r} names none. Use {allowed}.")
