"""The syncer over a network: sessions with the ranks of learners on one side, the merger on the other.

One thread does everything that decides; a thread for each direction of each session only moves messages. What the
merger is told is written down first (`moe_async.sync.journal`) and acknowledged after, so an acknowledged update is
never lost and a repeated one is never applied again.

Messages from a rank: ``hello`` (rank 0: may I join?), ``rank`` (another rank of a learner that may), ``ready``,
``update`` (its part of one), ``finish``, ``report``, ``pause`` (it will come back), ``bye``. To a rank: ``refused``,
``seat``, ``welcome``, ``publication``, ``ack``, ``final``. Where learners add up among themselves there is no merger:
`moe_async.sync.meeting` takes its place.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import Tensor

from moe_async.comm.connection import Connection
from moe_async.comm.session import Door, Header
from moe_async.errors import MoeAsyncError
from moe_async.sync.journal import Journal, apply_input
from moe_async.sync.lobby import Lobby
from moe_async.sync.meeting import Meeting, open_meeting
from moe_async.sync.merger import Merger, Outgoing
from moe_async.sync.messages import Publication, Welcome
from moe_async.sync.recovery import open_run
from moe_async.sync.run import RunDescription
from moe_async.sync.seats import Seat
from moe_async.sync.syncer_policy import read_header

_IDLE_SECONDS = 0.5


class MergingServer:
    """Merges for one run, or lets its learners meet, until all of them have finished.

    Args:
        door: where learners knock.
        describe: makes the run from the text of the first learner's recipe; raises `MoeAsyncError` to refuse it.
        compare: what keeps a learner out, see `Lobby`.
        say: shows a line.
        timeout: of sessions until a recipe says it.
        start_after: seconds after the first learner was ready after which the run begins though some are missing.
        snapshot_every: updates after which the state is written down as a whole.
    """

    def __init__(
        self,
        door: Door,
        describe: Callable[[str], RunDescription],
        compare: Callable[[Header, Header], str],
        say: Callable[[str], None],
        timeout: float,
        start_after: float,
        snapshot_every: int = 200,
    ) -> None:
        self.run: RunDescription | None = None
        self.merger: Merger | None = None
        self.reports: dict[int, dict[str, Any]] = {}
        self.meeting: Meeting | None = None
        self._describe, self._compare, self._say = describe, compare, say
        self._start_after, self._snapshot_every = start_after, snapshot_every
        self._journal: Journal | None = None
        self._events: queue.Queue[Callable[[], None]] = queue.Queue()
        self._began, self._offset = time.monotonic(), 0.0
        self._first_ready: float | None = None
        self._started = self._finale = self._paused = False
        self._absent: dict[int, float] = {}
        self._stops = 0
        self._lobby = Lobby(
            door,
            compare,
            say,
            lambda connection, header, payload: self._events.put(partial(self._receive, connection, header, payload)),
            lambda connection, reason: self._events.put(partial(self._lose, connection, reason)),
            timeout,
        )

    # Driving.

    def serve(self) -> None:
        """Serve until every learner that took part has finished and left, or `stop` is called."""
        while self._stops <= (self.meeting is not None) and not (self._ending and not self._lobby.seats):
            if self._stops and self.meeting is not None:
                self.meeting.halt("the syncer was told to stop")
            with suppress(queue.Empty):
                self._events.get(timeout=self._patience())()
            if self.merger is not None:
                self._tick(self.merger)
        self._lobby.close()
        if self._journal is not None and self.merger is not None:
            # Told to stop, and so are they: the next syncer waits for them as long as for a beginning.
            self._journal.pause(() if self._ending else self.merger.syncer.members, self._now())
            self._journal.close()

    @property
    def _ending(self) -> bool:
        """Whether nobody is waited for once all seats are empty: the run is over, or all learners were told to stop."""
        return self._finale or self._paused or (self.meeting is not None and self.meeting.over)

    def stop(self) -> None:
        """End `serve` soon; safe to call from a signal handler or another thread.

        Learners that meet stop together, so the first call has them told, and `serve` ends when they have left.
        """
        self._stops += 1

    def _now(self) -> float:
        return self._offset + time.monotonic() - self._began

    def _patience(self) -> float:
        due = self.merger.syncer.due() if self.merger is not None and self._started else None
        return _IDLE_SECONDS if due is None else min(max(due - self._now(), 0.0), _IDLE_SECONDS)

    def _tick(self, merger: Merger) -> None:
        if not self._started:
            self._start_if_ready()
            return
        for learner in [learner for learner, until in self._absent.items() if until <= self._now()]:
            self._count_out(learner)
        due = merger.syncer.due()
        if due is not None and due <= self._now():
            self._input({"kind": "tick", "now": self._now()})
        if not self._finale and merger.syncer.finished and not merger.syncer.pending():
            self._end(merger)

    # Learners.

    def _receive(self, connection: Connection, header: Header, payload: Tensor) -> None:
        handlers: dict[str, Callable[[Seat, int, Header, Tensor], None]] = {
            "ready": self._ready, "update": self._update, "finish": self._finish, "report": self._report,
            "pause": self._pause, "bye": self._bye,
        } | ({} if self.meeting is None else self.meeting.handlers)  # fmt: skip
        kind = str(header.get("kind"))
        found = self._lobby.seat_of(connection)
        try:
            if kind == "hello":
                self._hello(connection, header)
            elif kind == "rank":
                self._sit_down(self._lobby.rank(connection, header))
            elif kind not in handlers:
                self._lobby.refuse(connection, f"a message of kind {kind!r} is not known here.")
            elif found is not None:
                handlers[kind](*found, header, payload)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            self._lobby.refuse(connection, f"a message of kind {kind} does not fit ({error!r}).")

    def _hello(self, connection: Connection, header: Header) -> None:
        over = "the run is over." if self._finale and header.get("clock") is None else ""
        if closed := over or (self.meeting is not None and self.meeting.closed):
            return self._lobby.refuse(connection, closed)
        if self.run is None:
            try:
                self._prepare(self._describe(str(header["recipe"])), header)
            except MoeAsyncError as error:
                return self._lobby.refuse(connection, str(error))
        assert self.run is not None
        anew = header.get("clock") is None or (self.merger is not None and self._begins_anew(self.merger, header))
        seat = self._lobby.hello(connection, header, anew, self.run)
        if seat is not None and self.merger is not None and seat.learner in self.merger.syncer.members:
            # It has let go of its old session; should it not sit down soon in the new one, nobody waits for it.
            self._absent.setdefault(seat.learner, self._now() + self._lobby.grace)

    def _begins_anew(self, merger: Merger, header: Header) -> bool:
        """Whether a learner that wants to come back gets another life."""
        learner, incarnation = int(header["learner"]), int(header["incarnation"])
        sequences = {int(fragment): number for fragment, number in header.get("sequences", {}).items()}
        joined, given = merger.syncer.incarnations.get(learner), self._lobby.incarnations.get(learner)
        # One that never heard that it was given another life knocks as the one it was, which took part last.
        anew = joined == incarnation != given or merger.syncer.must_begin_anew(learner, incarnation, sequences)
        if anew:
            self._say(f"learner {learner} cannot go on where it was, for the run has: it begins with the newest values")
        return anew

    def _ready(self, seat: Seat, rank: int, header: Header, payload: Tensor) -> None:
        seat.ready = True
        self._sit_down(seat)

    def _sit_down(self, seat: Seat | None) -> None:
        """Let a learner take part once all its ranks are here, and the run has begun."""
        if seat is None or not seat.complete or seat.joined:
            return
        if self.meeting is not None:
            self.meeting.sit_down(seat)
            return
        self._first_ready = self._now() if self._first_ready is None else self._first_ready
        self._say(f"learner {seat.learner} is here ({seat.topology.world_size} ranks)")
        if self._started:
            self._join(seat)

    def _start_if_ready(self) -> None:
        ready = [seat for seat in self._lobby.seats.values() if seat.complete]
        if not ready or self._first_ready is None or self.run is None:
            return
        missing = self.run.learners - len(ready)
        if missing and self._now() - self._first_ready < self._start_after:
            return
        if missing:
            self._say(f"the run begins with {len(ready)} of {self.run.learners} learners")
        self._started = True
        for seat in sorted(ready, key=lambda seat: seat.learner):
            self._join(seat)

    def _join(self, seat: Seat) -> None:
        """Let a learner take part, and take what its ranks have sent since they came."""
        seat.joined = True
        self._paused = False
        self._absent.pop(seat.learner, None)
        who = {"learner": seat.learner, "incarnation": seat.incarnation, "clock": seat.clock}
        self._input({"kind": "join", "now": self._now(), **who})
        if self._finale and self.merger is not None:
            self._dismiss(seat, self.merger)
        early, seat.early = seat.early, []
        for rank, header, payload in early:
            self._update(seat, rank, header, payload)

    def _update(self, seat: Seat, rank: int, header: Header, payload: Tensor) -> None:
        update = read_header(header["header"])
        if (update.id.learner, update.id.incarnation) != (seat.learner, seat.incarnation):
            raise ValueError("it carries another learner's name")
        if not seat.joined or self.merger is None:
            # A rank that comes back sends at once what was not acknowledged, and another may not be here yet.
            seat.early.append((rank, header, payload))
            return
        acknowledgment = {"kind": "ack", "fragment": update.id.fragment, "sequence": update.id.sequence}
        if self.merger.syncer.has_received(update.id):
            # It was written down, and the acknowledgment lost with the session of this rank.
            seat.connections[rank].send(acknowledgment)
            return
        whole_X = seat.gather(update, rank, payload, self._fragments[update.id.fragment])
        if whole_X is not None:
            self._input({"kind": "arrive", "now": self._now(), "header": asdict(update)}, whole_X)
            seat.send(acknowledgment)

    def _finish(self, seat: Seat, rank: int, header: Header, payload: Tensor) -> None:
        seat.finished.add(rank)
        # Each rank says so behind its part of the last update, which may come later than another's.
        if len(seat.finished) == seat.topology.world_size:
            self._input({"kind": "finish", "now": self._now(), "learner": seat.learner})

    def _end(self, merger: Merger) -> None:
        """All have finished: everyone gets what came out."""
        self._finale = True
        self._say("all learners have finished")
        for seat in self._lobby.seats.values():
            if seat.joined:
                self._dismiss(seat, merger)

    def _dismiss(self, seat: Seat, merger: Merger) -> None:
        """Give a learner what came out of the run."""
        self._route(merger.publish_all(seat.learner, self._now()))
        # All end with the same weights, so one evaluates them: learner 0, unless it died and is not back.
        reporter = min(learner for learner, other in self._lobby.seats.items() if other.joined)
        seat.send({"kind": "final", "reporter": reporter, **merger.staleness.by_learner()})

    def _report(self, seat: Seat, rank: int, header: Header, payload: Tensor) -> None:
        self.reports[seat.learner] = dict(header["summary"])

    def _lose(self, connection: Connection, reason: str) -> None:
        found = self._lobby.seat_of(connection)
        if found is None:
            return
        seat, rank = found
        if rank in seat.left:
            # The others' last messages, such as the report, may still be under way.
            del seat.connections[rank]
            if seat.connections:
                return
        del self._lobby.seats[seat.learner]
        seat.close(wait=False)
        if self.meeting is not None:
            if rank not in seat.left:
                self.meeting.lose(seat, rank, reason)
        elif not self._finale:
            self._say(f"learner {seat.learner} is gone (rank {rank}: {reason})")
            if seat.paused:
                self._absent[seat.learner] = self._now() + self._lobby.timeout
            elif seat.joined:
                # It died, so it is started anew: the run has not been told to stop. Or only a connection was lost.
                self._paused = False
                self._absent[seat.learner] = self._now() + self._lobby.grace

    def _bye(self, seat: Seat, rank: int, header: Header, payload: Tensor) -> None:
        seat.left.add(rank)

    def _pause(self, seat: Seat, rank: int, header: Header, payload: Tensor) -> None:
        if self._journal is not None:
            self._journal.pause([seat.learner], self._now())
        seat.paused = self._paused = True

    def _count_out(self, learner: int) -> None:
        """Nobody waits for a learner any more."""
        self._absent.pop(learner, None)
        seat = self._lobby.seats.get(learner)
        if seat is not None and seat.clock is not None:
            # It was about to come back as the one it was. It shall ask again: there may be rounds now without it.
            del self._lobby.seats[learner]
            seat.close(wait=False)
        self._input({"kind": "leave", "now": self._now(), "learner": learner})

    # The merger.

    def _prepare(self, run: RunDescription, hello: Header) -> None:
        """Make the merger, or bring it back to where an earlier syncer of the same folder was."""
        if run.joint:
            self.run, self.meeting = run, open_meeting(run, hello, self._compare, self._lobby, self._say)
            return
        found = open_run(run, hello, self._compare)
        self.run, self.merger, self._journal = run, found.merger, found.journal
        self._lobby.timeout, self._lobby.first_hello = run.timeout, found.first_hello
        self._fragments = {f.number: f for group in run.groups for f in group.fragments}
        if found.recovered is None:
            return
        self._say(f"the run goes on where it was after {found.recovered:.1f} s")
        self._offset = found.recovered - (time.monotonic() - self._began)
        self._started = True
        self._lobby.incarnations = dict(self.merger.syncer.incarnations)
        # Whoever was here is about to knock again, or to be started again; until then the policies wait as before.
        patience = dict.fromkeys(found.journal.paused, self._start_after)
        self._absent = {n: self._now() + patience.get(n, run.timeout) for n in self.merger.syncer.members}

    def _input(self, entry: dict[str, Any], payload_X: Tensor | None = None) -> None:
        """Write down what happened, then act on it."""
        assert self.merger is not None and self._journal is not None
        self._journal.add(entry, payload_X)
        self._route(apply_input(self.merger, entry, payload_X))
        if self._journal.is_long(self._snapshot_every):
            state = {"merger": self.merger.state_dict(), "now": self._now(), "log_size": self.merger.log.size()}
            self._journal.snapshot(state, self.merger.tensors())

    def _route(self, outgoing: Sequence[Outgoing]) -> None:
        for entry in outgoing:
            seat = self._lobby.seats.get(entry.message.learner)
            if seat is None or not seat.joined:
                # Its ranks are not all here, and each has to get the same messages; joining brings everything.
                continue
            if isinstance(entry.message, Welcome):
                seat.send({"kind": "welcome", "clock": entry.message.clock})
            elif isinstance(entry.message, Publication) and entry.value_X is not None:
                fragment = self._fragments[entry.message.fragment]
                seat.send_value({"kind": "publication", **asdict(entry.message)}, fragment, entry.value_X)
