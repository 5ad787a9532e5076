"""A rank dies in the middle of an update: nothing of it is merged, the others go on, and its learner comes back."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_async.comm import session
from moe_async.recipe.loader import dump_recipe
from moe_async.sync.event_log import read_entries
from tests.helpers.learner_run import LIMIT, Syncer, merged, one_rank, several
from tests.helpers.spawn import RankFailure, run_ranks

SAME = {"policy": "same"}
BETWEEN = {"dense": {"policy": "decoupled", "every": 2, "fragments": 2}, "expert": SAME, "router": SAME}
PIECE = 64
"""Bytes of a piece in this test, so that even small parts are sent in several."""


def trained(rank, text, address, learner, folder, pace, fatal):
    """`one_rank`, with small pieces; rank 1 dies within its ``fatal``-th update, behind the first piece of it."""
    session._PIECE_BYTES = PIECE
    if rank == 1 and fatal:
        send, move = session.Session.send, session.Session._move
        updates, dying = [], []

        def counted(self, header, payload=None):
            if header["kind"] == "update":
                updates.append(header)
                if len(updates) == fatal:
                    assert payload.nbytes > 2 * PIECE
                    dying.append(payload)
            send(self, header, payload)

        def cut_short(self, parts, begin):
            tensor, tag = parts[-1]
            if dying and tensor.data_ptr() == dying[0].data_ptr():
                move(self, [*parts[:-1], (tensor[: PIECE // tensor.element_size()], tag)], begin)
                os.kill(os.getpid(), signal.SIGKILL)
            move(self, parts, begin)

        session.Session.send, session.Session._move = counted, cut_short
    return one_rank(rank, text, address, learner, folder, None, pace)


def test_a_rank_killed_within_an_update(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "_PIECE_BYTES", PIECE)
    recipe = several(BETWEEN, train__steps=60, parallel__expert=2)
    text, syncer = dump_recipe(recipe), Syncer(tmp_path / "run")

    def train(learner, fatal=0):
        arguments = (text, syncer.address, learner, str(tmp_path), 0.15, fatal)
        return run_ranks(2, trained, *arguments, timeout=LIMIT)

    with ThreadPoolExecutor() as pool:
        steady = pool.submit(train, 0)
        with pytest.raises(RankFailure, match="rank 1 died with exit code -9"):
            train(1, fatal=4)
        again = train(1)
        results = [steady.result(), again]
    syncer.thread.join(20)
    assert not syncer.thread.is_alive()
    entries = list(read_entries(tmp_path / "run" / "events.jsonl"))
    lives = [(e["learner"], e["incarnation"]) for e in entries if e["event"] == "welcome"]
    assert lives == [(0, 0), (1, 0), (1, 1)]
    merges = [tuple(update.values()) for e in entries if e["event"] == "merge" for update in e["updates"]]
    assert len(set(merges)) == len(merges)
    # Rank 0 may have sent its part of the fourth and of later ones; rank 1 has not.
    assert [update for update in merges if update[:2] == (1, 0)] == [(1, 0, 0, 1), (1, 0, 0, 0), (1, 0, 1, 1)]
    assert sum(learner[0]["steps"] for learner in results) > 60
    first, second = (merged(learner) for learner in results)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=0, msg=name)
