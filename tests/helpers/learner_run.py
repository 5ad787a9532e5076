"""Real learners and a real syncer for a test: each learner is gloo processes of its own, the syncer a thread."""

from __future__ import annotations

import copy
import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_async.comm import make_world
from moe_async.comm.session import Door
from moe_async.engine.door import difference
from moe_async.engine.join import join_run, make_exchange
from moe_async.engine.learner_exchange import LearnerExchange
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.run_description import describe_run
from moe_async.engine.run_folder import learner_run
from moe_async.engine.start import initialize
from moe_async.engine.step import Engine
from moe_async.engine.stop import StopFlag
from moe_async.engine.sync_plan import sync_groups
from moe_async.model import build_model
from moe_async.model.keys import exchanged_tensors, expert_modules
from moe_async.moe.classes import classify, expert_ids
from moe_async.recipe import Recipe, parse_recipe
from moe_async.recipe.loader import dump_recipe
from moe_async.sync.participant import LearnerStep
from moe_async.sync.server import MergingServer
from moe_async.topology import Topology
from tests.helpers.small import SMALL
from tests.helpers.spawn import run_ranks

LIMIT = 150.0


def several(between: dict[str, Any], learners: int = 2, **changes: Any) -> Recipe:
    """`SMALL` for several learners, with entries replaced, addressed as ``section__entry=value``."""
    document = copy.deepcopy(SMALL)
    document["sync"] = {"learners": learners, "between": between, "timeout": 20.0}
    document["train"] = {**document["train"], "global_batch": 4}
    for key, value in changes.items():
        section, _, entry = key.partition("__")
        if entry:
            document[section][entry] = value
        else:
            document[section] = value
    return Recipe.model_validate(document)


class Syncer:
    """A syncer in a thread of the test.

    Args:
        folder: of the run.
        port: to listen on; 0: a free one.
    """

    def __init__(
        self, folder: Path, port: int = 0, start_after: float = 60.0, snapshot_every: int = 200, timeout: float = 20.0
    ) -> None:
        self.said: list[str] = []
        self.door = Door("127.0.0.1", port, timeout)
        describe = partial(describe_run, folder=folder)
        self.server = MergingServer(
            self.door, describe, difference, self.said.append, timeout, start_after, snapshot_every
        )
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.door.port

    def close(self) -> None:
        self.server.stop()
        self.thread.join(20)


