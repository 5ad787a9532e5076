"""Held-out loss of a checkpoint in bits per byte, in one process with all experts.

    python tools/evaluate.py runs/quickstart/checkpoints/step_00000450
    moe-async evaluate runs/quickstart --json --set data.heldout_bytes=10000

Prints the figure overall and by domain, and the run's own figure beside it where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_async.comm import World
from moe_async.data import heldout_batches, load_corpus, make_tokenizer
from moe_async.engine.evaluate import evaluate
from moe_async.engine.open_checkpoint import open_checkpoint
from moe_async.engine.run_folder import RunFolder
from moe_async.errors import MoeAsyncError


def evaluate_checkpoint(path: Path, overrides: Sequence[str] = (), batch_size: int = 16) -> dict[str, Any]:
    """Bits per byte of the held-out text under a checkpoint, overall and by domain.

    Args:
        path: a checkpoint's folder, or a run's (its newest checkpoint is taken).
        overrides: recipe entries to replace, such as ``data.source=my.txt``.
        batch_size: sequences in a forward pass.
    """
    opened = open_checkpoint(path, overrides)
    recipe, trainer = opened.recipe, opened.manifest.trainer
    corpus = load_corpus(recipe.data, make_tokenizer(recipe.data.tokenizer))
    batches = heldout_batches(corpus, recipe.data.seq_len, rank=0, world_size=1, batch_size=batch_size)
    result = evaluate(opened.model, batches, corpus, World())
    figures: dict[str, Any] = {
        "checkpoint": str(opened.folder),
        "step": trainer["step"],
        "heldout_bits_per_byte": result.bits_per_byte,
        "by_domain": result.by_domain,
    }
    if not overrides:
        figures["same_text"] = trainer["data"]["fingerprint"] == corpus.fingerprint
        figures["run"] = _figure_of_run(opened.run, trainer["step"])
    return figures


def _figure_of_run(run: RunFolder, step: int) -> float | None:
    """What the run itself measured after that step."""
    if not run.metrics.is_file():
        return None
    figure = None
    for text in run.metrics.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            # A line cut short by a crash.
            continue
        if line.get("step") == step and "heldout_bits_per_byte" in line:
            figure = line["heldout_bits_per_byte"]
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures. Exit code 1 when the checkpoint or the text cannot be read."""
    parser = argparse.ArgumentParser(
        prog="evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint's folder, or a run's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in a forward pass (default 16)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="replace a recipe entry, such as data.source=my.txt",
    )  # fmt: skip
    parsed = parser.parse_args(arguments)
    if parsed.batch_size < 1:
        parser.error(f"--batch-size is {parsed.batch_size}; it must be at least 1")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        figures = evaluate_checkpoint(parsed.checkpoint, parsed.overrides, parsed.batch_size)
    except MoeAsyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=1) if parsed.json else _table(figures))
    return 0


def _table(figures: dict[str, Any]) -> str:
    lines = [
        f"{figures['checkpoint']}, step {figures['step']}",
        f"{'held-out bits per byte':<26}{figures['heldout_bits_per_byte']:>9.4f}",
        *(f"{'  ' + domain:<26}{bits:>9.4f}" for domain, bits in figures["by_domain"].items()),
    ]
    if figures.get("run") is not None:
        lines.append(f"{'the run itself measured':<26}{figures['run']:>9.4f}")
    if figures.get("same_text") is False:
        lines.append("note: the text here differs from the run's (other files or package versions)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
