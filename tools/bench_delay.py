"""What a delay of the dense reduction buys on a slow link, all in one run on this machine.

    python tools/bench_delay.py
    moe-async bench-delay --compute 2.0 --delays 0 1 2 --json

Ranks train a small mixture of experts over loopback in a network namespace of their own, whose rate `tc tbf` limits so
that the reduction of the dense gradients alone takes a share (0.8) of the time of computing. Computing is a pause of
fixed length and a little real work, so that ranks on few cores do not take time from one another. The tokens of the
experts and the small collectives of a step take the same link. Measured are, in seconds a step and against compute
alone (the same steps without a dense reduction): the blocking reduction and each delay.

Where no namespace can be made (it takes root, or user namespaces, and `tc`) nothing is limited; a reduction is then
made to end late by that share of the time, one after another, and the result says so.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moe_async import MicroBatch, Recipe, Topology, build_model, initialize
from moe_async.comm import Launch, Reduction, World, leave_process_group, make_world, start_process_group
from moe_async.engine.delay import Pending
from moe_async.engine.step import Engine
from moe_async.errors import MoeAsyncError

BURST, QUEUE = "512kb", "128kb"
"""Of the token bucket. A smaller burst or queue, or packets larger than an Ethernet's, stall or reset connections; in a
longer queue small messages wait longer behind the reduction."""
WARM_UP = 2
NAMESPACES = (["unshare", "--net"], ["unshare", "--map-root-user", "--net"])


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        ranks: processes.
        compute: length of the pause in a step, in seconds.
        share: time of the reduction alone, as a share of compute alone.
        megabytes: of dense gradients, about.
        steps: timed in each row.
        delays: the delays to measure.
        limited: the link is limited; otherwise reductions are made to end late.
    """

    ranks: int
    compute: float
    share: float
    megabytes: float
    steps: int
    delays: tuple[int, ...]
    limited: bool


def recipe_of(plan: Plan, inside: Any) -> Recipe:
    """A decoder whose embedding makes up most of the dense gradient, with its experts spread over all ranks."""
    width = 64
    return Recipe.model_validate(
        {
            "model": {
                "dim": width, "layers": 1, "heads": 2, "ffn_dim": width,
                "vocab_size": max(int(plan.megabytes * 1e6 / 4 / width), 256),
            },
            "moe": {"num_experts": plan.ranks, "top_k": 1, "expert_dim": 32},
            "parallel": {"expert": plan.ranks, "zero": 0},
            "sync": {"inside": inside},
            "optim": {"kind": "sgd", "lr": 1e-3, "schedule": {"kind": "constant"}},
            "data": {"source": "builtin", "seq_len": 16},
            "train": {"steps": 10**6, "global_batch": plan.ranks, "precision": "float32"},
        }
    )  # fmt: skip


@dataclass
class LateLink:
    """In place of a limited link: a reduction ends ``seconds`` after it began, and never two at a time."""

    start: Callable[[Sequence[Tensor]], Reduction]
    seconds: float
    free: float = 0.0

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """Begin a reduction."""
        self.free = max(self.free, time.perf_counter()) + self.seconds
        return LateReduction(self.start(tensors), self.free)


@dataclass
class LateReduction:
    """A reduction that is not there before a point in time."""

    pending: Reduction
    due: float

    def wait(self) -> list[Tensor]:
        """The sums."""
        time.sleep(max(self.due - time.perf_counter(), 0.0))
        return self.pending.wait()


@dataclass
class NoReduction:
    """What is left of a step when its dense gradients are not reduced."""

    tensors: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        """The rank's own gradients."""
        return self.tensors


class Bench:
    """The measurement on one rank."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan = plan
        self.world = world

    def run(self) -> dict[str, Any]:
        """All figures; every rank has those of rank 0's clock."""
        plan = self.plan
        free = self.seconds_a_step(self.engine({"delay": 0}, reduce=False))
        rate = self.limit_link(plan.share * free) if plan.limited else math.inf
        # The steps' small collectives and the experts' tokens share the link, so it is measured anew.
        alone = self.seconds_a_step(self.engine({"delay": 0}, reduce=False))
        reduction = self.reduction_alone() if plan.limited else plan.share * alone
        rows = {"compute alone": alone}
        if plan.limited:
            rows["blocking"] = self.seconds_a_step(self.engine("blocking"))
        for delay in plan.delays:
            engine = self.engine({"delay": delay})
            assert engine.bridge.delayed is not None
            if not plan.limited:
                engine.bridge.delayed.start_reduction = LateLink(self.world.background.start_all_reduce_many, reduction)
            rows[f"delay {delay}"] = self.seconds_a_step(engine)
        return {
            "link": "tbf" if plan.limited else "late reducer",
            "megabits_per_second": rate / 1e6 if plan.limited else None,
            "dense_bytes": sum(tensor.nbytes for tensor in self.gradients()),
            "reduction_alone": reduction,
            "reduction_share": reduction / alone,
            "seconds_a_step": rows,
            "ratio": {name: seconds / alone for name, seconds in rows.items()},
        }

    def engine(self, inside: Any, reduce: bool = True) -> Engine:
        """A fresh model in training; ``reduce=False`` leaves its dense gradients as each rank has them."""
        recipe = recipe_of(self.plan, inside)
        model = build_model(recipe, self.world)
        model.register_forward_pre_hook(lambda module, inputs: time.sleep(self.plan.compute))
        engine = initialize(model, recipe, self.world)
        if not reduce:
            assert engine.bridge.delayed is not None
            engine.bridge.delayed.start_reduction = lambda tensors: NoReduction(list(tensors))
        return engine

    def seconds_a_step(self, engine: Engine) -> float:
        """Median over steps, of the slowest rank in each."""
        tokens = torch.arange(16).view(1, 16) + self.world.rank
        seconds = []
        for _ in range(WARM_UP + self.plan.steps):
            start = time.perf_counter()
            engine.train_step([MicroBatch(tokens, tokens)])
            seconds.append(time.perf_counter() - start)
        engine.drain()
        self.world.everyone.barrier()
        slowest = self.world.everyone.all_reduce(torch.tensor(seconds[WARM_UP:], dtype=torch.float64), op="max")
        return float(median(slowest.tolist()))

    def gradients(self) -> list[Tensor]:
        """Tensors of the sizes of the dense gradients."""
        model = build_model(recipe_of(self.plan, "blocking"), self.world)
        return [torch.zeros_like(p) for name, p in model.named_parameters() if ".experts." not in name]

    def reduction_alone(self) -> float:
        """Seconds of a reduction with nothing beside it."""
        tensors, seconds = self.gradients(), []
        for _ in range(4):
            self.world.everyone.barrier()
            start = time.perf_counter()
            self.world.background.start_all_reduce_many(tensors).wait()
            seconds.append(time.perf_counter() - start)
        slowest = self.world.everyone.all_reduce(torch.tensor(seconds[1:], dtype=torch.float64), op="max")
        return float(median(slowest.tolist()))

    def limit_link(self, seconds: float) -> float:
        """Set the link's rate in bits per second so that a reduction alone takes ``seconds``, and return the rate."""
        sent = 2 * (self.plan.ranks - 1) * sum(tensor.nbytes for tensor in self.gradients())
        rate = 8 * sent / seconds
        for _ in range(5):
            if self.world.rank == 0:
                _shape(rate)
            self.world.everyone.barrier()
            found = self.reduction_alone()
            if abs(found / seconds - 1) < 0.02:
                break
            rate *= found / seconds
        return rate


