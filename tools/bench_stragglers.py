"""What a slow learner or a slow link costs: real learners, one of which may be slowed down.

python tools/bench_stragglers.py
python tools/bench_stragglers.py --learners 2 --slow 3 --policy local_sgd:every=4 --json
python tools/bench_stragglers.py --learners 2 --slow 1 --bandwidth 8Mbit --megabytes 1

Each policy is a run of its own of a tiny model. Every step sleeps to a deadline, so that the figures say what waiting
costs and not how fast this machine is; the slow learner's deadline is --slow times later. With --bandwidth each learner
is in a network namespace of its own, on a link to the syncer whose rate `tc tbf` limits in each direction (root only).
Columns: the tokens a second of all learners over the sum of what they make alone (their own pace without any waiting),
the same ratio under the virtual clock (predicted), the share of time each learner computed, and its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moe_async.comm.namespaces import HUB, PAYLOAD_SHARE, Star
from moe_async.engine.simulated import StubLearner, stub_groups
from moe_async.engine.sync_plan import sync_groups
from moe_async.errors import MoeAsyncError
from moe_async.model import build_model
from moe_async.recipe import Recipe, dump_recipe, load_recipe
from moe_async.recipe.policy_text import policy_overrides
from moe_async.sync.quantities import parse_bandwidth
from moe_async.sync.timing import Link, Links, StepTimes
from moe_async.sync.virtual_clock import VirtualRun

LIMIT_SECONDS = 900.0
PORT = 29400


@dataclass(frozen=True)
class Bench:
    """What to measure.

    Attributes:
        paces: seconds of a step of each learner.
        steps: of a learner on average.
        megabytes: of the dense weights, about.
        bandwidth: of each learner's link in each direction, in bytes per second; None: no limit.
    """

    paces: Sequence[float]
    steps: int
    megabytes: float
    bandwidth: float | None

    def recipe(self, folder: Path, policy: str) -> Recipe:
        """A tiny model, most of which is its embedding, under a policy as `policy_overrides` reads it."""
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump(self._document(folder)))
        return load_recipe(path, policy_overrides(policy, has_experts=True))

    def _document(self, folder: Path) -> dict[str, Any]:
        width = 16
        return {
            "name": "stragglers",
            "model": {
                "dim": width, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 32,
                "vocab_size": max(int(self.megabytes * 1e6 / 4 / width), 512),
            },
            "moe": {"layers": "all", "num_experts": 2, "top_k": 1, "expert_dim": 16, "router": {"kind": "switch"}},
            "parallel": {"expert": 1, "zero": 0},
            "sync": {"learners": len(self.paces), "between": {}},
            "optim": {"kind": "sgd", "lr": 0.05},
            "data": {
                "source": [{"builtin": "english", "max_bytes": 200_000}],
                "seq_len": 16,
                "heldout": 0.1,
                "heldout_bytes": 2000,
            },
            "train": {"steps": self.steps, "global_batch": 2, "precision": "float32"},
            "log": {"dir": str(folder / "runs"), "every": 1000, "sample_tokens": 0},
        }  # fmt: skip

    def measure(self, policy: str) -> dict[str, Any]:
        """Throughput of a real run over the sum of the learners' own, and how busy each was."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            recipe = folder / "stragglers.yaml"
            recipe.write_text(dump_recipe(self.recipe(folder, policy)))
            run = folder / "runs" / "stragglers"
            if self.bandwidth is None:
                _launch(recipe, self.paces)
            else:
                _start_by_hand(recipe, run, self.paces, 8 * self.bandwidth)
            found = json.loads((run / "summary.json").read_text())["learners"]
        alone = sum(2 * 16 / seconds for seconds in self.paces)
        learners = [found[str(learner)] for learner in range(len(self.paces))]
        return {
            "ratio": sum(learner["tokens_per_second"] or 0.0 for learner in learners) / alone,
            "busy": [learner["busy"] for learner in learners],
            "steps": [learner["steps"] for learner in learners],
        }

    def predict(self, policy: str) -> float:
        """The same ratio under the virtual clock."""
        with tempfile.TemporaryDirectory() as name:
            recipe = self.recipe(Path(name), policy)
        groups, sizes = stub_groups(sync_groups(recipe, build_model(recipe)), element_size=4)
        link = Link() if self.bandwidth is None else Link(self.bandwidth * PAYLOAD_SHARE)
        run = VirtualRun(
            groups,
            lambda learner, life, clock: StubLearner(list(sizes), 1),
            len(self.paces),
            times=StepTimes(given={learner: [seconds] for learner, seconds in enumerate(self.paces)}),
            links=Links(link, link),
            until_progress=self.steps,
            flush=True,
            unit_bytes=sizes,
        )
        run.run()
        # A learner's rate is over its own time, as in a real run: from its first step to its last, waiting included.
        rates = [figures.steps / max(figures.busy + figures.waited, 1e-9) for _, figures in sorted(run.figures.items())]
        return sum(rates) / sum(1 / seconds for seconds in self.paces)


