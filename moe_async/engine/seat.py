"""A learner's place in a run, and how its ranks get there."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from moe_async.comm import World
from moe_async.comm.session import Header
from moe_async.engine.syncer_link import SyncerLink
from moe_async.errors import CommunicationError, PlaceTakenError, SyncError

_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Seat:
    """A learner's place in the run, as the syncer gave it.

    Attributes:
        learner, incarnation: who this is.
        learners: how many there are.
        folder: name of the run's folder.
    """

    learner: int
    incarnation: int
    learners: int
    folder: str


def take_seat(link: SyncerLink, hello: Header, world: World, patience: float) -> Seat:
    """Join a run. Every rank calls it, once; blocks until the syncer has answered.

    Args:
        link: this rank's.
        hello: what rank 0 says to the syncer.
        world: this rank's view of the learner.
        patience: seconds for which the syncer may not be there yet, or the place be taken.

    Raises:
        SyncError: on all ranks: the syncer refuses this learner, or is not there.
    """
    answer: Seat | str = ""
    if world.rank == 0:
        answer = _ask(link, hello, patience)
    answer = world.everyone.broadcast_object(answer)
    problem = answer if isinstance(answer, str) else ""
    if world.rank and isinstance(answer, Seat):
        try:
            link.connect(rank_hello(answer, world), patience)
        except CommunicationError as error:
            problem = str(error)
    problems = [text for text in world.everyone.gather_objects(problem) if text]
    if problems or isinstance(answer, str):
        raise SyncError(problems[0])
    return answer


def _ask(link: SyncerLink, hello: Header, patience: float) -> Seat | str:
    """On rank 0: the seat, or why there is none."""
    deadline = time.monotonic() + patience
    while True:
        try:
            link.connect(hello, max(deadline - time.monotonic(), 0.0))
            return given_seat(link.reply())
        except PlaceTakenError as error:
            if time.monotonic() > deadline:
                return str(error)
            time.sleep(_RETRY_SECONDS)
        except (SyncError, CommunicationError) as error:
            return str(error)


def given_seat(reply: Header) -> Seat:
    """The seat that the syncer tells of."""
    return Seat(reply["learner"], reply["incarnation"], reply["learners"], reply["folder"])


def rank_hello(seat: Seat, world: World) -> Header:
    """What a rank other than the first says to the syncer."""
    return {"kind": "rank", "learner": seat.learner, "incarnation": seat.incarnation, "rank": world.rank}


def address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write HOST:PORT, such as 127.0.0.1:29400")
    return host.strip("[]"), int(port)