def _shape(rate: float) -> None:
    options = ["rate", f"{int(rate)}bit", "burst", BURST, "limit", QUEUE]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *options], check=True)


def _rank(rank: int, plan: Plan, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo")
    launch = Launch(rank, plan.ranks, rank, plan.ranks, "127.0.0.1", port)
    start_process_group("gloo", launch, timedelta(minutes=5))
    world = make_world(Topology(plan.ranks, plan.ranks, plan.ranks), launch)
    figures = Bench(plan, world).run()
    if rank == 0:
        results.put(figures)
    world.everyone.barrier()
    leave_process_group()


def measure(plan: Plan) -> dict[str, Any]:
    """Start the ranks and return what rank 0 found. With a limited link, call it in a namespace of its own.

    Raises:
        MoeAsyncError: a rank failed.
    """
    if plan.limited:
        subprocess.run(["ip", "link", "set", "lo", "up", "mtu", "1500"], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, plan, port, results)) for rank in range(plan.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if results.empty():
        raise MoeAsyncError("a rank failed; its traceback is above.")
    figures: dict[str, Any] = results.get()
    return figures


def namespace() -> list[str]:
    """The command that runs another one in a network namespace where `tc tbf` works; empty when none does."""
    test = f"ip link set lo up mtu 1500 && tc qdisc add dev lo root tbf rate 1gbit burst {BURST} limit {QUEUE}"
    for command in NAMESPACES:
        if all(shutil.which(program) for program in ("unshare", "ip", "tc")):
            done = subprocess.run([*command, "sh", "-c", test], capture_output=True)
            if done.returncode == 0:
                return list(command)
    return []


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    kind = (
        f"link limited to {figures['megabits_per_second']:.0f} Mbit/s"
        if figures["link"] == "tbf"
        else "no link could be limited here, so reductions were made to end late"
    )
    return "\n".join(
        [
            f"{figures['dense_bytes'] / 1e6:.1f} MB of dense gradients, {kind}",
            f"reduction alone {figures['reduction_alone']:.3f} s, {figures['reduction_share']:.2f} of compute alone",
            "",
            f"{'':<16}{'s/step':>8}{'ratio':>8}",
            *(
                f"{name:<16}{seconds:>8.3f}{figures['ratio'][name]:>8.2f}"
                for name, seconds in figures["seconds_a_step"].items()
            ),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Exit code 1 when a rank failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="bench-delay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--compute", type=float, default=1.0, help="seconds of computing in a step (default 1)")
    parser.add_argument("--share", type=float, default=0.8, help="reduction alone over compute alone (default 0.8)")
    parser.add_argument("--megabytes", type=float, default=8.0, help="dense gradients, about (default 8)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each row (default 10)")
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 1], help="delays to measure (default 0 1)")
    parser.add_argument("--late", action="store_true", help="make reductions end late even where tc tbf works")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--in-namespace", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args(given)
    for name, least in (("ranks", 2), ("steps", 1)):
        if getattr(parsed, name) < least:
            parser.error(f"--{name} is {getattr(parsed, name)}; it must be at least {least}")
    for name in ("compute", "share", "megabytes"):
        if getattr(parsed, name) <= 0:
            parser.error(f"--{name} is {getattr(parsed, name)}; it must be greater than 0")
    if min(parsed.delays) < 0:
        parser.error(f"--delays has {min(parsed.delays)}; a delay is 0 or more")
    if not parsed.late and not parsed.in_namespace and (prefix := namespace()):
        return subprocess.run([*prefix, sys.executable, __file__, *given, "--in-namespace"]).returncode
    plan = Plan(
        parsed.ranks, parsed.compute, parsed.share, parsed.megabytes, parsed.steps, tuple(parsed.delays),
        limited=parsed.in_namespace and not parsed.late,
    )  # fmt: skip
    try:
        figures = measure(plan)
    except (MoeAsyncError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=1) if parsed.json else table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
