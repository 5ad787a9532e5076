"""Who loads which expert in a run: figures of each layer, the diseases of routing that they show, heat maps.

    python tools/expert_load.py summary runs/quickstart-sync
    moe-async expert_load heatmap runs/quickstart/learner-0 --layer "layer 0"
    moe-async expert_load profile runs/quickstart-sync --data code=src --data prose=texts/*.txt

summary shows the layers with the most uneven loads first. Exit code 0: done; 1: a record, a checkpoint or a text cannot
be read; 2: wrong usage; 3: summary or profile found a disease.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_async.errors import LoadError, MoeAsyncError
from moe_async.observe.figures import (
    LayerFigures,
    LoadSummary,
    between,
    last_part,
    refuse_empty,
    segments,
    summarise,
)
from moe_async.observe.heatmap import LEGEND, heatmap, sharing
from moe_async.observe.store import LoadRecord, read_load
from moe_async.observe.traces import read_traces
from moe_async.observe.verdicts import Verdict, verdicts
from moe_async.ops.load import relative_loads
from moe_async.tables import aligned, json_text

DISEASED = 3
HEALTHY = "no known disease of routing"
COLUMNS_HELP = (
    "max/mean and cv (coefficient of variation): loads of the experts over all these steps; MaxVio: largest load "
    "over the mean less one, of each step; micro: the same of each micro-batch; effective: exp of the loads' "
    "entropy; dead: experts without load; starved: less than a tenth of a fair share; dropped: share of the "
    "assignments; top-1: largest router probability; drift: part of the load that moved from piece to piece of "
    "these steps; ranks: load of the busiest rank over the mean, of each step."
)
PROFILE_BYTES = 30_000
"""Text of each domain that a profile takes, unless told otherwise."""
TIME_ROWS = 20
"""Pieces of a run that a heat map over time shows, at most."""
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
        run: its folder, or one that holds a record, or a file of router traces.
        steps: first and last step that figures are of; None: the last tenth.

    Raises:
        LoadError: there is no such record, or nothing in it.
    """
    record = _record(run)
    found = verdicts(record)
    return summarise(record, between(record.windows, *steps) if steps else None), found


def _record(run: Path) -> LoadRecord:
    """Of a folder, or of a file of router traces."""
    return read_traces(run) if run.is_file() else read_load(run)


