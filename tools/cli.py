"""Runs the tools by name after an install.

moe-async evaluate runs/quickstart
moe-async evaluate --help
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

TOOLS = {
    "bench_delay": "what a delay of the dense reduction buys on a slow link",
    "bench_stragglers": "what a slow learner costs, in real launches",
    "bench_load": "what recording the loads of experts costs",
    "compare_policies": "held-out loss under policies between learners at equal tokens, in real launches",
    "evaluate": "held-out loss of a checkpoint in bits per byte",
    "expert_load": "loads of experts of a run by layer, and the diseases of routing that they show",
    "local_ranks": "ranks to start on this machine for a recipe",
    "plan": "what a recipe needs on so many accelerators: memory, traffic, time, and the best layout",
    "plot": "loss, speed, balance and staleness of runs as one PNG",
    "recipe": "recipes before they run: check, show, diff, explain an entry",
    "selective_precision": "the selective-precision experiment, as one table",
    "simulate_sync": "policies between learners side by side, under a virtual clock",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one tool with the rest of the command line; its exit code, or 2 without a known name."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0].replace("-", "_") if given else ""
    if name not in TOOLS:
        asked = given and given[0] in ("-h", "--help")
        lines = ["usage: moe-async TOOL ...", "", *(f"  {tool:<22}{text}" for tool, text in TOOLS.items())]
        print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    tool = importlib.import_module(f"moe_async.tools.{name}")
    code: int = tool.main(given[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
