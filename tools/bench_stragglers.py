"""What a slow learner costs: real launches of several learners, one of which is slowed down.

python tools/bench_stragglers.py
python tools/bench_stragglers.py --learners 2 --slow 3 --policy local_sgd:every=4 --json

Each policy is a launch of its own (moe_async.launch) of a tiny model. Every step sleeps to a deadline, so that the
figures say what waiting costs and not how fast this machine is; the slow learner's deadline is --slow times later.
Columns: the tokens a second of all learners over the sum of what they make alone (their own pace without any waiting),
the same ratio under the virtual clock (predicted), the share of time each learner computed, and its steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from moe_async.engine.simulated import StubLearner
from moe_async.recipe import parse_recipe
from moe_async.sync.fragments import Fragment, Key, Unit
from moe_async.sync.plans import policy_plan
from moe_async.sync.syncer import SyncGroup
from moe_async.sync.timing import StepTimes
from moe_async.sync.virtual_clock import VirtualRun

DEFAULT_POLICIES = ("decoupled:every=2", "diloco:every=2", "local_sgd:every=2")
LIMIT_SECONDS = 900.0


def parse_policy(text: str) -> dict[str, Any]:
    """An entry of sync.between from ``NAME:key=value,...``."""
    name, _, options = text.partition(":")
    entries = (option.partition("=") for option in options.split(",") if option)
    return {"policy": name, **{key: yaml.safe_load(value) for key, _, value in entries}}


def document(folder: Path, policy: dict[str, Any], learners: int, steps: int) -> dict[str, Any]:
    """A tiny recipe."""
    return {
        "name": "stragglers",
        "model": {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 32},
        "moe": {"layers": "all", "num_experts": 2, "top_k": 1, "expert_dim": 16, "router": {"kind": "switch"}},
        "parallel": {"expert": 1, "zero": 0},
        "sync": {
            "learners": learners,
            "between": {"dense": policy, "expert": {"policy": "same"}, "router": {"policy": "same"}},
        },
        "optim": {"kind": "sgd", "lr": 0.05},
        "data": {
            "source": [{"builtin": "english", "max_bytes": 200_000}],
            "seq_len": 16,
            "heldout": 0.1,
            "heldout_bytes": 2000,
        },
        "train": {"steps": steps, "global_batch": 2, "precision": "float32"},
        "log": {"dir": str(folder / "runs"), "every": 1000, "sample_tokens": 0},
    }


def measure(policy: dict[str, Any], paces: Sequence[float], steps: int) -> dict[str, Any]:
    """Throughput of a real run over the sum of the learners' own, and how busy each was."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = folder / "stragglers.yaml"
        recipe.write_text(yaml.safe_dump(document(folder, policy, len(paces), steps)))
        command = [sys.executable, "-m", "moe_async.launch", str(recipe), "--ranks", "1"]
        for learner, seconds in enumerate(paces):
            command += ["--pace", f"{learner}:{seconds}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        if ended.returncode:
            raise SystemExit(f"the run failed:\n{ended.stdout}\n{ended.stderr}")
        found = json.loads((folder / "runs" / "stragglers" / "summary.json").read_text())["learners"]
    alone = sum(2 * 16 / seconds for seconds in paces)
    rates = [found[str(learner)]["tokens_per_second"] or 0.0 for learner in range(len(paces))]
    return {
        "ratio": sum(rates) / alone,
        "busy": [found[str(learner)]["busy"] for learner in range(len(paces))],
        "steps": [found[str(learner)]["steps"] for learner in range(len(paces))],
    }


def predict(policy: dict[str, Any], paces: Sequence[float], steps: int) -> float:
    """The same ratio under the virtual clock, with links that take no time."""
    with tempfile.TemporaryDirectory() as name:
        text = yaml.safe_dump(document(Path(name), policy, len(paces), steps))
        between = parse_recipe(text, "stragglers").sync.between
    assert between is not None
    plan = policy_plan(between.policies()["dense"], len(paces), steps)
    fragments = tuple(
        Fragment(number, (Unit("", (Key(f"part {number}", 1),)),)) for number in range(plan.phases[0].fragments)
    )
    run = VirtualRun(
        [SyncGroup("all", plan, fragments)],
        lambda learner, life, clock: StubLearner([fragment.number for fragment in fragments], 1),
        len(paces),
        times=StepTimes(given={learner: [seconds] for learner, seconds in enumerate(paces)}),
        until_progress=steps,
        flush=True,
    )
    run.run()
    # A learner's rate is over its own time, as in a real run: from its first step to its last, waiting included.
    rates = [figures.steps / max(figures.busy + figures.waited, 1e-9) for _, figures in sorted(run.figures.items())]
    return sum(rates) / sum(1 / seconds for seconds in paces)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="bench-stragglers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learners", type=int, default=4, help="default: %(default)d")
    parser.add_argument("--slow", type=float, default=5.0, help="how many times slower learner 0 is; default: 5")
    parser.add_argument("--seconds", type=float, default=0.8, help="of a step of the others; default: %(default)g")
    parser.add_argument("--steps", type=int, default=16, help="of a learner on average; default: %(default)d")
    parser.add_argument("--policy", action="append", metavar="NAME:key=value,...", help="may be given several times")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    paces = [parsed.seconds * parsed.slow, *[parsed.seconds] * (parsed.learners - 1)]
    rows = []
    for text in parsed.policy or DEFAULT_POLICIES:
        print(f"{text} ...", file=sys.stderr, flush=True)
        policy = parse_policy(text)
        found = measure(policy, paces, parsed.steps)
        rows.append({"policy": text, **found, "predicted": predict(policy, paces, parsed.steps)})
    if parsed.json:
        print(json.dumps({"paces": paces, "rows": rows}, indent=1))
        return 0
    print(f"{parsed.learners} learners, learner 0 {parsed.slow:g} times slower; steps of {parsed.seconds:g} s\n")
    print(f"{'policy':<28}{'of the sum':>12}{'predicted':>12}   busy, steps by learner")
    for row in rows:
        busy = "  ".join(f"{b:.0%} {s}" for b, s in zip(row["busy"], row["steps"], strict=True))
        print(f"{row['policy']:<28}{row['ratio']:>12.2f}{row['predicted']:>12.2f}   {busy}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
