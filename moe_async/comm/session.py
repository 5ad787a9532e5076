"""Sessions: a connection between two processes of different launches, such as a rank of a learner and the syncer.

A session is a gloo group of two, made through a store that the listening side hosts. Messages are a JSON header and at
most one flat tensor; nothing that comes over the network is executed. A partner that dies is noticed at once; one that
falls silent, after the session's time limit.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from moe_async.errors import CommunicationError

Header = dict[str, Any]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
_MAGIC = 0x6D6F65_01
_MAX_HEADER_BYTES = 2**26
_TICKETS = "tickets"
_FRAME, _TEXT, _TENSOR = range(3)
"""Tags of the three parts of a message; each direction has its own, so both may be under way at once."""

_PIECE_BYTES = 2**20
"""Tensors travel in pieces, and the time limit is that of a piece: on a slow link a large one takes longer."""

_PIECES_AHEAD = 4
"""Pieces under way at once, so that a long way costs no rate."""


class Session:
    """One end of a connection. One thread may send while another receives.

    A transfer under way cannot be cut off from this side, so `Connection` ends a session by a last message.

    Args:
        group: the gloo group of two.
        first: whether this end is rank 0 of it.
        timeout: seconds without progress after which a receive or send fails.
    """

    def __init__(self, group: Any, first: bool, timeout: float) -> None:
        self._group: Any = group
        self._partner = 1 if first else 0
        self._out, self._in = (0, 8) if first else (8, 0)
        self._timeout = timedelta(seconds=timeout)
        self.bytes_sent = 0
        self.bytes_received = 0

    def limit(self, timeout: float) -> None:
        """Set the time limit, in seconds, of what is received or sent from now on."""
        self._timeout = timedelta(seconds=timeout)

    def send(self, header: Mapping[str, Any], payload: Tensor | None = None) -> None:
        """Send a message; blocks until the partner's machine has it.

        Raises:
            CommunicationError: the partner is gone or silent.
        """
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        flat = torch.empty(0) if payload is None else payload.detach().reshape(-1).cpu().contiguous()
        frame = torch.tensor([_MAGIC, text.numel(), flat.numel(), _DTYPES.index(flat.dtype)])
        self._send(frame, _FRAME)
        self._send(text, _TEXT)
        self._send(flat, _TENSOR)
        self.bytes_sent += frame.nbytes + text.nbytes + flat.nbytes

    def receive(self) -> tuple[Header, Tensor]:
        """The next message: its header and its flat tensor, which is empty where there is none. Blocks.

        Raises:
            CommunicationError: the partner is gone or silent, or what it sends is no message of this package.
        """
        frame = torch.zeros(4, dtype=torch.int64)
        self._receive(frame, _FRAME)
        magic, header_bytes, elements, dtype = frame.tolist()
        if (
            magic != _MAGIC
            or not 0 < header_bytes <= _MAX_HEADER_BYTES
            or not 0 <= dtype < len(_DTYPES)
            or elements < 0
        ):
            raise CommunicationError(
                "the partner sends something that is no message of this package; both sides need the same version."
            )
        text = torch.empty(header_bytes, dtype=torch.uint8)
        self._receive(text, _TEXT)
        try:
            header = json.loads(text.numpy().tobytes())
            flat = torch.empty(elements, dtype=_DTYPES[dtype])
        except (ValueError, RuntimeError) as error:
            raise CommunicationError(f"the partner sends what cannot be read ({_first_line(error)}).") from error
        self._receive(flat, _TENSOR)
        self.bytes_received += frame.nbytes + text.nbytes + flat.nbytes
        if not isinstance(header, dict):
            raise CommunicationError("the partner sends a header that is no mapping; both sides need the same version.")
        return header, flat

    def _send(self, tensor: Tensor, tag: int) -> None:
        self._move(tensor, lambda piece: self._group.send([piece], self._partner, self._out + tag))

    def _receive(self, tensor: Tensor, tag: int) -> None:
        self._move(tensor, lambda piece: self._group.recv([piece], self._partner, self._in + tag))

    def _move(self, tensor: Tensor, begin: Callable[[Tensor], Any]) -> None:
        """Move a tensor piece by piece, in order; an empty one does not travel."""
        under_way: deque[Any] = deque()
        try:
            for piece in tensor.split(_PIECE_BYTES // tensor.element_size()) if tensor.numel() else ():
                if len(under_way) == _PIECES_AHEAD:
                    under_way.popleft().wait(self._timeout)
                under_way.append(begin(piece))
            for work in under_way:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise CommunicationError(f"the other side of the session is gone ({_first_line(error)})") from error


class Door:
    """The listening side: hosts the store and opens a session for everyone who knocks.

    Args:
        host, port: where to listen; port 0: any free one.
        timeout: of sessions, and of opening one, in seconds.

    Raises:
        CommunicationError: the address cannot be used.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._timeout = timeout
        try:
            self._store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            raise CommunicationError(
                f"cannot listen on {host}:{port} ({_first_line(error)}); choose another port, or end what uses it."
            ) from error
        self.host, self.port = host, self._store.port
        self._opened = 0

    def tickets(self) -> list[int]:
        """Numbers of those who have knocked since the last call."""
        count = self._store.add(_TICKETS, 0)
        new = list(range(self._opened + 1, count + 1))
        self._opened = count
        return new

    def open(self, ticket: int) -> Session:
        """The session with the holder of a ticket. Blocks until it is there.

        Raises:
            CommunicationError: it went away.
        """
        return _open(self._store, ticket, True, self.host, self._timeout)


def knock(host: str, port: int, timeout: float) -> Session:
    """A session with whoever listens there. Blocks.

    Raises:
        CommunicationError: nobody listens, or the session does not come about within ``timeout`` seconds.
    """
    try:
        # A store would try for long and complain aloud where nobody listens.
        socket.create_connection((host, port), timeout=timeout).close()
    except OSError as error:
        raise CommunicationError(f"nobody answers at {host}:{port} ({error})") from error
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        ticket = store.add(_TICKETS, 1)
    except RuntimeError as error:
        raise CommunicationError(f"nobody answers at {host}:{port} ({_first_line(error)})") from error
    return _open(store, ticket, False, _own_address(host, port), timeout)


def _open(store: TCPStore, ticket: int, first: bool, address: str, timeout: float) -> Session:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    try:
        group = ProcessGroupGloo(PrefixStore(f"session/{ticket}", store), 0 if first else 1, 2, options)
    except RuntimeError as error:
        raise CommunicationError(f"a session did not come about ({_first_line(error)})") from error
    return Session(group, first, timeout)


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to ``host``: that is the network on which the partner finds it."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
