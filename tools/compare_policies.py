"""What policies between learners cost in quality: real launches, held-out loss at equal tokens.

    python tools/compare_policies.py recipes/experiments/policies-adamw.yaml --learners 4 --seeds 3
    python tools/compare_policies.py recipes/quickstart.yaml --ranks 2 --policy recipe --policy diloco:every=24

Each policy and seed is a launch of its own (moe_async.launch), for as many tokens as the recipe's steps of all learners
make. A policy is written NAME[:key=value,...] as for simulate_sync. `alone` is one learner that has the ranks and the
batch of all, and alone:delay=1 the same with its dense gradients applied a step late: what several learners do without
is to be measured against them. --kill adds a run of each policy in which a learner or the syncer is killed (SIGKILL) at
a step drawn from the seed, and started anew by the launch.

Columns: held-out bits per byte (mean and standard deviation over the seeds, then each), tokens (of learners that lived
to the end), version lag and data age as median/95 %/max of all learners of the first seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import psutil

from moe_async.errors import MoeAsyncError, SyncError
from moe_async.launch import free_port
from moe_async.recipe import load_recipe
from moe_async.recipe.policy_text import policy_overrides

LIMIT_SECONDS = 3600.0
ALONE = "alone"


@dataclass(frozen=True)
class Comparison:
    """What to run.

    Attributes:
        recipe: its path.
        overrides: entries that hold for all policies.
        learners, ranks: of a run, and of each learner.
    """

    recipe: str
    overrides: Sequence[str]
    learners: int
    ranks: int

    def entries(self, policy: str, seed: int) -> list[str]:
        """The recipe's entries in one run, checked.

        Raises:
            MoeAsyncError: the policy is not valid, or does not fit the recipe.
        """
        plain = load_recipe(self.recipe, self.overrides)
        entries = [
            *self.overrides,
            f"train.seed={plain.train.seed + seed}", f"data.seed={plain.data.seed + seed}", "log.sample_tokens=0",
        ]  # fmt: skip
        name, _, rest = policy.partition(":")
        if name == ALONE:
            if rest and not rest.startswith("delay="):
                raise SyncError(f"{policy!r} is unknown; one learner is {ALONE} or {ALONE}:delay=1.")
            inside = f"{{delay: {rest.removeprefix('delay=')}}}" if rest else "blocking"
            batch = plain.train.global_batch * self.learners
            entries += ["sync.between=null", "sync.learners=1", f"sync.inside={inside}", f"train.global_batch={batch}"]
        else:
            entries += [f"sync.learners={self.learners}", *policy_overrides(policy, plain.moe is not None)]
        load_recipe(self.recipe, entries).check_world(self.ranks * (self.learners if name == ALONE else 1))
        return entries

    def run(self, policy: str, seed: int, victim: str = "") -> dict[str, Any]:
        """The summary of one run, in which ``victim``, a learner or the syncer, is killed once.

        Raises:
            MoeAsyncError: it failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            entries = [*self.entries(policy, seed), "name=run", f"log.dir={folder}", "log.every=1"]
            settings = [word for entry in entries for word in ("--set", entry)]
            if policy.partition(":")[0] == ALONE:
                command = [
                    "deepspeed", "--num_gpus", str(self.ranks * self.learners), "--master_port", str(free_port()),
                    "--module", "moe_async.train", "--recipe", self.recipe,
                ]  # fmt: skip
            else:
                command = [sys.executable, "-m", "moe_async.launch", self.recipe, "--ranks", str(self.ranks)]
            output = Path(folder) / "output.txt"
            with output.open("w") as file:
                process = subprocess.Popen([*command, *settings], stdout=file, stderr=subprocess.STDOUT)
            if victim:
                self._kill(process, output, victim, seed)
            if process.wait(LIMIT_SECONDS):
                raise MoeAsyncError(f"the run of {policy} failed:\n{output.read_text()}")
            found: dict[str, Any] = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return found

    def _kill(self, process: subprocess.Popen[bytes], output: Path, victim: str, seed: int) -> None:
        """Wait for a place between a quarter and three quarters of the run, and kill what there is of the victim."""
        chance = random.Random(seed)
        steps = load_recipe(self.recipe, self.overrides).train.steps
        learner, place = chance.randrange(self.learners), chance.randint(steps // 4, 3 * steps // 4)
        while _mean_steps(output.read_text(), self.learners) < place:
            if process.poll() is not None:
                raise MoeAsyncError(f"the run ended before step {place}:\n{output.read_text()}")
            time.sleep(0.05)
        words = ["moe_async.syncer"] if victim == "syncer" else ["moe_async.train", f"--learner {learner}"]
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if all(word in " ".join(child.cmdline()) for word in words):
                    child.kill()


def _mean_steps(text: str, learners: int) -> float:
    """Steps that learners have made on average, by what a launch has printed."""
    steps = {learner: int(step) for learner, step in re.findall(r"learner (\d+)\] step (\d+)/", text)}
    return sum(steps.values()) / learners


def default_policies(learners: int, steps: int) -> list[str]:
    """What is compared when nothing is said."""
    every = max(steps // 20, 1)
    others = [f"m_sync:count={max(learners - 1, 1)}", "bsp", ALONE, f"{ALONE}:delay=1"]
    return [f"decoupled:every={every}", f"diloco:every={every}", *others]


def staleness(summary: dict[str, Any], kind: str) -> str:
    """Median, 95th percentile and maximum of a kind of staleness: the largest of all learners."""
    rows = [learner["staleness"].get(kind) for learner in summary.get("learners", {}).values()]
    known = [row for row in rows if row]
    return "/".join(f"{max(row[name] for row in known):g}" for name in ("median", "p95", "max")) if known else "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print the table. Exit code 1 when something is not valid, or a run fails."""
    parser = argparse.ArgumentParser(
        prog="compare-policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="YAML file of the model, the text and the steps of a learner")
    parser.add_argument("--learners", type=int, default=2, help="default: %(default)d")
    parser.add_argument("--ranks", type=int, default=1, help="of each learner; default: %(default)d")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each policy; default: %(default)d")
    parser.add_argument("--policy", action="append", metavar="NAME:key=value,...", help="may be given several times")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="replace a recipe entry"
    )
    parser.add_argument(
        "--kill", action="append", default=[], choices=["learner", "syncer"], metavar="learner|syncer",
        help="run each policy again with one of them killed; may be given twice",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    if min(parsed.learners, parsed.ranks, parsed.seeds) < 1:
        parser.error("--learners, --ranks and --seeds are at least 1")
    comparison = Comparison(parsed.recipe, parsed.overrides, parsed.learners, parsed.ranks)
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        steps = load_recipe(parsed.recipe, parsed.overrides).train.steps
        policies = parsed.policy or default_policies(parsed.learners, steps)
        # What is wrong with the last policy is said before the first one runs.
        for policy in policies:
            comparison.entries(policy, 0)
        for seed in range(parsed.seeds):
            for policy in policies:
                for victim in ["", *parsed.kill] if policy.partition(":")[0] != ALONE else [""]:
                    row = f"{policy}, {victim} killed" if victim else policy
                    print(f"{row}, seed {seed} ...", file=sys.stderr, flush=True)
                    found.setdefault(row, []).append(comparison.run(policy, seed, victim))
    except MoeAsyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if parsed.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{parsed.learners} learners of {parsed.ranks} ranks, {steps} steps of a learner, {parsed.seeds} seeds\n")
    print(f"{'policy':<40}{'bits per byte':>16}{'tokens':>12}{'lag':>12}{'age':>12}   each seed")
    for policy, runs in found.items():
        bits = [run["heldout_bits_per_byte"] for run in runs]
        spread = f"{mean(bits):.3f} ± {stdev(bits):.3f}" if len(bits) > 1 else f"{bits[0]:.3f}"
        tokens = round(mean(run["tokens"] for run in runs))
        print(
            f"{policy:<40}{spread:>16}{tokens:>12,}{staleness(runs[0], 'version_lag'):>12}"
            f"{staleness(runs[0], 'data_age'):>12}   {' '.join(f'{value:.3f}' for value in bits)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