def default_policies(learners: int) -> list[str]:
    """What is measured when nothing is said."""
    deltas = [f"{name}:every=2" for name in ("decoupled", "diloco", "local_sgd")]
    return [*deltas, "bsp", f"m_sync:count={max(learners - 1, 1)}"]


def _launch(recipe: Path, paces: Sequence[float]) -> None:
    """A run on this machine's own network."""
    command = [sys.executable, "-m", "moe_async.launch", str(recipe), "--ranks", "1"]
    for learner, seconds in enumerate(paces):
        command += ["--pace", f"{learner}:{seconds}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if ended.returncode:
        raise MoeAsyncError(f"the run failed:\n{ended.stdout}\n{ended.stderr}")


def _start_by_hand(recipe: Path, run: Path, paces: Sequence[float], rate: float) -> None:
    """A run whose learners are each on a limited link, started one by one as on several machines."""
    address = f"{HUB}:{PORT}"
    environment = os.environ | {"MOE_ASYNC_LOCAL_RANKS": str(len(paces))}
    with Star(len(paces), rate) as star:
        commands = [star.at_hub([sys.executable, "-m", "moe_async.syncer", "--listen", address, "--folder", str(run)])]
        for learner, seconds in enumerate(paces):
            command = [sys.executable, "-m", "moe_async.train", "--recipe", str(recipe), "--join", address]
            commands.append(star.at_leaf(learner, [*command, "--learner", str(learner), "--pace", str(seconds)]))
        outputs = [recipe.parent / f"output-{number}.txt" for number in range(len(commands))]
        parts = []
        for command, output in zip(commands, outputs, strict=True):
            with output.open("w") as file:
                parts.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))
        for part, output in zip(parts, outputs, strict=True):
            if part.wait(LIMIT_SECONDS):
                raise MoeAsyncError(f"the run failed:\n{output.read_text()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="bench-stragglers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learners", type=int, default=4, help="default: %(default)d")
    parser.add_argument("--slow", type=float, default=5.0, help="how many times slower learner 0 is; default: 5")
    parser.add_argument("--seconds", type=float, default=0.8, help="of a step of the others; default: %(default)g")
    parser.add_argument("--steps", type=int, default=16, help="of a learner on average; default: %(default)d")
    parser.add_argument("--bandwidth", help="of each learner's link each way, such as 8Mbit; default: no limit")
    parser.add_argument("--megabytes", type=float, default=0.03, help="of dense weights; default: %(default)g")
    parser.add_argument("--policy", action="append", metavar="NAME:key=value,...", help="may be given several times")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    paces = [parsed.seconds * parsed.slow, *[parsed.seconds] * (parsed.learners - 1)]
    rows = []
    try:
        bandwidth = None if parsed.bandwidth is None else parse_bandwidth(parsed.bandwidth)
        bench = Bench(paces, parsed.steps, parsed.megabytes, bandwidth)
        for text in parsed.policy or default_policies(parsed.learners):
            print(f"{text} ...", file=sys.stderr, flush=True)
            rows.append({"policy": text, **bench.measure(text), "predicted": bench.predict(text)})
    except MoeAsyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if parsed.json:
        print(json.dumps({"paces": paces, "rows": rows}, indent=1))
        return 0
    link = f"; links of {parsed.bandwidth}, {parsed.megabytes:g} MB of weights" if parsed.bandwidth else ""
    print(f"{parsed.learners} learners, learner 0 {parsed.slow:g} times slower; steps of {parsed.seconds:g} s{link}\n")
    print(f"{'policy':<28}{'of the sum':>12}{'predicted':>12}   busy, steps by learner")
    for row in rows:
        busy = "  ".join(f"{b:.0%} {s}" for b, s in zip(row["busy"], row["steps"], strict=True))
        print(f"{row['policy']:<28}{row['ratio']:>12.2f}{row['predicted']:>12.2f}   {busy}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
