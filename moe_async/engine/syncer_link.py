"""A rank's connection to the syncer: what it gets in order, and what it sends until that is acknowledged."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from moe_async.comm.connection import Connection
from moe_async.comm.session import Header, knock
from moe_async.errors import CommunicationError, PlaceTakenError, SyncError

_REPLY_TIMEOUTS = 10
"""An answer to a hello may take so many time limits, as long as there are signs of life."""

_ORDERED = ("welcome", "publication", "final", "begin", "go", "halt")
"""Kinds of messages that all ranks of a learner get in the same order."""


class SyncerLink:
    """One rank's link; reconnects when told to.

    Args:
        host, port: where the syncer listens.
        timeout: seconds of silence after which it counts as gone.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self.host, self.port, self.timeout = host, port, timeout
        self._connection: Connection | None = None
        self._news = threading.Condition()
        self._inbox: deque[tuple[Header, Tensor]] = deque()
        self._reply: Header | None = None
        self._unacknowledged: dict[tuple[int, int], tuple[Mapping[str, Any], Tensor]] = {}
        self._bytes_before = (0, 0)
        self._generation = 0
        self._behind = False
        self.received = 0

    @property
    def lost(self) -> bool:
        """Whether there is no connection."""
        return self._connection is None or self._connection.lost

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes sent and received, on all connections so far."""
        sent, received = self._bytes_before
        if self._connection is not None:
            sent, received = sent + self._connection.bytes_sent, received + self._connection.bytes_received
        return sent, received

    def connect(self, hello: Header, patience: float = 0.0) -> None:
        """Make a connection and say hello. Blocks; for ``patience`` seconds it tries again while nobody answers.

        Raises:
            CommunicationError: nobody answers.
        """
        self.disconnect()
        deadline = time.monotonic() + patience
        while True:
            try:
                session = knock(self.host, self.port, self.timeout)
                break
            except CommunicationError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        with self._news:
            self._reply = None
            self._generation += 1
        on_message = partial(self._on_message, self._generation)
        self._connection = Connection(session, self.timeout, on_message, self._on_lost)
        self._connection.send(hello)

    def reply(self) -> Header:
        """What the syncer answers to a hello. Blocks.

        Raises:
            SyncError: it refuses; PlaceTakenError when it may not refuse later.
            CommunicationError: it goes away.
        """
        with self._news:
            # Before it answers the first learner, the syncer makes the model; silence is noticed by the connection.
            self._news.wait_for(lambda: self._reply is not None or self.lost, _REPLY_TIMEOUTS * self.timeout)
            reply = self._reply
        if reply is None:
            raise CommunicationError(f"the syncer at {self.host}:{self.port} went away before it answered.")
        if reply["kind"] == "refused":
            kind = PlaceTakenError if reply.get("later") else SyncError
            raise kind(f"the syncer at {self.host}:{self.port} refuses this learner: {reply['reason']}")
        return reply

    @property
    def refusal(self) -> str:
        """Why the syncer has put this rank out; empty while it has not, or only for now."""
        reply = self._reply
        final = reply is not None and reply["kind"] == "refused" and not reply.get("later")
        return str(reply["reason"]) if reply is not None and final else ""

    def post(self, fragment: int, sequence: int, header: Mapping[str, Any], payload: Tensor) -> None:
        """Send an update, and keep it until the syncer has acknowledged it. Does not block.

        On a new connection nothing goes out before `post_again`: the syncer takes a newer update for a sign that the
        older ones have come.
        """
        with self._news:
            self._unacknowledged[fragment, sequence] = (header, payload)
        if not self._behind:
            self.send(header, payload)

    def post_again(self) -> None:
        """Send everything that is not acknowledged, oldest first, and from now on what is posted."""
        self._behind = False
        for header, payload in self.outbox():
            self.send(header, payload)

    def send(self, header: Mapping[str, Any], payload: Tensor | None = None) -> None:
        """Send a message, if there is a connection. Does not block."""
        if self._connection is not None and not self._connection.lost:
            self._connection.send(header, payload)

    def report(self, summary: Mapping[str, Any]) -> None:
        """Tell the syncer how it went. Does not block."""
        self.send({"kind": "report", "summary": summary})

    def outbox(self) -> list[tuple[Mapping[str, Any], Tensor]]:
        """Updates that are not acknowledged, oldest first."""
        with self._news:
            return list(self._unacknowledged.values())

    def load_outbox(self, updates: Sequence[tuple[Mapping[str, Any], Tensor]]) -> None:
        """Put back what `outbox` gave; `post_again` sends it."""
        with self._news:
            for header, payload in updates:
                key = header["header"]["id"]["fragment"], header["header"]["id"]["sequence"]
                self._unacknowledged[key] = (header, payload)

    def forget(self) -> None:
        """Give up what is not acknowledged: it is of a life that is over."""
        with self._news:
            self._unacknowledged.clear()

    def next(self, count: int) -> list[tuple[Header, Tensor]]:
        """The next ``count`` ordered messages, which have come."""
        with self._news:
            return [self._inbox.popleft() for _ in range(count)]

    def wait(self, more_than: int, seconds: float) -> None:
        """Wait until more ordered messages than that have come, the link is lost, or the time is up."""
        with self._news:
            self._news.wait_for(lambda: self.received > more_than or self.lost, seconds)

    def disconnect(self) -> None:
        """End the connection; what is not acknowledged is kept."""
        connection, self._connection = self._connection, None
        if connection is not None:
            sent, received = self._bytes_before
            self._bytes_before = sent + connection.bytes_sent, received + connection.bytes_received
            connection.close(wait=False)
        with self._news:
            self._inbox.clear()
            self._behind = True
            self._generation += 1
            self.received = 0

    def leave(self) -> None:
        """Say goodbye and end the connection. Blocks for a moment at most."""
        if self._connection is not None:
            self._connection.send({"kind": "bye"})
            self._connection.flush(5.0)
        self.disconnect()

    def _on_message(self, generation: int, header: Header, payload: Tensor) -> None:
        with self._news:
            if generation != self._generation:
                # The last words of a connection that is no more.
                return
            if header["kind"] in _ORDERED:
                self._inbox.append((header, payload))
                self.received += 1
            elif header["kind"] == "ack":
                self._unacknowledged.pop((header["fragment"], header["sequence"]), None)
            else:
                self._reply = header
            self._news.notify_all()

    def _on_lost(self, reason: str) -> None:
        with self._news:
            self._news.notify_all()
