"""Sessions: a connection between two processes of different launches, such as a rank of a learner and the syncer.

A session is two gloo groups of two, one for each direction, made through a store that the listening side hosts: a
receiver has to ask for what it gets, and on a group that is busy with its own sending that would wait. Messages are a
JSON header and at most one flat tensor; nothing that comes over the network is executed. A partner that dies is noticed
at once; one that falls silent, after the session's time limit.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from moe_async.errors import CommunicationError

Header = dict[str, Any]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
_MAGIC = 0x6D6F65_02
_MAX_HEADER_BYTES = 2**26
_TICKETS = "tickets"
_FRAME, _TEXT, _TENSOR = range(3)
"""Tags of the parts of a message."""

_FRAME_BYTES = 2048
"""Of a message's first part: sizes, and the header where it fits. The back-end sends nothing before the other side has
asked for it, so each further part costs the way there and back once more."""

_SIZES = struct.Struct("<4q")
"""Magic number, bytes of the header, elements and type of the tensor."""

_PIECE_BYTES = 2**20
"""Tensors travel in pieces, and the time limit is that of a piece: on a slow link a large one takes longer."""

_PIECES_AHEAD = 4
"""Pieces under way at once, so that a long way costs no rate."""


class Session:
    """One end of a connection. One thread may send while another receives.

    A transfer under way cannot be cut off from this side, so `Connection` ends a session by a last message.

    Args:
        out, into: the gloo groups of two on which this end sends and receives.
        partner: the other end's rank in both.
        timeout: seconds without progress after which a receive or send fails.
    """

    def __init__(self, out: Any, into: Any, partner: int, timeout: float) -> None:
        self._out, self._into, self._partner = out, into, partner
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
        text = json.dumps(header).encode()
        flat = torch.empty(0) if payload is None else payload.detach().reshape(-1).cpu().contiguous()
        sizes = _SIZES.pack(_MAGIC, len(text), flat.numel(), _DTYPES.index(flat.dtype))
        frame, rest = _cut(sizes + text)
        parts = ((_bytes(frame), _FRAME), (_bytes(rest), _TEXT), (flat, _TENSOR))
        self._move(parts, lambda piece, tag: self._out.send([piece], self._partner, tag))
        self.bytes_sent += sum(part.nbytes for part, _ in parts)

    def receive(self) -> tuple[Header, Tensor]:
        """The next message: its header and its flat tensor, which is empty where there is none. Blocks.

        Raises:
            CommunicationError: the partner is gone or silent, or what it sends is no message of this package.
        """
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self._receive(frame, _FRAME)
        magic, header_bytes, elements, dtype = _SIZES.unpack(frame.numpy().tobytes()[: _SIZES.size])
        if (
            magic != _MAGIC
            or not 0 < header_bytes <= _MAX_HEADER_BYTES
            or not 0 <= dtype < len(_DTYPES)
            or elements < 0
        ):
            raise CommunicationError(
                "the partner sends something that is no message of this package; both sides need the same version."
            )
        rest = torch.empty(max(_SIZES.size + header_bytes - _FRAME_BYTES, 0), dtype=torch.uint8)
        self._receive(rest, _TEXT)
        text = (frame.numpy().tobytes() + rest.numpy().tobytes())[_SIZES.size :][:header_bytes]
        try:
            header = json.loads(text)
            flat = torch.empty(elements, dtype=_DTYPES[dtype])
        except (ValueError, RuntimeError) as error:
            raise CommunicationError(f"the partner sends what cannot be read ({first_line(error)}).") from error
        self._receive(flat, _TENSOR)
        self.bytes_received += frame.nbytes + rest.nbytes + flat.nbytes
        if not isinstance(header, dict):
            raise CommunicationError("the partner sends a header that is no mapping; both sides need the same version.")
        return header, flat

    def _receive(self, tensor: Tensor, tag: int) -> None:
        self._move([(tensor, tag)], lambda piece, tag: self._into.recv([piece], self._partner, tag))

    def _move(self, parts: Sequence[tuple[Tensor, int]], begin: Callable[[Tensor, int], Any]) -> None:
        """Move the parts of a message piece by piece, in order; an empty one does not travel."""
        under_way: deque[Any] = deque()
        try:
            for tensor, tag in parts:
                for piece in tensor.split(_PIECE_BYTES // tensor.element_size()) if tensor.numel() else ():
                    if len(under_way) == _PIECES_AHEAD:
                        under_way.popleft().wait(self._timeout)
                    under_way.append(begin(piece, tag))
            for work in under_way:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise CommunicationError(f"the other side of the session is gone ({first_line(error)})") from error


def _cut(message: bytes) -> tuple[bytes, bytes]:
    """A message's first part, filled up to its size, and what does not fit."""
    return message[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0"), message[_FRAME_BYTES:]


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


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
                f"cannot listen on {host}:{port} ({first_line(error)}); choose another port, or end what uses it."
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
    store, address = connect_store(host, port, timeout)
    try:
        ticket = store.add(_TICKETS, 1)
    except RuntimeError as error:
        raise CommunicationError(f"nobody answers at {host}:{port} ({first_line(error)})") from error
    return _open(store, ticket, False, address, timeout)


def connect_store(host: str, port: int, timeout: float) -> tuple[TCPStore, str]:
    """A client of the store that a `Door` hosts, and this machine's address on the way there. Blocks.

    Raises:
        CommunicationError: nobody listens.
    """
    try:
        # A store would try for long and complain aloud where nobody listens.
        socket.create_connection((host, port), timeout=timeout).close()
    except OSError as error:
        raise CommunicationError(f"nobody answers at {host}:{port} ({error})") from error
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise CommunicationError(f"nobody answers at {host}:{port} ({first_line(error)})") from error
    return store, _own_address(host, port)


def gloo_options(address: str, timeout: float) -> Any:
    """Options of a gloo group that uses the network of ``address``; ``timeout`` in seconds."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return options


def _open(store: TCPStore, ticket: int, first: bool, address: str, timeout: float) -> Session:
    options = gloo_options(address, timeout)
    try:
        # The first group carries what the listening side sends.
        groups = [
            ProcessGroupGloo(PrefixStore(f"session/{ticket}/{direction}", store), 0 if first else 1, 2, options)
            for direction in range(2)
        ]
    except RuntimeError as error:
        raise CommunicationError(f"a session did not come about ({first_line(error)})") from error
    out, into = groups if first else reversed(groups)
    return Session(out, into, 1 if first else 0, timeout)


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to ``host``: that is the network on which the partner finds it."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def first_line(error: Exception) -> str:
    """What an error says, without the traces that the communication library adds."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
