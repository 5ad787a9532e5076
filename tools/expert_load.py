"""Who loads which expert: figures of each layer of a run, and the diseases of routing that they show.

    python tools/expert_load.py summary runs/quickstart-sync
    moe-async expert_load summary runs/quickstart/learner-0 --steps 100:200 --json

Layers with the most uneven loads come first. Exit code 0: healthy; 1: the record cannot be read; 2: wrong usage;
3: a disease was found.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_async.errors import LoadError
from moe_async.observe.figures import LayerFigures, LoadSummary, between, summarise
from moe_async.observe.store import read_load
from moe_async.observe.verdicts import Verdict, verdicts

DISEASED = 3
_COLUMNS = (
    "layer",
    "max/mean",
    "cv",
    "MaxVio",
    "micro",
    "effective",
    "dead",
    "starved",
    "dropped",
    "top-1",
    "drift",
    "ranks",
)


def summary(run: Path, steps: tuple[int, int] | None = None) -> tuple[LoadSummary, list[Verdict]]:
    """Figures of a run's layers and the diseases of its whole record.

    Args:
        run: its folder, or one that holds a record.
        steps: first and last step that figures are of; None: the last tenth.

    Raises:
        LoadError: there is no such record, or nothing in it.
    """
    record = read_load(run)
    found = verdicts(record)
    return summarise(record, between(record.windows, *steps) if steps else None), found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="expert_load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("summary", help="figures of each layer, and the diseases that they show")
    one.add_argument("run", type=Path, help="folder of a run, or of a record")
    one.add_argument(
        "--steps", type=_steps, metavar="FIRST:LAST", help="steps that the figures are of (default: the last tenth)"
    )
    one.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(arguments)
    try:
        figures, found = summary(parsed.run, parsed.steps)
    except LoadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    document: dict[str, Any] = {**figures.as_dict(), "verdicts": [verdict.as_dict() for verdict in found]}
    print(json.dumps(document, indent=1) if parsed.json else _table(figures, found))
    return DISEASED if found else 0


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, two steps such as 100:200")
    return int(first), int(last)


def _table(figures: LoadSummary, found: Sequence[Verdict]) -> str:
    rows = [_row(layer) for layer in figures.worst_first()]
    widths = [max(map(len, column)) + 2 for column in zip(_COLUMNS, *rows, strict=True)]
    lines = [
        f"steps {figures.first_step} to {figures.last_step} of {figures.recorded[0]} to {figures.recorded[1]} recorded",
        "",
    ]
    lines += [
        row[0].ljust(widths[0]) + "".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in (_COLUMNS, *rows)
    ]
    lines += ["", *(map(str, found) if found else ["no known disease of routing"])]
    return "\n".join(lines)


def _row(layer: LayerFigures) -> tuple[str, ...]:
    return (
        layer.layer,
        f"{layer.max_over_mean:.2f}",
        f"{layer.cv:.2f}",
        f"{layer.violation:.2f}",
        f"{layer.micro_violation:.2f}",
        f"{layer.effective_experts:.1f}/{layer.experts}",
        str(len(layer.dead)),
        str(len(layer.starved)),
        f"{layer.drop_rate:.1%}",
        f"{layer.confidence:.3f}",
        "-" if layer.drift is None else f"{layer.drift:.3f}",
        "-" if layer.step_imbalance is None else f"{layer.step_imbalance:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
