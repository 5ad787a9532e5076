"""A session with threads of its own: messages go out in order without blocking, and come in as they arrive.

Both sides send a sign of life when they have nothing to say, so that silence means that something is wrong.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from moe_async.comm.session import Header, Session
from moe_async.errors import CommunicationError

OnMessage = Callable[[Header, Tensor], None]
OnLost = Callable[[str], None]

_BEAT: Header = {"kind": "beat"}
_MARK: Header = {"kind": "mark"}
_END: Header = {"kind": "end"}
_BEATS_PER_TIMEOUT = 4
_LONGEST_BEAT = 5.0
_JOIN_SECONDS = 5.0


class Connection:
    """Sends and receives in the background until the partner is gone.

    Args:
        session: an open session; the connection is its only user from now on.
        timeout: see `limit`.
        on_message: called from the receiving thread for each message, in order.
        on_lost: called once from one of the threads, with the reason, when the session has ended.
    """

    def __init__(self, session: Session, timeout: float, on_message: OnMessage, on_lost: OnLost) -> None:
        self._session = session
        self.limit(timeout)
        self._on_message, self._on_lost = on_message, on_lost
        self._outbox: queue.Queue[tuple[Mapping[str, Any], Tensor | None]] = queue.Queue()
        self._ended, self._flushed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._send_all, "session-send"), (self._receive_all, "session-receive"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lost(self) -> bool:
        """Whether the session has ended."""
        return self._ended.is_set()

    @property
    def bytes_sent(self) -> int:
        """So far."""
        return self._session.bytes_sent

    @property
    def bytes_received(self) -> int:
        """So far."""
        return self._session.bytes_received

    def limit(self, timeout: float) -> None:
        """Set the seconds of silence after which the partner counts as gone; a sign of life goes out four times in it.

        A transfer under way keeps the limit that it began with, and the partner may have another until it knows this
        one, so a sign of life never waits long.
        """
        self._session.limit(timeout)
        self._beat = min(timeout / _BEATS_PER_TIMEOUT, _LONGEST_BEAT)

    def send(self, header: Mapping[str, Any], payload: Tensor | None = None) -> None:
        """Put a message into the queue of those to be sent. Does not block. The payload must not change any more."""
        self._outbox.put((header, payload))

    def flush(self, seconds: float) -> bool:
        """Wait until everything is sent, or the session has ended, or the time is up. Whether everything is sent."""
        self._flushed.clear()
        self._outbox.put((_MARK, None))
        deadline = time.monotonic() + seconds
        while not self._flushed.wait(0.05) and not self.lost and time.monotonic() < deadline:
            pass
        return self._flushed.is_set()

    def close(self, wait: bool = True) -> None:
        """End the session; the partner is told.

        Args:
            wait: until the threads are gone, for a few seconds at most; they abort a process that ends before them.
        """
        self._end("closed")
        for thread in self._threads if wait else ():
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def _send_all(self) -> None:
        try:
            while True:
                try:
                    message = self._outbox.get(timeout=self._beat)
                except queue.Empty:
                    message = (_BEAT, None)
                self._session.send(*message)
                if message[0] is _END:
                    return
                if message[0] is _MARK:
                    self._flushed.set()
        except CommunicationError as error:
            self._end(str(error))

    def _receive_all(self) -> None:
        try:
            while True:
                header, payload = self._session.receive()
                if header == _END:
                    self._end("closed by the other side")
                    return
                if header not in (_BEAT, _MARK) and not self._ended.is_set():
                    self._on_message(header, payload)
        except CommunicationError as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        # Each side answers the other's last message with its own, so that no receive is left waiting.
        self._outbox.put((_END, None))
        self._on_lost(reason)
