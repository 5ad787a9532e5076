"""What a recipe will need before it runs: parameters, memory, traffic, operations, time, and which layout is best.

    python tools/plan.py recipes/models/olmoe-1b-7b.yaml --gpus 64 --gpu h100
    moe-async plan recipes/models/qwen3-30b-a3b.yaml --gpus 16 --memory 80GB --set train.accumulation=32

Nothing is started, and no accelerator is needed. Exit code 0: it fits; 1: the recipe has errors, or cannot be launched
on so many accelerators; 2: wrong usage; 3: it does not fit.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_async.errors import MoeAsyncError
from moe_async.plan.choice import Assumptions
from moe_async.plan.hardware import ACCELERATORS, accelerator, parse_bytes
from moe_async.plan.report import make_plan, plan_document, plan_lines
from moe_async.plan.speed import LINKS_REACH, PRODUCTS_REACH
from moe_async.recipe import load_recipe
from moe_async.tables import json_text

DOES_NOT_FIT = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan."""
    parsed = _parser().parse_args(arguments)
    try:
        chip = accelerator(parsed.gpu)
        given = Assumptions(
            accelerator=chip,
            memory=chip.memory if parsed.memory is None else parse_bytes(parsed.memory),
            skew=parsed.skew,
            reserve=parse_bytes(parsed.reserve, zero=True),
            products_reach=parsed.products_reach,
            links_reach=parsed.links_reach,
        )
        plan = make_plan(load_recipe(parsed.recipe, parsed.overrides), parsed.gpus, given)
    except MoeAsyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json_text(plan_document(plan)) if parsed.json else "\n".join(plan_lines(plan)))
    return 0 if plan.own.fits else DOES_NOT_FIT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="accelerators in all, over all learners")
    parser.add_argument("--gpu", default="h100", help=f"{', '.join(ACCELERATORS)} (default h100)")
    parser.add_argument("--memory", metavar="SIZE", help="that may be used of each, such as 80GB (default: all of it)")
    parser.add_argument(
        "--skew", type=_factor, default=1.5, help="load of the busiest rank's experts over the mean (default 1.5)"
    )
    parser.add_argument(
        "--reserve", default="4GB", metavar="SIZE", help="memory beside tensors: runtime, fragments (default 4GB)"
    )
    parser.add_argument(
        "--products-reach", type=_share, default=PRODUCTS_REACH, metavar="SHARE",
        help="of the peak rate, that matrix products reach (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--links-reach", type=_share, default=LINKS_REACH, metavar="SHARE",
        help="of their stated rates, that links reach (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="replace a recipe entry, such as train.accumulation=8; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object: bytes, seconds, operations")
    return parser


def _factor(text: str) -> float:
    value = _number(text)
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor, 1 (an even load) or more")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, more than 0 and at most 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


if __name__ == "__main__":
    sys.exit(main())
