"""Curves of runs as one PNG: loss, tokens per second, balance of the experts, staleness of learners' updates.

    python tools/plot.py runs/quickstart-sync -o quickstart.png
    moe-async plot runs/a runs/b --json

A run of several learners gives a curve for each of them. Prints the last figures of each curve, or with --json all
points. Exit code 0: done; 1: a run cannot be read, or matplotlib is missing; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moe_async.errors import MoeAsyncError
from moe_async.observe.figures import segments
from moe_async.observe.store import read_load
from moe_async.sync.event_log import read_entries

_PIECES = 200
"""Pieces of a run over which the balance is shown, at most."""
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Okabe and Ito's, which people with colour blindness tell apart."""


@dataclass(frozen=True)
class Points:
    """A curve.

    Attributes:
        x: steps.
        y: what is shown.
    """

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, x: float, y: float | None) -> None:
        """One more point; none where it is not known."""
        if y is not None:
            self.x.append(x)
            self.y.append(y)


@dataclass(frozen=True)
class Curves:
    """What is shown of one run, or of one learner of it.

    Attributes:
        name: of the run or learner.
        loss: language-model loss in nats per token by step.
        heldout: held-out bits per byte by step.
        tokens_per_second: over all its ranks, by step.
        balance: MaxVio of the worst layer, mean over the steps of a piece; by last step of the piece.
        version_lag: versions that a fragment gained while an update was under way, by the number of the merge.
    """

    name: str
    loss: Points = field(default_factory=Points)
    heldout: Points = field(default_factory=Points)
    tokens_per_second: Points = field(default_factory=Points)
    balance: Points = field(default_factory=Points)
    version_lag: Points = field(default_factory=Points)


PANELS = {
    "loss": "loss, nats per token",
    "heldout": "held-out bits per byte",
    "tokens_per_second": "tokens per second",
    "balance": "MaxVio of the worst layer",
    "version_lag": "version lag of merged updates",
}


def read_curves(run: Path) -> list[Curves]:
    """The curves of a run, one set for each learner.

    Raises:
        MoeAsyncError: there is no run, or its files are damaged.
    """
    learners = sorted(run.glob("learner-*/metrics.jsonl"), key=lambda path: _number(path.parent.name))
    if not learners and not (run / "metrics.jsonl").is_file():
        raise MoeAsyncError(
            f"{run} holds no metrics.jsonl, nor learner-*/metrics.jsonl; give the folder of a run, such as runs/NAME."
        )
    name = run.resolve().name
    if not learners:
        return [_of_folder(run, name)]
    found = [_of_folder(path.parent, f"{name}/{path.parent.name}") for path in learners]
    by_number = {_number(path.parent.name): curves for path, curves in zip(learners, found, strict=True)}
    if (run / "events.jsonl").is_file():
        _add_staleness(run / "events.jsonl", by_number)
    return found


def _number(learner: str) -> int:
    digits = learner.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def _of_folder(folder: Path, name: str) -> Curves:
    curves = Curves(name)
    for line in read_entries(folder / "metrics.jsonl"):
        step = line.get("step", 0)
        curves.loss.add(step, line.get("lm_loss"))
        curves.heldout.add(step, line.get("heldout_bits_per_byte"))
        curves.tokens_per_second.add(step, line.get("tokens_per_second"))
    if (folder / "expert_load" / "meta.json").is_file():
        record = read_load(folder)
        if record.meta.layers and len(record.windows):
            pieces = segments(record.windows, _PIECES)
            worst = (pieces["violation"] / pieces["steps"][:, None]).max(axis=1)
            for step, value in zip(pieces["last_step"].tolist(), worst.tolist(), strict=True):
                curves.balance.add(step, value)
    return curves


def _add_staleness(path: Path, learners: Mapping[int, Curves]) -> None:
    # The three kinds of a merge are clock gap, version lag and drift.
    for number, event in enumerate(line for line in read_entries(path) if line.get("event") == "merge"):
        for update, staleness in zip(event["updates"], event["staleness"], strict=True):
            if update["learner"] in learners:
                learners[update["learner"]].version_lag.add(number + 1, staleness[1])


def draw(runs: Sequence[Curves], path: Path) -> None:
    """One panel for each kind of figure that some run has.

    Raises:
        MoeAsyncError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MoeAsyncError(
            "plot needs matplotlib, which is not installed. Run pip install 'moe_async[tools]', or "
            "pip install -e '.[tools]' in the project's folder; or use --json."
        ) from error
    shown = {name: label for name, label in PANELS.items() if any(getattr(run, name).x for run in runs)}
    figure = Figure(figsize=(5 * len(shown), 4), layout="constrained")
    axes = figure.subplots(1, max(len(shown), 1), squeeze=False)[0]
    for axis, (name, label) in zip(axes, shown.items(), strict=False):
        for place, run in enumerate(runs):
            points: Points = getattr(run, name)
            style = "-" if place < len(_COLOURS) else "--"
            marker = "o" if len(points.x) < 20 else None
            colour = _COLOURS[place % len(_COLOURS)]
            axis.plot(points.x, points.y, style, marker=marker, markersize=3, color=colour, label=run.name)
        axis.set(xlabel="merge" if name == "version_lag" else "step", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, and print the last figures."""
    parser = argparse.ArgumentParser(
        prog="plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--output", type=Path, default=Path("curves.png"), help="PNG file (default curves.png)")
    parser.add_argument("--json", action="store_true", help="print all points as one JSON object; draw nothing")
    parsed = parser.parse_args(arguments)
    try:
        curves = [found for run in parsed.runs for found in read_curves(run)]
        if parsed.json:
            print(json.dumps([asdict(run) for run in curves]))
            return 0
        draw(curves, parsed.output)
    except (MoeAsyncError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(_table(curves))
    print(f"\nwrote {parsed.output}")
    return 0


def _table(curves: Sequence[Curves]) -> str:
    width = max(len("run"), *(len(run.name) for run in curves)) + 2
    lines = ["run".ljust(width) + "".join(name.rjust(len(name) + 3) for name in PANELS)]
    for run in curves:
        last = [(name, getattr(run, name).y[-1:]) for name in PANELS]
        cells = [(f"{value[0]:.4g}" if value else "-").rjust(len(name) + 3) for name, value in last]
        lines.append(run.name.ljust(width) + "".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
