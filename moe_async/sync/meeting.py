"""What the syncer does for learners that add up among themselves: it says when all are there, and when one is gone.

An all-reduce hangs while a partner is missing, and learners of uneven pace come to it minutes apart. So a learner
enters one only after the syncer has said ``go``, which it says once every rank of every learner is ``at`` the same
place. Until then a slow learner is told from a dead one by its connection, on which it gives signs of life; the time
limit of an all-reduce is only for learners that are in it.

``go`` and ``halt`` come to all ranks in one order, so all learners stop between the same two exchanges: after the first
``halt`` nobody is told to go any more.

Messages from a rank: ``ready`` (rank 0: its learner may begin), ``at`` (with ``place``, what it wants to exchange),
``halt`` (rank 0: its learner stops). To a rank: ``begin``, ``go``, ``halt``, and ``refused`` when the run cannot go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from moe_async.comm.session import Header
from moe_async.errors import SyncError
from moe_async.sync.journal import keep_hello
from moe_async.sync.lobby import Lobby
from moe_async.sync.run import RunDescription
from moe_async.sync.seats import Seat

_HALT: Header = {"kind": "halt"}


class Meeting:
    """Keeps the learners of a run together; no I/O but messages, and no tensors. All take part from begin to end.

    Args:
        run: what is run.
        seats: of the learners that are here, by learner; kept by whoever lets them in.
        say: shows a line.

    Attributes:
        problem: why the run cannot go on; empty while it can.
    """

    def __init__(self, run: RunDescription, seats: Mapping[int, Seat], say: Callable[[str], None]) -> None:
        self.problem = ""
        self._run, self._seats, self._say = run, seats, say
        self._begun = self._halted = self._finished = False
        self._at: dict[tuple[int, int], Any] = {}

    @property
    def over(self) -> bool:
        """Whether nobody is waited for once all seats are empty."""
        return self._finished or self._halted or bool(self.problem)

    @property
    def closed(self) -> str:
        """Why a learner that comes now may not take part; empty when it may."""
        if self.problem or not (self._begun or self._halted):
            return self.problem
        return (
            "the run has begun with all its learners (sync.via is all_reduce), or was stopped. Once they have ended, "
            f"start the whole run again with python -m moe_async.launch RECIPE --resume {self._run.folder}."
        )

    def sit_down(self, seat: Seat) -> None:
        """A learner is here with all its ranks; the run begins once all are."""
        self._say(f"learner {seat.learner} is here ({seat.topology.world_size} ranks)")
        complete = [entry for entry in self._seats.values() if entry.complete]
        if self._halted:
            seat.send(_HALT)
        elif len(complete) == self._run.learners and not self.over:
            self._begun = True
            self._tell({"kind": "begin"})

    @property
    def handlers(self) -> dict[str, Callable[[Seat, int, Header, Tensor], None]]:
        """What is done when a rank says something, by kind."""
        return {"at": self._come, "halt": self._halt}

    def _come(self, seat: Seat, rank: int, header: Header, payload: Tensor) -> None:
        self._at[seat.learner, rank] = header["place"]
        ranks = sum(entry.topology.world_size for entry in self._seats.values())
        if len(self._at) < ranks or len(self._seats) < self._run.learners or self.over:
            return
        places = {learner: place for (learner, _), place in sorted(self._at.items())}
        if any(place != places[0] for place in self._at.values()):
            self._break(f"the learners have come to different places of the run, {places}.")
            return
        self._at.clear()
        if header["place"]["last"]:
            self._finished = True
            self._say("all learners have finished")
        self._tell({"kind": "go"})

    def _halt(self, seat: Seat, rank: int, header: Header, payload: Tensor) -> None:
        self.halt(f"learner {seat.learner} stops")

    def halt(self, why: str) -> None:
        """Nobody goes on: all learners save what they have, and leave."""
        if not self._halted:
            self._halted = True
            self._say(f"{why}, so all learners do")
            self._tell(_HALT)

    def lose(self, seat: Seat, rank: int, reason: str) -> None:
        """A learner is gone without a goodbye; it has no seat any more."""
        gone = f"learner {seat.learner} is gone (rank {rank}: {reason})"
        if self._halted or self.problem or not self._begun:
            self._say(gone)
        else:
            self._break(f"{gone}; sync.via is all_reduce, under which all learners take part to the end.")

    def _break(self, problem: str) -> None:
        self.problem = (
            f"{problem} Start the whole run again with python -m moe_async.launch RECIPE --resume {self._run.folder}, "
            "which goes on from the newest checkpoints that fit together."
        )
        self._tell({"kind": "refused", "reason": self.problem})

    def _tell(self, header: Header) -> None:
        for seat in self._seats.values():
            seat.send(header)


def open_meeting(
    run: RunDescription,
    hello: Header,
    compare: Callable[[Header, Header], str],
    lobby: Lobby,
    say: Callable[[str], None],
) -> Meeting:
    """The meeting of a run of which the first learner has come with ``hello``; arguments as in `Lobby`.

    Raises:
        SyncError: the run's folder is of a run with another recipe or code.
    """
    first = keep_hello(run.folder / "syncer", hello)
    if problem := compare(first, hello):
        raise SyncError(problem)
    lobby.timeout, lobby.first_hello = run.timeout, first
    return Meeting(run, lobby.seats, say)
