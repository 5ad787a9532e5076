"""A learner that is told to stop while it waits, on stand-ins for everything around it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from moe_async.comm import World
from moe_async.engine.learner_exchange import LearnerParts
from moe_async.engine.loop import Trainer
from moe_async.engine.stop import StopFlag
from moe_async.engine.syncer_exchange import SyncerExchange
from moe_async.engine.syncer_link import SyncerLink


@pytest.mark.parametrize("came", [False, True])
def test_a_run_that_was_stopped_before_the_others_had_finished_is_not_over(came, tmp_path):
    """Its last step is made, but what came out of the run is not there: it is to be saved, not reported."""
    trainer = object.__new__(Trainer)
    trainer.exchange = SimpleNamespace(start=lambda: True, finish=lambda: came, position=3.0, clock=4, over=False)
    trainer.engine = SimpleNamespace(drain=list, steps=3, global_step=4)
    trainer.stop, trainer.world = SimpleNamespace(agreed=lambda world: True), None
    trainer.hooks, trainer.saved_path, trainer.rejoins, trainer.skipped = [], tmp_path, False, 0
    assert trainer.run() is came


def without_a_model(link):
    parts = LearnerParts(None, (), (), World(), link, SimpleNamespace(learner=0, incarnation=0), StopFlag())
    return SyncerExchange(parts, {})


@pytest.mark.parametrize("offline", [False, True])
def test_the_end_is_told_behind_the_last_updates(offline):
    """On a connection that is about to come back it goes out with what is sent again, and not before."""
    sent = []
    link = SimpleNamespace(send=sent.append, timeout=20.0)
    exchange = without_a_model(link)
    exchange._newcomer = False
    exchange._participant = SimpleNamespace(contribute=lambda last: [], take=lambda adopt: [])
    exchange._offline_since = time.monotonic() if offline else None
    exchange._wait = lambda: exchange.closing.update(kind="final") or True
    assert exchange.finish() and exchange._finishing == {"kind": "finish"}
    assert sent == ([] if offline else [{"kind": "finish"}])


def test_waiting_without_a_link_does_not_spin():
    exchange = without_a_model(SyncerLink("127.0.0.1", 1, 20.0))
    exchange._offline_since = time.monotonic()
    began = time.monotonic()
    for _ in range(3):
        exchange._wait()
    assert time.monotonic() - began > 0.5
