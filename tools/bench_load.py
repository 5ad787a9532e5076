"""What recording the loads of experts costs: the time that its parts take, and step times with and without, in turn.

    python tools/bench_load.py recipes/quickstart-sync.yaml
    moe-async bench_load recipes/quickstart-sync.yaml --pairs 60 --json

The parts of the record are timed one by one: adding up routers' figures, summing them over ranks, sampling paths,
making windows and writing files. Their sum over the median step without them is the first figure. On an accelerator
they are only queued there, and the second figure tells more: steps with and without the record take turns, so that a
busy machine slows both alike, and it is the median of the ratios of neighbours, less one. All experts are in this
process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_async import MicroBatch, MoELayer, build_model, initialize, join_world, load_recipe
from moe_async.data import TrainStream, load_corpus, make_tokenizer
from moe_async.engine.load_meta import load_meta
from moe_async.errors import MoeAsyncError
from moe_async.observe import LoadStore, StepFigures, StepTally, read_load
from moe_async.observe.recorder import LoadRecorder
from moe_async.observe.sampler import PathSampler

_WARM_STEPS = 3


class _Stopwatch:
    """Seconds spent inside some functions; those within one another count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is counted."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, began = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began
                self._inside = False

        return run


def cost_of_record(recipe_path: Path, pairs: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Median seconds of a step without the record, and what the record adds to it.

    Args:
        recipe_path: what is trained.
        pairs: of steps, one with and one without the record.
        overrides: recipe entries to replace.
    """
    recipe = load_recipe(recipe_path, ["parallel.expert=1", *overrides])
    world = join_world(recipe)
    corpus = load_corpus(recipe.data, make_tokenizer(recipe.data.tokenizer))
    engine = initialize(build_model(recipe, world), recipe, world)
    stream = TrainStream(corpus, recipe.data.seq_len, recipe.data.seed)
    meta = load_meta(recipe, world, corpus.domains)
    layers = [part for part in engine.module.modules() if isinstance(part, MoELayer)]
    watch = _Stopwatch()
    sampler = _TimedSampler(layers, max(meta.top_k, default=0), watch)

    def seconds(step: int, recorder: LoadRecorder | None) -> float:
        batches = [
            MicroBatch(batch.tokens, batch.labels, domains=batch.domains)
            for batch in stream.next_step(recipe.train.global_batch, 0, 1, engine.accumulation)
        ]
        engine.observed = meta if recorder is not None else None
        began = time.perf_counter()
        if recorder is not None:
            sampler.want()
        report = engine.train_step(batches)
        if recorder is not None and report.load is not None:
            watch.timed(record)(step, recorder, batches[0], report.load)
        return time.perf_counter() - began

    def record(step: int, recorder: LoadRecorder, first: MicroBatch, load: StepFigures) -> None:
        paths = sampler.paths(step, first.tokens, first.token_mask, first.domains, len(meta.domains) - 1)
        recorder.add(step, load, paths=paths)

    with tempfile.TemporaryDirectory() as folder, _timed_tally(watch):
        recorder = LoadRecorder(LoadStore(Path(folder), meta))
        for step in range(_WARM_STEPS):
            seconds(step, recorder)
        watch.seconds = 0.0
        without, added = [], []
        for pair in range(pairs):
            step = _WARM_STEPS + pair
            # Which of the two comes first alternates too.
            if pair % 2:
                plain, recorded = seconds(step, None), seconds(step, recorder)
            else:
                recorded, plain = seconds(step, recorder), seconds(step, None)
            without.append(plain)
            added.append(recorded / plain - 1)
        watch.timed(recorder.flush)()
        found = read_load(Path(folder))
    return {
        "recipe": recipe.name,
        "layers": len(meta.layers),
        "pairs": pairs,
        "recorded_steps": int(found.windows["steps"].sum()),
        "recorded_paths": len(found.paths),
        "step_seconds": statistics.median(without),
        "spent": watch.seconds / pairs / statistics.median(without),
        "added": statistics.median(added),
        "added_quartiles": statistics.quantiles(added, n=4)[::2],
    }


class _TimedSampler(PathSampler):
    """A sampler whose time is counted."""

    def __init__(self, layers: Sequence[MoELayer], top_k: int, watch: _Stopwatch) -> None:
        self._watch = watch
        super().__init__(layers, top_k)

    def _hook(self, layer: int) -> Any:
        return self._watch.timed(super()._hook(layer))


@contextlib.contextmanager
def _timed_tally(watch: _Stopwatch) -> Iterator[None]:
    """Counts the time of every `StepTally` that is made meanwhile."""
    names = ("__init__", "add", "over_ranks")
    before = {name: getattr(StepTally, name) for name in names}
    for name, function in before.items():
        setattr(StepTally, name, watch.timed(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(StepTally, name, function)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures. Exit code 1 when the recipe cannot be trained here."""
    parser = argparse.ArgumentParser(
        prog="bench_load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--pairs", type=int, default=40, help="of steps with and without the record (default 40)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parsed = parser.parse_args(arguments)
    if parsed.pairs < 2:
        parser.error(f"--pairs is {parsed.pairs}; it must be at least 2")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        figures = cost_of_record(parsed.recipe, parsed.pairs, parsed.overrides)
    except MoeAsyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    low, high = figures["added_quartiles"]
    step, spent = f"{figures['step_seconds'] * 1e3:.1f} ms", f"{figures['spent']:.2%}"
    text = (
        f"{figures['recipe']}: {figures['layers']} MoE layers; the record of loads takes {spent} of a step of {step}; "
        f"steps with it take {figures['added']:+.1%} (quartiles {low:+.1%} to {high:+.1%}, {parsed.pairs} pairs)"
    )
    print(json.dumps(figures, indent=1) if parsed.json else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
