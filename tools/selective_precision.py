"""The selective-precision experiment: the same recipe in several precisions and seeds, as one table.

    python tools/selective_precision.py recipes/experiments/selective-precision.yaml --seeds 3
    moe-async selective-precision recipes/experiments/selective-precision.yaml --seeds 1 --ranks 1 --json

Each variant is one training run (`deepspeed`, expert-parallel over its ranks); runs of that name that are finished
already are not made again, unfinished ones are made anew. Then every model reads the held-out text once more: for each
token and MoE layer its experts are compared with those that the same weights choose for the same input in float32.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch.nn import functional

from moe_async import build_model
from moe_async.data import IGNORED_LABEL, heldout_batches, load_corpus, make_tokenizer
from moe_async.engine.checkpoint import load_weights
from moe_async.engine.checkpoint_folder import MANIFEST, read_manifest
from moe_async.engine.run_folder import resumed_run
from moe_async.errors import MoeAsyncError
from moe_async.moe.router import Router
from moe_async.ops.agreement import Agreement, routing_agreement
from moe_async.recipe import load_recipe, parse_recipe

VARIANTS = {
    "float32": ("float32", "float32"),
    "selective": ("selective", "float32"),
    "selective, router in bfloat16": ("selective", "bfloat16"),
    "bf16": ("bf16", "float32"),
    "bf16, router in bfloat16": ("bf16", "bfloat16"),
}
"""By name in the table: `train.precision` and `moe.router.compute`."""


def train_variants(recipe: Path, folder: Path, seeds: int, ranks: int) -> dict[str, list[Path]]:
    """Make the runs that are not there yet; the run folders of each variant, by seed.

    Raises:
        MoeAsyncError: a run ended with an error, or the recipe's tokens take all experts.
    """
    runs: dict[str, list[Path]] = {}
    loaded = load_recipe(recipe)
    name, moe = loaded.name, loaded.moe
    if moe is None or moe.top_k == moe.num_experts or moe.router.kind != "topk":
        raise MoeAsyncError(
            f"{recipe} has no top-k router that leaves experts out, so there is no choice to compare. Use one with "
            "moe.router.kind topk and top_k below num_experts."
        )
    for variant, (precision, router) in VARIANTS.items():
        for seed in range(seeds):
            run = f"{name}-{precision}-{router}-router-{seed}"
            runs.setdefault(variant, []).append(folder / run)
            if (folder / run / "summary.json").is_file():
                continue
            # What is left of an interrupted run; a second run of its name would go to another folder.
            shutil.rmtree(folder / run, ignore_errors=True)
            entries = [
                f"name={run}", f"log.dir={folder}", f"train.precision={precision}", f"moe.router.compute={router}",
                f"train.seed={seed}", f"data.seed={seed}", f"parallel.expert={ranks}",
            ]  # fmt: skip
            options = [part for entry in entries for part in ("--set", entry)]
            place = ["--num_gpus", str(ranks), "--master_port", str(_free_port())]
            command = [_launcher(), *place, "--module", "moe_async.train", "--recipe", str(recipe)]
            print(f"{variant}, seed {seed} ...", file=sys.stderr, flush=True)
            done = subprocess.run([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise MoeAsyncError(f"{variant}, seed {seed} ended with code {done.returncode}:\n{done.stdout[-3000:]}")
    return runs


def _launcher() -> str:
    """The deepspeed command of this environment, whether or not it is activated."""
    beside = Path(sys.executable).with_name("deepspeed")
    return str(beside) if beside.is_file() else "deepspeed"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@torch.no_grad()
def measure(run: Path) -> dict[str, float]:
    """A run's held-out bits per byte, and how its router agrees with float32 on the held-out text."""
    _, checkpoint = resumed_run(run.parent, run.name, str(run))
    recipe = parse_recipe(read_manifest(checkpoint).recipe, str(checkpoint / MANIFEST), ["parallel.expert=1"])
    corpus = load_corpus(recipe.data, make_tokenizer(recipe.data.tokenizer))
    model = build_model(recipe).eval()
    load_weights(checkpoint, model)
    found: list[Agreement] = []

    def compare(router: Router, inputs: tuple[Any, ...], options: dict[str, Any], output: tuple[Any, ...]) -> None:
        x = inputs[0].float() if options["live_T"] is None else inputs[0].float()[options["live_T"]]
        reference = functional.linear(x, router.weight)
        found.append(routing_agreement(router.logits(x), reference, router.top_k))

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(compare, with_kwargs=True)
    for batch in heldout_batches(corpus, recipe.data.seq_len, rank=0, world_size=1, batch_size=16):
        live = batch.labels != IGNORED_LABEL
        model(batch.tokens, None if live.all() else live)
    tokens = sum(one.tokens for one in found)
    summary = json.loads((run / "summary.json").read_text())
    return {
        "heldout_bits_per_byte": summary["heldout_bits_per_byte"],
        "differing": sum(one.differing for one in found) / tokens,
        "ties": sum(one.ties for one in found) / tokens,
        "skipped": summary.get("skipped_steps", 0),
    }


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """The figures as a Markdown table: means over seeds, with the standard deviation where there are several.

    Seeds differ in weights and text order, and more than precisions do; so losses are also compared seed by seed with
    the first variant's.
    """
    first = next(iter(results))
    lines = [
        f"| precision | held-out bits per byte | against {first}, same seed | tokens with other experts | ties |",
        "|---|---|---|---|---|",
    ]
    for variant, rows in results.items():
        bits = [row["heldout_bits_per_byte"] for row in rows]
        differences = [own - row["heldout_bits_per_byte"] for own, row in zip(bits, results[first], strict=True)]
        against = "-" if variant == first else _with_spread(differences, "+.4f")
        shares = [f"{100 * mean(row[key] for row in rows):.3f} %" for key in ("differing", "ties")]
        lines.append(f"| {variant} | {_with_spread(bits, '.4f')} | {against} | {shares[0]} | {shares[1]} |")
    return "\n".join(lines)


def _with_spread(values: Sequence[float], form: str) -> str:
    spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{spread}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure, print. Exit code 1 when a run failed."""
    parser = argparse.ArgumentParser(
        prog="selective-precision", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, help="the recipe that all variants share")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant (default 3)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each run (default 2)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are written (default runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(arguments)
    for name in ("seeds", "ranks"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} is {getattr(parsed, name)}; it must be at least 1")
    try:
        runs = train_variants(parsed.recipe, parsed.runs, parsed.seeds, parsed.ranks)
        results = {variant: [measure(run) for run in folders] for variant, folders in runs.items()}
    except MoeAsyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(results, indent=1) if parsed.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
