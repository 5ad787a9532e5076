"""The measurement of what the record of loads costs, on very little text."""

import json
import subprocess
import sys

from moe_async.observe.sampler import SAMPLED_TOKENS
from tests.helpers.launch import ROOT, environment

COMMAND = [sys.executable, "tools/bench_load.py", "recipes/quickstart-sync.yaml", "--pairs", "2", "--json"]


def test_measures_steps_with_and_without():
    run = subprocess.run(
        [*COMMAND, "--set", "train.global_batch=2"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout[run.stdout.index("{\n") :])
    assert figures["layers"] == 3 and figures["pairs"] == 2
    # Three steps to warm up, and one of each pair; each gave its sample of paths.
    assert figures["recorded_steps"] == 3 + 2 and figures["recorded_paths"] == 5 * SAMPLED_TOKENS
    assert 0 < figures["spent"] < 1
    assert isinstance(figures["added"], float) and len(figures["added_quartiles"]) == 2
