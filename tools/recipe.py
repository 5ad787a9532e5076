"""Recipes before they run: check them, show all that follows from them, compare them, explain their entries.

    python tools/recipe.py check recipes/quickstart.yaml recipes/models/*.yaml
    moe-async recipe explain moe.balance
    moe-async recipe diff recipes/quickstart-sync.yaml recipes/quickstart.yaml

Exit code 0: done, and diff found no difference; 1: a recipe has errors; 2: wrong usage; 3: diff found differences.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_async.errors import RecipeError
from moe_async.recipe import Recipe, deepspeed_config, dump_recipe, load_recipe
from moe_async.recipe.explain import Explained, entries, explain, values_of
from moe_async.recipe.messages import shown
from moe_async.tables import json_text

DIFFERENT = 3
_ABSENT = "(absent)"
_MODELS = (Path("recipes/models"), Path(__file__).resolve().parent.parent / "recipes" / "models")
"""Where recipes of published models are: where the command is run, or beside the tools."""


def differences(first: Recipe, second: Recipe) -> dict[str, tuple[Any, Any]]:
    """Values of two resolved recipes by dotted path, where they differ; `_ABSENT` where one has no such entry."""
    ours, theirs = entries(first), entries(second)
    return {
        path: (ours.get(path, _ABSENT), theirs.get(path, _ABSENT))
        for path in dict.fromkeys([*ours, *theirs])
        if ours.get(path, _ABSENT) != theirs.get(path, _ABSENT)
    }


def values_of_models(path: str, recipes: Sequence[Path]) -> dict[str, list[str]]:
    """The values that recipes have at a path, each with the names of the recipes that have it."""
    found: dict[str, list[str]] = {}
    for file in recipes:
        recipe = load_recipe(file)
        value = ", ".join(dict.fromkeys(_flow(one) for one in values_of(recipe, path))) or _ABSENT
        found.setdefault(value, []).append(recipe.name or file.stem)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was asked for."""
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run_command(parsed)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recipe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="whether recipes are valid; all errors where they are not")
    check.add_argument("recipes", nargs="+", type=Path, metavar="RECIPE")
    check.set_defaults(run_command=_check)
    show = commands.add_parser("show", help="a recipe with every default, and the DeepSpeed JSON that follows from it")
    show.add_argument("recipe", type=Path, metavar="RECIPE")
    show.add_argument(
        "--ranks", type=_ranks, help="of a learner, for the DeepSpeed JSON (default: the fewest that the recipe allows)"
    )
    show.set_defaults(run_command=_show)
    diff = commands.add_parser("diff", help="entries in which two recipes differ, defaults among them")
    diff.add_argument("a", type=Path, metavar="RECIPE")
    diff.add_argument("b", type=Path, metavar="RECIPE")
    diff.set_defaults(run_command=_diff)
    meaning = commands.add_parser(
        "explain", help="meaning, range and default of an entry, and the values that published models have"
    )
    meaning.add_argument("entry", help="with dots, such as moe.balance or moe.router.update.rate")
    meaning.add_argument(
        "--recipes", type=Path, metavar="FOLDER", help="whose recipes' values are shown (default: recipes/models)"
    )
    meaning.set_defaults(run_command=_explain)
    for command in (check, show, diff):
        command.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
            help="replace a recipe entry, such as train.steps=10; may be repeated",
        )  # fmt: skip
    for command in (check, show, diff, meaning):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _check(parsed: argparse.Namespace) -> int:
    problems: dict[str, str | None] = {}
    warnings: dict[str, list[str]] = {}
    for path in parsed.recipes:
        try:
            recipe = load_recipe(path, parsed.overrides)
            problems[str(path)], warnings[str(path)] = None, list(recipe.warnings())
        except RecipeError as error:
            problems[str(path)], warnings[str(path)] = str(error), []
    if parsed.json:
        document = {
            path: {"valid": problem is None, "problem": problem, "warnings": warnings[path]}
            for path, problem in problems.items()
        }
        print(json_text(document))
    else:
        for path, problem in problems.items():
            print(f"{path}: valid" if problem is None else problem)
            for warning in warnings[path]:
                print(f"  warning: {warning}")
    return 1 if any(problems.values()) else 0


def _show(parsed: argparse.Namespace) -> int:
    recipe = load_recipe(parsed.recipe, parsed.overrides)
    ranks = parsed.ranks or _fewest_ranks(recipe)
    derived = deepspeed_config(recipe, ranks)
    if parsed.json:
        print(json_text({"recipe": recipe.model_dump(mode="json"), "ranks": ranks, "deepspeed": derived}))
        return 0
    print(dump_recipe(recipe))
    print(f"# DeepSpeed JSON on {ranks} rank{'' if ranks == 1 else 's'}:")
    print(textwrap.indent(json_text(derived, indent=2), "# "))
    return 0


def _diff(parsed: argparse.Namespace) -> int:
    found = differences(load_recipe(parsed.a, parsed.overrides), load_recipe(parsed.b, parsed.overrides))
    if parsed.json:
        print(json_text({path: {"a": a, "b": b} for path, (a, b) in found.items()}))
    elif not found:
        print("no difference")
    else:
        print(f"A: {parsed.a}\nB: {parsed.b}\n")
        width = max(map(len, found)) + 2
        for path, (a, b) in found.items():
            print(f"{path:<{width}}A: {_flow(a)}\n{'':<{width}}B: {_flow(b)}")
    return DIFFERENT if found else 0


def _explain(parsed: argparse.Namespace) -> int:
    found = explain(parsed.entry)
    folder = parsed.recipes or next((path for path in _MODELS if path.is_dir()), None)
    if parsed.recipes is not None and not parsed.recipes.is_dir():
        raise RecipeError(f"--recipes is {parsed.recipes}, which is no folder; give one that holds recipes.")
    # Those that end so are made small to run on a laptop; their values are nobody's.
    files = [] if folder is None else [path for path in sorted(folder.glob("*.yaml")) if "-small" not in path.stem]
    values = values_of_models(parsed.entry, files)
    if parsed.json:
        print(json_text({"forms": list(map(asdict, found)), "values": values}))
        return 0
    for one in found:
        print("\n".join(_lines(one)), end="\n\n")
    if not files:
        print(f"No recipes of models were found in {folder or 'recipes/models'}; name a folder with --recipes.")
        return 0
    print("Value in the recipes of published models:")
    for value, names in values.items():
        print(f"  {', '.join(names)}: {value}")
    return 0


def _lines(one: Explained) -> list[str]:
    title = f"{one.path} ({one.form})" if one.form else one.path
    lines = [title, *_wrapped(one.meaning or "(a section)")]
    lines.append(f"  value: {one.value}")
    lines.append("  required" if one.default is None else f"  default: {one.default}")
    if one.entries:
        lines.append("  entries:")
        for name, meaning in one.entries.items():
            lines += _wrapped(f"{name}: {meaning}", "    ")
    return lines


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent + "  ")


def _fewest_ranks(recipe: Recipe) -> int:
    """The expert-parallel size; the next multiple of it that divides the batch where it does not."""
    expert = recipe.parallel.expert
    for ranks in range(expert, recipe.train.global_batch + 1, expert):
        if not recipe.train.global_batch % (ranks * recipe.train.accumulation):
            return ranks
    return expert


def _flow(value: Any) -> str:
    """A value on one line, as a recipe would say it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return value if isinstance(value, str) else shown(value)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
