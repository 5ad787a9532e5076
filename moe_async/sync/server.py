"""The syncer over a network: sessions with the ranks of learners on one side, the merger on the other.

One thread does everything that decides; a thread for each direction of each session only moves messages. What the
merger is told is written down first (`moe_async.sync.journal`) and acknowledged after, so an acknowledged update is
never lost and a repeated one is never applied again.

Messages from a rank: ``hello`` (rank 0: may I join?), ``rank`` (another rank of a learner that may), ``update`` (its
part of one), ``finish``, ``bye``. To a rank: ``refused``, ``seat``, ``welcome``, ``publication``, ``ack``, ``final``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_async.comm.connection import Connection
from moe_async.comm.session import Door, Header
from moe_async.errors import CommunicationError, SyncError
from moe_async.sync.event_log import EventLog
from moe_async.sync.journal import Journal, apply_input
from moe_async.sync.merger import Merger, Outgoing, Schedule
from moe_async.sync.messages import Publication, Welcome
from moe_async.sync.seats import Seat
from moe_async.sync.syncer import SyncGroup
from moe_async.sync.syncer_policy import read_header
from moe_async.topology import Topology

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class RunDescription:
    """What the first learner's recipe makes of a run.

    Attributes:
        recipe: its text.
        folder: where the syncer writes, made already.
        learners: expected number of learners.
        num_experts: of each MoE layer.
        groups: what is exchanged under which policy.
        initial: version 0 of every fragment.
        schedule: of the outer learning rate.
        timeout: seconds of silence after which a partner counts as gone.
    """

    recipe: str
    folder: Path
    learners: int
    num_experts: int
    groups: Sequence[SyncGroup]
    initial: Mapping[int, Tensor]
    schedule: Schedule
    timeout: float


class MergingServer:
    """Merges for one run until all learners have finished.

    Args:
        door: where learners knock.
        describe: makes the run from the text of the first learner's recipe; raises `MoeAsyncError` to refuse it.
        compare: from the hello of a learner and that of the first one to what keeps it out; empty when nothing does.
        say: shows a line.
        timeout: of sessions before a recipe says it.
        start_after: seconds after the first learner joined after which the run begins though some are missing.
    """

    def __init__(
        self,
        door: Door,
        describe: Callable[[str], RunDescription],
        compare: Callable[[Header, Header], str],
        say: Callable[[str], None],
        timeout: float,
        start_after: float,
    ) -> None:
        self.run_description: RunDescription | None = None
        self.merger: Merger | None = None
        self._door, self._describe, self._compare, self._say = door, describe, compare, say
        self._timeout, self._start_after = timeout, start_after
        self._journal: Journal | None = None
        self._first_hello: Header = {}
        self._events: queue.Queue[Callable[[], None]] = queue.Queue()
        self._seats: dict[int, Seat] = {}
        self._incarnations: dict[int, int] = {}
        self._strangers: set[Connection] = set()
        self._began = time.monotonic()
        self._offset = 0.0
        self._first_seat_at: float | None = None
        self._started = False
        self._finale = False
        self._stop = threading.Event()
        self._served: set[int] = set()

    # Driving.

    def serve(self) -> None:
        """Serve until every learner that took part has finished and left, or `stop` is called."""
        threading.Thread(target=self._let_in, name="door", daemon=True).start()
        while not self._stop.is_set() and not self._over():
            try:
                event = self._events.get(timeout=self._patience())
            except queue.Empty:
                self._tick()
                continue
            event()
            self._tick()
        for seat in self._seats.values():
            seat.close()
        if self._journal is not None:
            self._journal.close()

    def stop(self) -> None:
        """End `serve` soon; safe to call from a signal handler or another thread."""
        self._stop.set()

    def _over(self) -> bool:
        return self._finale and not self._seats

    def _now(self) -> float:
        return self._offset + time.monotonic() - self._began

    def _patience(self) -> float:
        due = self.merger.syncer.due() if self.merger is not None and self._started else None
        return 0.5 if due is None else min(max(due - self._now(), 0.0), 0.5)

    def _tick(self) -> None:
        merger = self.merger
        if merger is None:
            return
        if not self._started:
            self._start_if_ready()
            return
        due = merger.syncer.due()
        if due is not None and due <= self._now():
            self._input({"kind": "tick", "now": self._now()})
        if not self._finale and merger.syncer.finished and not merger.syncer.pending():
            self._end()

    def _let_in(self) -> None:
        """Open a session for everyone who knocks, each in a thread of its own: one that went away delays nobody."""
        while not self._stop.is_set():
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
            self._events.put(partial(self._receive, box[0], header, payload))

        def on_lost(reason: str) -> None:
            ready.wait()
            self._events.put(partial(self._lose, box[0], reason))

        box.append(Connection(session, self._timeout, on_message, on_lost))
        ready.set()

    # Messages.

    def _receive(self, connection: Connection, header: Header, payload: Tensor) -> None:
        handlers = {"hello": self._hello, "rank": self._rank, "update": self._update, "finish": self._finish}
        handler = handlers.get(str(header.get("kind")))
        if handler is None:
            if header.get("kind") != "bye":
                self._refuse(connection, f"a message of kind {header.get('kind')!r} is not known here.")
            return
        try:
            handler(connection, header, payload)
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(connection, f"a message of kind {header['kind']} does not fit ({error!r}).")

    def _refuse(self, connection: Connection, reason: str) -> None:
        self._say(f"refused: {reason}")
        connection.send({"kind": "refused", "reason": reason})
        threading.Thread(target=self._close_later, args=(connection,), daemon=True).start()

    @staticmethod
    def _close_later(connection: Connection) -> None:
        """Close a connection once its last message has gone out and could be read."""
        connection.flush(5.0)
        time.sleep(1.0)
        connection.close()

    def _hello(self, connection: Connection, header: Header, payload: Tensor) -> None:
        if self.run_description is None:
            try:
                self._prepare(header)
            except SyncError as error:
                self._refuse(connection, str(error))
                return
        assert self.run_description is not None
        if problem := self._compare(self._first_hello, header):
            self._refuse(connection, problem)
            return
        if self._finale:
            self._refuse(connection, "the run is over.")
            return
        learner = self._place(int(header["learner"]))
        if learner is None:
            self._refuse(
                connection,
                f"the run is for {self.run_description.learners} learners, and learner {header['learner']} is taken or "
                "does not exist. Wait until one has left, or start a run with a larger sync.learners.",
            )
            return
        clock = header.get("clock")
        if clock is None:
            self._incarnations[learner] = self._incarnations.get(learner, -1) + 1
        elif header["incarnation"] != self._incarnations.get(learner):
            self._refuse(connection, f"learner {learner} has been started anew meanwhile.")
            return
        topology = Topology(int(header["world_size"]), int(header["expert_parallel"]), self.run_description.num_experts)
        seat = Seat(learner, self._incarnations[learner], topology, clock)
        self._seats[learner] = seat
        seat.connections[0] = connection
        seat.send(
            {
                "kind": "seat", "learner": learner, "incarnation": seat.incarnation,
                "learners": self.run_description.learners, "folder": self.run_description.folder.name,
            }
        )  # fmt: skip
        self._sit_down(seat)

    def _place(self, wanted: int) -> int | None:
        assert self.run_description is not None
        free = [n for n in range(self.run_description.learners) if n not in self._seats]
        if wanted < 0:
            return free[0] if free else None
        return wanted if wanted in free else None

    def _rank(self, connection: Connection, header: Header, payload: Tensor) -> None:
        seat = self._seats.get(int(header["learner"]))
        if seat is None or seat.incarnation != header["incarnation"] or header["rank"] in seat.connections:
            self._refuse(connection, f"learner {header['learner']} has no free place for rank {header['rank']}.")
            return
        seat.connections[int(header["rank"])] = connection
        self._sit_down(seat)

    def _sit_down(self, seat: Seat) -> None:
        """Let a learner take part once all its ranks are here, and the run has begun."""
        if not seat.complete:
            return
        if self._first_seat_at is None:
            self._first_seat_at = self._now()
        self._say(f"learner {seat.learner} is here ({seat.topology.world_size} ranks)")
        if self._started:
            self._join(seat)

    def _start_if_ready(self) -> None:
        assert self.run_description is not None
        ready = [seat for seat in self._seats.values() if seat.complete]
        if not ready or self._first_seat_at is None:
            return
        waited = self._now() - self._first_seat_at
        if len(ready) < self.run_description.learners and waited < self._start_after:
            return
        if len(ready) < self.run_description.learners:
            self._say(f"the run begins with {len(ready)} of {self.run_description.learners} learners")
        self._started = True
        for seat in sorted(ready, key=lambda seat: seat.learner):
            self._join(seat)

    def _join(self, seat: Seat) -> None:
        self._input(
            {
                "kind": "join", "now": self._now(), "learner": seat.learner, "incarnation": seat.incarnation,
                "clock": seat.clock,
            }
        )  # fmt: skip

    def _update(self, connection: Connection, header: Header, payload: Tensor) -> None:
        found = self._seat_of(connection)
        if found is None or self.merger is None:
            return
        seat, rank = found
        update = read_header(header["header"])
        if (update.id.learner, update.id.incarnation) != (seat.learner, seat.incarnation):
            raise ValueError("it carries another learner's name")
        whole_X = seat.gather(update, rank, payload, self._fragments[update.id.fragment])
        if whole_X is None:
            return
        assert self._journal is not None
        self._input(self._journal.arrival(update, self._now()), whole_X)
        seat.send({"kind": "ack", "fragment": update.id.fragment, "sequence": update.id.sequence})

    def _finish(self, connection: Connection, header: Header, payload: Tensor) -> None:
        found = self._seat_of(connection)
        if found is not None and found[1] == 0 and not found[0].final:
            found[0].final = True
            self._input({"kind": "finish", "now": self._now(), "learner": found[0].learner})

    def _end(self) -> None:
        """All have finished: everyone gets what came out."""
        assert self.merger is not None
        self._finale = True
        self._say("all learners have finished")
        for seat in self._seats.values():
            self._route(self.merger.publish_all(seat.learner, self._now()))
            seat.send({"kind": "final"})

    def _lose(self, connection: Connection, reason: str) -> None:
        found = self._seat_of(connection)
        if found is None:
            return
        seat, rank = found
        del self._seats[seat.learner]
        if not self._finale:
            self._say(f"learner {seat.learner} is gone (rank {rank}: {reason})")
        seat.close()
        if self._started and not self._finale:
            self._input({"kind": "leave", "now": self._now(), "learner": seat.learner})

    def _seat_of(self, connection: Connection) -> tuple[Seat, int] | None:
        for seat in self._seats.values():
            for rank, known in seat.connections.items():
                if known is connection:
                    return seat, rank
        return None

    # The merger.

    def _prepare(self, hello: Header) -> None:
        description = self._describe(str(hello["recipe"]))
        self.run_description = description
        self._first_hello = hello
        self._timeout = description.timeout
        self._fragments = {f.number: f for group in description.groups for f in group.fragments}
        log = EventLog(description.folder / "events.jsonl", keep=False)
        self.merger = Merger(description.groups, description.initial, description.learners, log, description.schedule)
        self._journal = Journal(description.folder / "syncer")

    def _input(self, entry: dict[str, Any], payload_X: Tensor | None = None) -> None:
        """Write down what happened, then act on it."""
        assert self.merger is not None and self._journal is not None
        self._journal.add(entry, payload_X)
        self._route(apply_input(self.merger, entry, payload_X))

    def _route(self, outgoing: Sequence[Outgoing]) -> None:
        for entry in outgoing:
            seat = self._seats.get(entry.message.learner)
            if seat is None:
                continue
            if isinstance(entry.message, Welcome):
                seat.send({"kind": "welcome", "clock": entry.message.clock})
            elif isinstance(entry.message, Publication) and entry.value_X is not None:
                fragment = self._fragments[entry.message.fragment]
                seat.send_value({"kind": "publication", **asdict(entry.message)}, fragment, entry.value_X)
