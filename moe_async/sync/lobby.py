"""Letting learners in: sessions for all who knock, a check at the door, and a seat for each learner.

Sessions open and messages move in threads of their own; everything else happens in the thread of `MergingServer.serve`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch import Tensor

from moe_async.comm.connection import Connection
from moe_async.comm.session import Door, Header
from moe_async.errors import CommunicationError
from moe_async.sync.run import RunDescription
from moe_async.sync.seats import Seat
from moe_async.topology import Topology

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 3.0

Receive = Callable[[Connection, Header, Tensor], None]
Lose = Callable[[Connection, str], None]


class Lobby:
    """Who is here.

    Args:
        door: where learners knock.
        compare: from the hello of the first learner and that of another to what keeps the other out; empty: nothing.
        say: shows a line.
        receive, lose: called from threads, for each message of a connection and when one has ended.
        timeout: of sessions, in seconds.
    """

    def __init__(
        self,
        door: Door,
        compare: Callable[[Header, Header], str],
        say: Callable[[str], None],
        receive: Receive,
        lose: Lose,
        timeout: float,
    ) -> None:
        self.seats: dict[int, Seat] = {}
        self.incarnations: dict[int, int] = {}
        self.first_hello: Header = {}
        self.timeout = timeout
        self._door, self._compare, self._say = door, compare, say
        self._receive, self._lose = receive, lose
        self._closed = threading.Event()
        threading.Thread(target=self._let_in, name="door", daemon=True).start()

    @property
    def grace(self) -> float:
        """A learner that has lost a connection may take so many seconds to be back before nobody waits for it."""
        return min(_GRACE_SECONDS, self.timeout)

    def _let_in(self) -> None:
        """Open a session for everyone who knocks, each in a thread of its own: one that went away delays nobody."""
        while not self._closed.is_set():
            for ticket in self._door.tickets():
                threading.Thread(target=self._open, args=(ticket,), name=f"ticket-{ticket}", daemon=True).start()
            time.sleep(_POLL_SECONDS)

    def _open(self, ticket: int) -> None:
        try:
            session = self._door.open(ticket)
        except CommunicationError:
            return
        ready = threading.Event()
        box: list[Connection] = []

        def on_message(header: Header, payload: Tensor) -> None:
            ready.wait()
            self._receive(box[0], header, payload)

        def on_lost(reason: str) -> None:
            ready.wait()
            self._lose(box[0], reason)

        box.append(Connection(session, self.timeout, on_message, on_lost))
        ready.set()

    def close(self) -> None:
        """Let nobody in any more, and end all sessions."""
        self._closed.set()
        for seat in self.seats.values():
            seat.close()

    def refuse(self, connection: Connection, reason: str, later: bool = False) -> None:
        """Tell a rank why it may not be here, or not yet (``later``), and end its session."""
        self._say(f"refused: {reason}")
        connection.send({"kind": "refused", "reason": reason, "later": later})
        threading.Thread(target=_close_later, args=(connection,), daemon=True).start()

    def hello(self, connection: Connection, header: Header, anew: bool, run: RunDescription) -> Seat | None:
        """Give a learner a seat, or refuse it; its other ranks follow.

        Args:
            connection: of its rank 0.
            header: what it says.
            anew: it begins another life.
            run: the run.
        """
        # Those who knocked before the first recipe was known have another limit.
        connection.limit(self.timeout)
        if problem := self._compare(self.first_hello, header):
            self.refuse(connection, problem)
            return None
        self._give_up(header)
        wanted, learners = int(header["learner"]), run.learners
        if wanted >= learners:
            self.refuse(
                connection,
                f"place {wanted} does not exist: the run is for {learners} learners. Use --learner 0 to {learners - 1}"
                ", or start a run with a larger sync.learners.",
            )
            return None
        learner = self._free_place(wanted, learners)
        if learner is None:
            # A learner that was started anew may knock before its former life is quite gone.
            self.refuse(
                connection,
                (f"place {wanted} is" if wanted >= 0 else f"all {learners} places are")
                + " taken. Wait until a learner "
                "has left, or start a run with a larger sync.learners.",
                later=True,
            )
            return None
        clock = None if anew else header["clock"]
        if anew:
            self.incarnations[learner] = self.incarnations.get(learner, -1) + 1
        elif header["incarnation"] != self.incarnations.get(learner):
            replaced = f"learner {learner} has been started anew meanwhile."
            unknown = (
                f"this run has had no learner {learner} yet, so none can come back. Start the syncer with the --folder "
                "of the run that the learner was in, or the learner without --resume."
            )
            self.refuse(connection, replaced if learner in self.incarnations else unknown)
            return None
        topology = Topology(int(header["world_size"]), int(header["expert_parallel"]), run.num_experts)
        seat = Seat(learner, self.incarnations[learner], topology, clock)
        self.seats[learner] = seat
        seat.connections[0] = connection
        seat.send(
            {
                "kind": "seat", "learner": learner, "incarnation": seat.incarnation, "learners": learners,
                "folder": run.folder.name,
            }
        )  # fmt: skip
        return seat

    def _give_up(self, header: Header) -> None:
        """Whoever comes back has lost its connection, though nothing of that may have been noticed here yet."""
        seat = self.seats.get(int(header["learner"]))
        if seat is not None and header.get("incarnation") == seat.incarnation:
            del self.seats[seat.learner]
            seat.close(wait=False)

    def _free_place(self, wanted: int, learners: int) -> int | None:
        free = [number for number in range(learners) if number not in self.seats]
        if wanted < 0:
            return free[0] if free else None
        return wanted if wanted in free else None

    def rank(self, connection: Connection, header: Header) -> Seat | None:
        """Another rank of a learner that has a seat."""
        seat = self.seats.get(int(header["learner"]))
        if seat is None or seat.incarnation != header["incarnation"] or header["rank"] not in seat.missing():
            # Its rank 0 may have lost its own session meanwhile; it knocks again, and then the others do.
            reason = f"learner {header['learner']} has no free place for rank {header['rank']}."
            self.refuse(connection, reason, later=True)
            return None
        seat.connections[int(header["rank"])] = connection
        return seat

    def seat_of(self, connection: Connection) -> tuple[Seat, int] | None:
        """The seat and the rank that a connection belongs to."""
        for seat in self.seats.values():
            for rank, known in seat.connections.items():
                if known is connection:
                    return seat, rank
        return None


def _close_later(connection: Connection) -> None:
    """Close a connection once its last message has gone out and could be read."""
    connection.flush(5.0)
    time.sleep(1.0)
    connection.close()
