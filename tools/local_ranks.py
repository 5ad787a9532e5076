"""How many ranks to start on this machine for a recipe, and the overrides they need: one line for the launcher.

python tools/local_ranks.py recipes/quickstart-sync.yaml     prints "2", or "1 --set parallel.expert=1"
python tools/local_ranks.py --command recipes/quickstart.yaml    prints the whole command that starts the run
deepspeed --num_gpus $(python tools/local_ranks.py RECIPE) --module moe_async.train --recipe RECIPE
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from moe_async.engine.deepspeed_bridge import accelerator_count
from moe_async.errors import MoeAsyncError, RecipeError
from moe_async.recipe import Recipe, load_recipe

CPU_RANKS = 2


def fitting_ranks(recipe_path: str, available: int) -> tuple[int, list[str]]:
    """The largest number of ranks up to ``available`` that the recipe divides over, and the overrides it takes.

    The recipe's expert-parallel size is kept where that many ranks are there, and lowered otherwise.
    """
    recipe = load_recipe(recipe_path)
    for ranks in range(available, 0, -1):
        sizes = [size for size in range(min(ranks, recipe.parallel.expert), 0, -1) if _fits(recipe_path, ranks, size)]
        if sizes:
            return ranks, [] if sizes[0] == recipe.parallel.expert else [f"parallel.expert={sizes[0]}"]
    raise RecipeError(
        f"{recipe_path} does not even fit one rank; make train.global_batch a multiple of train.accumulation."
    )


def _fits(recipe_path: str, ranks: int, expert_parallel: int) -> bool:
    try:
        recipe: Recipe = load_recipe(recipe_path, [f"parallel.expert={expert_parallel}"])
        recipe.check_world(ranks)
    except RecipeError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the line. Exit code 1 when the recipe is not valid."""
    parser = argparse.ArgumentParser(
        prog="local_ranks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="YAML file that describes the run")
    parser.add_argument("--command", action="store_true", help="print the whole command")
    parser.add_argument("--ranks", type=int, help="with --command: ranks of each learner; default: what fits here")
    parsed = parser.parse_args(arguments)
    recipe = parsed.recipe
    try:
        learners = load_recipe(recipe).sync.learners
        # DeepSpeed logs to the standard output while it looks for accelerators; that belongs to the launcher here.
        with contextlib.redirect_stdout(sys.stderr):
            available = max(accelerator_count() // learners, 1) if accelerator_count() else CPU_RANKS
        ranks, overrides = (parsed.ranks, []) if parsed.ranks else fitting_ranks(recipe, available)
    except MoeAsyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    words = [word for override in overrides for word in ("--set", override)]
    if not parsed.command:
        print(" ".join([str(ranks), *words]))
    elif learners > 1:
        print(" ".join(["python -m moe_async.launch", recipe, "--ranks", str(ranks), *words]))
    else:
        print(" ".join(["deepspeed --num_gpus", str(ranks), "--module moe_async.train --recipe", recipe, *words]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
