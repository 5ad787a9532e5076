"""Sessions and connections between processes of different launches, over real sockets."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import signal
import threading
import time

import pytest
import torch

from moe_async.comm import session
from moe_async.comm.connection import Connection
from moe_async.comm.session import Door, knock
from moe_async.errors import CommunicationError
from tests.helpers.launch import free_port

LIMIT = 20.0


OPEN = []
"""What a test has to close: a thread of the communication library that outlives the interpreter aborts it."""


@pytest.fixture
def door():
    yield Door("127.0.0.1", 0, LIMIT)
    while OPEN:
        OPEN.pop().close()


def pair(door, timeout=LIMIT):
    """Both ends of a session."""
    box = []
    thread = threading.Thread(target=lambda: box.append(knock("127.0.0.1", door.port, timeout)))
    thread.start()
    deadline = time.monotonic() + LIMIT
    while not (tickets := door.tickets()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ours = door.open(tickets[0])
    thread.join(LIMIT)
    return ours, box[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_messages_come_as_they_were_sent(door, dtype):
    ours, theirs = pair(door)
    payload = (torch.arange(12).reshape(3, 4) % 7).to(dtype)
    sender = threading.Thread(target=theirs.send, args=({"kind": "update", "n": [1, 2.5, None], "name": "é"}, payload))
    sender.start()
    header, received = ours.receive()
    sender.join(LIMIT)
    assert header == {"kind": "update", "n": [1, 2.5, None], "name": "é"}
    assert received.dtype == dtype and torch.equal(received, payload.reshape(-1))
    assert ours.bytes_received == theirs.bytes_sent > payload.nbytes


class SlowLink:
    """A group whose receiving end takes a time for each byte."""

    def __init__(self, group, seconds_per_byte):
        self.group, self.seconds_per_byte = group, seconds_per_byte

    def recv(self, tensors, *arguments):
        time.sleep(sum(tensor.nbytes for tensor in tensors) * self.seconds_per_byte)
        return self.group.recv(tensors, *arguments)


def test_a_transfer_may_take_longer_than_the_limit(door):
    """The limit is for silence: what comes slowly comes."""
    ours, theirs = pair(door)
    payload = torch.arange(5 * 2**20 + 1, dtype=torch.float32)
    theirs.limit(1.0)
    ours._into = SlowLink(ours._into, 2.5 / payload.nbytes)
    box = []

    def send():
        theirs.send({"kind": "update"}, payload)
        box.append("sent")

    sender = threading.Thread(target=send)
    sender.start()
    _, received = ours.receive()
    sender.join(LIMIT)
    assert torch.equal(received, payload) and box == ["sent"]
    assert ours.bytes_received == theirs.bytes_sent


def test_both_directions_at_once_and_in_order(door):
    ends = pair(door)
    got = [[], []]

    def talk(place):
        for number in range(50):
            ends[place].send({"n": number}, torch.full((1000,), float(number)) if number % 3 else None)

    def listen(place):
        for _ in range(50):
            header, payload = ends[place].receive()
            got[place].append((header["n"], payload.numel(), float(payload.sum())))

    threads = [threading.Thread(target=f, args=(place,)) for f in (talk, listen) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    wanted = [(n, 1000, n * 1000.0) if n % 3 else (n, 0, 0.0) for n in range(50)]
    assert got == [wanted, wanted]


def test_one_door_serves_many_one_after_the_other(door):
    sessions = [pair(door) for _ in range(3)]
    for number, (ours, theirs) in enumerate(sessions):
        thread = threading.Thread(target=ours.send, args=({"n": number},))
        thread.start()
        assert theirs.receive()[0] == {"n": number}
        thread.join(LIMIT)


def test_a_silent_partner_counts_as_gone_after_the_time_limit(door):
    ours, theirs = pair(door, timeout=1.0)
    with pytest.raises(CommunicationError, match="the other side of the session is gone"):
        theirs.receive()
    with pytest.raises(CommunicationError, match="gone"):
        ours.receive()


def knock_and_wait(port):
    session = knock("127.0.0.1", port, LIMIT)
    session.send({"pid": os.getpid()})
    time.sleep(LIMIT)


def test_a_killed_partner_is_noticed_at_once(door):
    process = mp.get_context("spawn").Process(target=knock_and_wait, args=(door.port,))
    process.start()
    while not (tickets := door.tickets()):
        time.sleep(0.01)
    ours = door.open(tickets[0])
    os.kill(ours.receive()[0]["pid"], signal.SIGKILL)
    # Not by the time limit, whose message is another one.
    with pytest.raises(CommunicationError, match=r"gone .*(closed by peer|reset by peer)"):
        ours.receive()
    process.join(LIMIT)


def test_what_is_no_message_is_refused(door):
    ours, theirs = pair(door)
    strange = theirs._out.send([torch.full((session._FRAME_BYTES,), 7, dtype=torch.uint8)], 0, session._FRAME)
    with pytest.raises(CommunicationError, match="no message of this package"):
        ours.receive()
    strange.wait()


def test_nobody_listens():
    port = free_port()
    with pytest.raises(CommunicationError, match=f"nobody answers at 127.0.0.1:{port}"):
        knock("127.0.0.1", port, 1.0)


def test_a_port_in_use_is_an_error(door):
    with pytest.raises(CommunicationError, match=f"cannot listen on 127.0.0.1:{door.port}.*choose another port"):
        Door("127.0.0.1", door.port, 1.0)


class Collected:
    """What a connection tells of."""

    def __init__(self, session, timeout):
        self.messages: queue.Queue = queue.Queue()
        self.lost: queue.Queue = queue.Queue()
        self.connection = Connection(session, timeout, lambda h, p: self.messages.put((h, p)), self.lost.put)
        OPEN.append(self.connection)


def test_connections_move_messages_in_the_background_and_stay_alive_in_silence(door):
    ours, theirs = (Collected(end, 1.0) for end in pair(door, timeout=1.0))
    for number in range(5):
        ours.connection.send({"n": number}, torch.ones(number))
    assert [theirs.messages.get(timeout=LIMIT)[0]["n"] for _ in range(5)] == list(range(5))
    # Longer than the time limit: signs of life keep it open, and are not messages.
    time.sleep(2.5)
    theirs.connection.send({"still": "here"})
    assert ours.messages.get(timeout=LIMIT)[0] == {"still": "here"}
    assert theirs.messages.empty() and ours.lost.empty() and not ours.connection.lost


def test_the_end_of_a_connection_is_told_once_on_each_side(door):
    ours, theirs = (Collected(end, 5.0) for end in pair(door, timeout=5.0))
    ours.connection.close()
    assert ours.lost.get(timeout=LIMIT) == "closed"
    assert theirs.lost.get(timeout=LIMIT) == "closed by the other side"
    ours.connection.close()
    theirs.connection.close()
    time.sleep(0.2)
    assert ours.lost.empty() and theirs.lost.empty() and theirs.connection.lost


def test_flush_waits_until_everything_is_sent(door):
    ours, theirs = (Collected(end, 5.0) for end in pair(door, timeout=5.0))
    for number in range(20):
        ours.connection.send({"n": number}, torch.zeros(10_000))
    assert ours.connection.flush(LIMIT)
    ours.connection.close()
    assert [theirs.messages.get(timeout=LIMIT)[0]["n"] for _ in range(20)] == list(range(20))