def comparison(first: LoadSummary, second: LoadSummary) -> dict[str, tuple[LayerFigures | None, LayerFigures | None]]:
    """The layers of two runs side by side, by name; None where one run has no such layer."""
    ours, theirs = ({layer.layer: layer for layer in run.layers} for run in (first, second))
    return {name: (ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was asked for."""
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run_command(parsed)
    except MoeAsyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="expert_load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser(
        "summary", help="figures of each layer, and the diseases that they show", epilog=COLUMNS_HELP
    )
    shades = commands.add_parser("heatmap", help="load of each expert as a character: layers by experts, or over time")
    two = commands.add_parser("compare", help="figures of two runs side by side", epilog=COLUMNS_HELP)
    shades.add_argument("--layer", metavar="NAME", help="show this layer over all of the time instead of all layers")
    shades.add_argument("--width", type=_width, default=shutil.get_terminal_size().columns, help="characters of a line")
    for command, runs, function in (
        (one, ["run"], _summary),
        (shades, ["run"], _heatmap),
        (two, ["a", "b"], _compare),
    ):
        for run in runs:
            command.add_argument(
                run,
                type=Path,
                help="folder of a run, or of a record; or JSON Lines of router traces (see docs/tools.md)",
            )
        command.add_argument(
            "--steps",
            type=_steps,
            metavar="FIRST:LAST",
            help="steps to take (default: the last tenth; of --layer, all)",
        )
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(run_command=function)
    _add_report(commands.add_parser("report", help="one HTML page of a run: loads over time, specialisation, costs"))
    _add_profile(commands.add_parser("profile", help="what the experts of a checkpoint specialise in, over a text"))
    return parser


def _add_report(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Writes one HTML file that needs no network. For several learners, give the folder of the run."
    )
    command.add_argument("run", type=Path, help="folder of a run, or one that moe_async.record_load wrote")
    command.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="file (default report.html)")
    command.add_argument(
        "--profile", type=Path, metavar="FILE", help="what profile --json printed, for specialisation over all tokens"
    )
    command.add_argument("--json", action="store_true", help="print what the page shows as one JSON object instead")
    command.set_defaults(run_command=_report)


def _add_profile(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Runs a checkpoint over text in this process, and shows the loads of its experts as summary does, the mutual "
        "information between expert and domain, experts that serve tokens together, the tokens that each expert "
        "prefers, and how far another checkpoint routes the same tokens alike."
    )
    command.add_argument("checkpoint", type=Path, help="a checkpoint's folder, or a run's")
    command.add_argument(
        "--data", action="append", default=[], metavar="[DOMAIN=]PATH",
        help="text: a builtin domain, a file, folder or glob; may be repeated (default: the run's held-out part)",
    )  # fmt: skip
    command.add_argument(
        "--bytes",
        type=_at_least_one,
        default=PROFILE_BYTES,
        help="of text of each domain, at most (default %(default)s)",
    )
    command.add_argument("--against", type=Path, metavar="CHECKPOINT", help="another checkpoint, for routing stability")
    command.add_argument("--layer", metavar="NAME", help="show each expert of this layer")
    command.add_argument(
        "--batch-size", type=_at_least_one, default=16, help="sequences in a forward pass (default 16)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object, all layers and experts in it")
    command.set_defaults(run_command=_profile)


def _summary(parsed: argparse.Namespace) -> int:
    figures, found = summary(parsed.run, parsed.steps)
    if parsed.json:
        print(json_text({**asdict(figures), "verdicts": list(map(asdict, found))}))
    else:
        print(_table(figures, found))
    return DISEASED if found else 0


def _heatmap(parsed: argparse.Namespace) -> int:
    record = _record(parsed.run)
    refuse_empty(record)
    names, experts = record.meta.layers, record.meta.experts
    if parsed.layer is not None and parsed.layer not in names:
        raise LoadError(f"the record has no layer {parsed.layer!r}; it has {', '.join(map(repr, names))}.")
    # Over time, all of the time is shown unless told otherwise.
    whole = record.windows if parsed.layer is not None else last_part(record.windows)
    windows = between(record.windows, *parsed.steps) if parsed.steps else whole
    pieces = windows.total() if parsed.layer is None else segments(windows, TIME_ROWS)
    if parsed.layer is None:
        labels = list(names)
        counts = [pieces["counts"][0, place, :number] for place, number in enumerate(experts)]
    else:
        place = names.index(parsed.layer)
        labels = [f"{first}-{last}" for first, last in zip(pieces["first_step"], pieces["last_step"], strict=True)]
        counts = list(pieces["counts"][:, place, : experts[place]])
    if parsed.json:
        loads = [relative_loads(row).tolist() for row in counts]
        print(json_text({"rows": labels, "load_over_fair_share": loads}))
        return 0
    shared = sharing(max(map(len, counts)), labels, parsed.width)
    print(f"{parsed.layer or 'all layers'}, steps {pieces['first_step'][0]} to {pieces['last_step'][-1]}")
    print("\n".join(heatmap(labels, counts, parsed.width)))
    print(LEGEND + (f"; {shared} neighbours share one, which shows the busiest" if shared > 1 else ""))
    return 0


def _compare(parsed: argparse.Namespace) -> int:
    (first, ills), (second, other_ills) = (summary(run, parsed.steps) for run in (parsed.a, parsed.b))
    pairs = comparison(first, second)
    if parsed.json:
        layers = [{"a": a and asdict(a), "b": b and asdict(b)} for a, b in pairs.values()]
        ills_of = {"a": list(map(asdict, ills)), "b": list(map(asdict, other_ills))}
        print(json_text({"layers": layers, "verdicts": ills_of}))
        return 0
    none = ("-",) * (len(_COLUMNS) - 1)
    rows = []
    for name, (a, b) in pairs.items():
        rows.append((name, "A", *(_row(a)[1:] if a else none)))
        rows.append(("", "B", *(_row(b)[1:] if b else none)))
    lines = [f"A: {parsed.a}, steps {first.first_step} to {first.last_step}"]
    lines += [f"B: {parsed.b}, steps {second.first_step} to {second.last_step}", ""]
    lines += aligned([(_COLUMNS[0], "", *_COLUMNS[1:]), *rows])
    for label, found_here in (("A", ills), ("B", other_ills)):
        lines += ["", *(f"{label}: {ill}" for ill in found_here)] if found_here else ["", f"{label}: {HEALTHY}"]
    print("\n".join(lines))
    return 0


def _profile(parsed: argparse.Namespace) -> int:
    # Only this command needs torch's models; the others start faster without them.
    from moe_async.engine.profile import profile_checkpoint
    from moe_async.engine.profile_text import EXPLAINED, profile_document, profile_lines

    found = profile_checkpoint(
        parsed.checkpoint, parsed.data, parsed.bytes, parsed.against, parsed.batch_size, _show_progress
    )
    names = [layer.layer for layer in found.profile.layers]
    if parsed.layer is not None and parsed.layer not in names:
        raise LoadError(f"the model has no layer {parsed.layer!r}; it has {', '.join(map(repr, names))}.")
    if parsed.json:
        print(json_text(profile_document(found)))
    else:
        print(_table(found.profile.summary, found.profile.verdicts), "", sep="\n")
        print("\n".join(profile_lines(found, parsed.layer)), EXPLAINED, sep="\n")
    return DISEASED if found.profile.verdicts else 0


def _report(parsed: argparse.Namespace) -> int:
    from moe_async.report.document import report_document
    from moe_async.report.page import report_page

    document = report_document(parsed.run, None if parsed.profile is None else _read_json(parsed.profile))
    if parsed.json:
        print(json_text(document))
        return 0
    try:
        parsed.output.write_text(report_page(document), encoding="utf-8")
    except OSError as error:
        raise LoadError(f"{parsed.output} cannot be written ({error.strerror}); give another file with -o.") from error
    print(f"wrote {parsed.output}")
    return 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read ({error}); give what expert_load profile --json printed.") from error
    if not isinstance(document, dict):
        raise LoadError(f"{path} holds no JSON object; give what expert_load profile --json printed.")
    return document


def _show_progress(name: str, done: int, number: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{name}: {done} of {number} sequences", end="\n" if done == number else "", file=sys.stderr)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, two steps such as 100:200")
    return int(first), int(last)


def _width(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of characters, 1 or more")
    return int(text)


def _table(figures: LoadSummary, found: Sequence[Verdict]) -> str:
    rows = [_row(layer) for layer in figures.worst_first()]
    lines = [
        f"steps {figures.first_step} to {figures.last_step} of {figures.recorded[0]} to {figures.recorded[1]} recorded",
        "",
    ]
    lines += aligned([_COLUMNS, *rows])
    lines += _bad_tokens(figures)
    lines += ["", *(map(str, found) if found else [HEALTHY])]
    return "\n".join(lines)


def _bad_tokens(figures: LoadSummary) -> list[str]:
    """What has to be known before the figures are believed."""
    return [
        f"{layer.layer}: {layer.bad_tokens} tokens had router logits that were not finite; its figures are void"
        for layer in figures.layers
        if layer.bad_tokens
    ]


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
        f"{layer.confidence:.3f}" if math.isfinite(layer.confidence) else "-",
        "-" if layer.drift is None else f"{layer.drift:.3f}",
        "-" if layer.step_imbalance is None else f"{layer.step_imbalance:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
