"""Joining a run of several learners: a seat at the syncer, and the exchange with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_async.comm import World
from moe_async.comm.session import Header
from moe_async.engine.all_reduce_exchange import AllReduceExchange
from moe_async.engine.checkpoint_folder import read_manifest
from moe_async.engine.door import make_hello
from moe_async.engine.learner_exchange import LearnerExchange, LearnerParts
from moe_async.engine.learner_model import RankModel
from moe_async.engine.run_folder import RunFolder
from moe_async.engine.seat import Seat, take_seat
from moe_async.engine.step import Engine
from moe_async.engine.stop import StopFlag
from moe_async.engine.sync_plan import sync_groups
from moe_async.engine.syncer_exchange import SyncerExchange
from moe_async.engine.syncer_link import SyncerLink
from moe_async.errors import CheckpointError, RecipeError
from moe_async.model.keys import expert_modules
from moe_async.sync.event_log import EventLog

if TYPE_CHECKING:
    from moe_async.recipe import Recipe

SYNCER_PATIENCE = 60.0
"""Seconds for which a learner waits for a syncer that is not there yet."""


def join_run(
    recipe: Recipe, world: World, address: tuple[str, int] | None, learner: int, checkpoint: Path | None = None
) -> tuple[SyncerLink | None, Seat | None]:
    """Take a place in the run of the syncer at ``address``; both None without one. Every rank calls it; blocks.

    Args:
        recipe: the resolved recipe.
        world: this rank's view of the learner.
        address: host and port; None: this learner is on its own.
        learner: the place it wants; -1: any.
        checkpoint: with which it comes back to the place it had. If the syncer has had updates since then, as after a
            crash, it gets another life there, and begins with the newest shared weights.

    Raises:
        RecipeError: the recipe is for several learners and there is no address, or the other way round.
        SyncError: the syncer refuses this learner, or is not there.
    """
    if address is None:
        if recipe.sync.between is not None:
            raise RecipeError(
                f"sync.between is set and sync.learners is {recipe.sync.learners}, but this launch joins nobody. Start "
                "the whole run with python -m moe_async.launch, give --join HOST:PORT of a syncer, or train alone with "
                "--set sync.between=null --set sync.learners=1."
            )
        return None, None
    if recipe.sync.between is None:
        raise RecipeError(
            "--join is given but sync.between is null, so nothing would be exchanged. Leave --join out, or add a "
            "policy for each class of parameters to sync.between."
        )
    link = SyncerLink(*address, recipe.sync.timeout)
    hello = make_hello(recipe, world, learner)
    if checkpoint is not None:
        hello |= _comeback(checkpoint, world)
    return link, take_seat(link, hello, world, SYNCER_PATIENCE)


def _comeback(checkpoint: Path, world: World) -> Header:
    """Who a saved learner was.

    Raises:
        CheckpointError: the checkpoint is of a learner on its own, or of another number of ranks or expert-parallel
            size.
    """
    manifest = read_manifest(checkpoint)
    state = manifest.trainer.get("exchange")
    if not state:
        raise CheckpointError(
            f"{checkpoint} is of a learner that had not joined a run, so it has no place to come back to. Leave "
            "--resume out to join with the newest shared weights."
        )
    saved, own = (manifest.world_size, manifest.expert_parallel), (world.size, world.topology.expert_parallel)
    if saved != own:
        raise CheckpointError(
            f"{checkpoint} is of {saved[0]} ranks with expert-parallel size {saved[1]} but this learner has {own[0]} "
            f"with {own[1]}; what each rank had under way is its own. Start it with the same, or leave --resume out to "
            "join with the newest shared weights."
        )
    if state.get("via") == "all_reduce":
        # Learners that add up among themselves begin anew together; the syncer knows nothing of an earlier life.
        return {"learner": state["learner"]}
    fragments = {number: entry for policy in state["sync"]["policies"] for number, entry in policy["fragments"].items()}
    sequences = {number: entry["sequence"] for number, entry in fragments.items()}
    return {**{name: state[name] for name in ("learner", "incarnation", "clock")}, "sequences": sequences}


def make_exchange(
    engine: Engine, recipe: Recipe, link: SyncerLink, seat: Seat, stop: StopFlag, folder: RunFolder
) -> LearnerExchange:
    """The exchange of a learner that has a seat. Every rank calls it.

    Args:
        engine: the model in training.
        recipe: the resolved recipe.
        link, seat: of `join_run`.
        stop: raised when the run shall end early.
        folder: of this learner.
    """
    # Noise of routers and dropout follow from torch's random state, which is equal on all ranks of a learner; learners
    # draw apart, as ranks that see different tokens do.
    torch.manual_seed(recipe.train.seed + seat.learner)
    groups = sync_groups(recipe, engine.module)
    fragments = [fragment for group in groups for fragment in group.fragments]
    world = engine.world
    parts = LearnerParts(
        RankModel(engine.bridge, fragments),
        groups,
        expert_modules(engine.module),
        world,
        link,
        seat,
        stop,
        EventLog(folder.events, keep=False) if world.rank == 0 else None,
    )
    if recipe.sync.via == "all_reduce":
        # The decisions are the same everywhere, and one of all ranks writes them down.
        events = folder.path.parent / folder.events.name if world.rank == 0 and seat.learner == 0 else None
        return AllReduceExchange(parts, events)
    return SyncerExchange(parts, make_hello(recipe, world, seat.learner))
