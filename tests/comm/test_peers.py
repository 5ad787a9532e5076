"""Groups of the same rank of several learners, over real sockets; threads stand for the learners."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_async.comm import peers
from moe_async.comm.peers import meet_peers
from moe_async.comm.session import Door
from moe_async.errors import CommunicationError
from tests.helpers.launch import free_port

OPEN = []
"""Doors and groups live as long as the tests: threads of the communication library use their sockets."""


def together(size, action, timeout=20.0, name="0"):
    """``action(peer, index)`` of each peer, in a thread of its own."""
    if not OPEN:
        OPEN.append(Door("127.0.0.1", 0, 20.0))
    port = OPEN[0].port

    def one(index):
        group = meet_peers("127.0.0.1", port, f"{name}/{len(OPEN)}", index, size, timeout)
        OPEN.append(group)
        return action(group, index)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathered_values(size, monkeypatch):
    monkeypatch.setattr(peers, "PIECE_ELEMENTS", 7)

    def action(group, index):
        tensor = torch.arange(20, dtype=torch.float64) * (index + 1)
        group.add_up(tensor)
        group.add_up(torch.empty(0, dtype=torch.float64))
        whole = torch.full((6,), 2.0 ** -(index + 1))
        group.add_up(whole)
        return tensor, whole, group.gather({"n": index, "text": "x" * index}), group.bytes

    factor = size * (size + 1) / 2
    for tensor, whole, values, sent in together(size, action, name=f"sums{size}"):
        assert torch.equal(tensor, torch.arange(20, dtype=torch.float64) * factor)
        assert torch.equal(whole, torch.full((6,), 1 - 2.0**-size))
        assert values == [{"n": n, "text": "x" * n} for n in range(size)]
        # A ring of n sends each element 2 (n - 1) / n times from every peer.
        assert sent == sum(2 * payload * (size - 1) // size for payload in (160, 24))


def test_a_peer_that_does_not_come_is_an_error_after_the_limit():
    def action(group, index):
        if index == 0:
            began = time.monotonic()
            with pytest.raises(CommunicationError, match="another learner is gone or silent"):
                group.add_up(torch.zeros(10))
            assert time.monotonic() - began > 0.9
        return True

    assert together(2, action, timeout=1.0, name="silent") == [True, True]


def test_nobody_listens():
    port = free_port()
    with pytest.raises(CommunicationError, match=f"nobody answers at 127.0.0.1:{port}"):
        meet_peers("127.0.0.1", port, "0", 0, 2, 1.0)