def batches(recipe: Recipe, learner: int, rank: int, ranks: int, step: int) -> list[MicroBatch]:
    """A rank's micro-batches of one step: windows of made-up tokens, others for each learner.

    Micro-batch a of a single rank is that of rank a of several, so that both train on the same.
    """
    rows = recipe.micro_batch_size(ranks)
    size = (rows, recipe.data.seq_len)
    seeds = [1_000_003 * learner + 1009 * step + rank + place for place in range(recipe.train.accumulation)]
    tokens = [torch.randint(0, 32, size, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return [MicroBatch(entry, entry.roll(-1, 1)) for entry in tokens]


Watch = Callable[[Engine, LearnerExchange, int], Any]


def one_rank(
    rank: int,
    text: str,
    address: tuple[str, int],
    learner: int,
    folder: str,
    watch: Watch | None,
    pace: float,
    saved: list[dict[str, Any]] | None = None,
):
    """Train one rank of a learner to the end of the run, or until its exchange says to stop.

    With ``saved``, what each rank returned then, it goes on from there: plain SGD alone, which has no moments. Returns
    what was watched, the final tensors, and when it was stopped what a checkpoint keeps of its exchange.
    """
    recipe = parse_recipe(text, "test")
    ranks = torch.distributed.get_world_size()
    world = make_world(Topology(ranks, recipe.parallel.expert, recipe.moe.num_experts))
    link, seat = join_run(recipe, world, address, learner)
    assert link is not None and seat is not None
    stop = StopFlag()
    engine = initialize(build_model(recipe, world), recipe, world)
    exchange = make_exchange(engine, recipe, link, seat, stop, learner_run(Path(folder), "run", seat.learner))
    if saved is not None:
        with torch.no_grad():
            for name, tensor in exchanged_tensors(engine.module).items():
                tensor.copy_(saved[rank]["final"][name])
        exchange.restore(saved[rank]["state"], saved[rank]["tensors"])
    goes_on = exchange.start()
    assert goes_on
    engine.global_step = exchange.clock
    seen = []
    while goes_on and exchange.position < recipe.train.steps:
        began = time.monotonic()
        if watch is not None:
            seen.append(watch(engine, exchange, rank))
        engine.ahead = exchange.position - engine.global_step
        report = engine.train_step(batches(recipe, seat.learner, rank, world.size, engine.global_step + 1))
        time.sleep(max(began + pace - time.monotonic(), 0.0))
        goes_on = exchange.after_step(report, time.monotonic() - began)
        # As the training loop does: a learner that the others went on without begins at their step.
        engine.global_step = exchange.clock
    final = {name: tensor.clone() for name, tensor in exchanged_tensors(engine.module).items()}
    if not goes_on:
        state = {"state": exchange.state_dict(), "tensors": exchange.tensors()}
        exchange.pause()
        return {"final": final, "steps": engine.global_step, **state}
    exchange.finish()
    summary = exchange.summary()
    if rank == 0:
        exchange.report({"learner": summary})
    outbox = len(exchange.link.outbox())
    exchange.leave()
    final = {name: tensor.clone() for name, tensor in exchanged_tensors(engine.module).items()}
    return {"seen": seen, "final": final, "summary": summary, "steps": engine.global_step, "outbox": outbox}


def run_learners(
    recipe: Recipe,
    folder: Path,
    ranks: int = 1,
    watch: Watch | None = None,
    paces: tuple[float, ...] = (0.0, 0.0),
    syncer: Syncer | None = None,
    saved: list[list[dict[str, Any]]] | None = None,
) -> tuple[Syncer, list[list[dict[str, Any]]]]:
    """Train to the end, or on from what was ``saved``; the syncer, and for each learner what each of its ranks
    returned."""
    syncer = syncer or Syncer(folder / "run")
    text = dump_recipe(recipe)
    with ThreadPoolExecutor(recipe.sync.learners) as pool:
        found = [
            pool.submit(
                run_ranks,
                ranks,
                one_rank,
                text,
                syncer.address,
                n,
                str(folder),
                watch,
                paces[n],
                None if saved is None else saved[n],
                timeout=LIMIT,
            )
            for n in range(recipe.sync.learners)
        ]
        results = [future.result() for future in found]
    syncer.thread.join(20)
    assert not syncer.thread.is_alive(), "the syncer waits for something"
    return syncer, results


def dense_hash(engine: Engine, exchange: LearnerExchange, rank: int) -> str:
    """A hash of all dense and router weights, on every rank, before each step."""
    classes = classify(engine.module)
    state = hashlib.sha256()
    for name, parameter in engine.module.named_parameters():
        if classes[name] != "expert":
            state.update(parameter.detach().numpy().tobytes())
    return state.hexdigest()


def merged(results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The final tensors of a learner, from all its ranks; those that several ranks hold must be equal."""
    found: dict[str, Tensor] = {}
    for result in results:
        for name, tensor in result["final"].items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


class PlainLearner:
    """The model of one learner in one process under plain SGD: what a launch of one rank does, without DeepSpeed.

    Where the recipe's policy sends gradients, a step computes them and leaves the weights alone.
    """

    def __init__(self, recipe: Recipe, learner: int) -> None:
        self.recipe, self.learner = recipe, learner
        self.model = build_model(recipe)
        self.fragments = {f.number: f for group in sync_groups(recipe, self.model) for f in group.fragments}
        self.experts = expert_modules(self.model)

    def step(self, number: int, position: float) -> LearnerStep:
        (batch,) = batches(self.recipe, self.learner, 0, 1, number)
        output = self.model(batch.tokens)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        named, ids = dict(self.model.named_parameters()), expert_ids(self.model)
        self.gradients = {name: p.grad.clone() for name, p in named.items() if name not in ids}
        for name, experts in ids.items():
            self.gradients |= {f"{name}.{e}": named[name].grad[i].clone() for i, e in enumerate(experts)}
        with torch.no_grad():
            for parameter in named.values():
                if not self.recipe.sync.between.sends_gradients:
                    parameter -= self.recipe.optim.lr * parameter.grad
                parameter.grad = None
        counts = {
            f"{prefix}.{expert}": count
            for prefix, sums in zip(self.experts, output.routing, strict=True)
            for expert, count in enumerate(sums.total().counts_E.tolist())
        }
        return LearnerStep(batch.labels.numel(), counts, float(loss.detach()))

    def read(self, fragment: int) -> Tensor:
        return self.fragments[fragment].flatten(exchanged_tensors(self.model))

    def write(self, fragment: int, value_X: Tensor) -> None:
        tensors = exchanged_tensors(self.model)
        for name, part in self.fragments[fragment].split(value_X).items():
            tensors[name].copy_(part.view_as(tensors[name]))

    def gradient(self, fragment: int) -> Tensor:
        return self.fragments[fragment].flatten(self.gradients)
