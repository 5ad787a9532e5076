"""A gradient that its learner had not sent when it was saved is in its checkpoint: without processes and syncer."""

from __future__ import annotations

import pytest
import torch

from moe_async.comm import World
from moe_async.engine.balance import BalanceLosses
from moe_async.engine.learner_exchange import LearnerParts
from moe_async.engine.learner_model import RankModel
from moe_async.engine.local_bridge import LocalBridge
from moe_async.engine.seat import Seat
from moe_async.engine.step import Engine
from moe_async.engine.stop import StopFlag
from moe_async.engine.sync_plan import sync_groups
from moe_async.engine.syncer_exchange import SyncerExchange
from moe_async.model import build_model
from moe_async.model.keys import expert_modules
from tests.helpers.learner_run import batches, several


class Link:
    """A connection that is there and over which nothing comes."""

    received, lost, refusal, timeout = 0, False, "", 1.0

    def __init__(self):
        self.posted = []

    def post(self, fragment, sequence, message, payload):
        self.posted.append((message, payload.clone()))

    def outbox(self):
        return []

    def load_outbox(self, updates):
        assert not updates

    def next(self, count):
        return []

    def post_again(self):
        pass

    def send(self, message):
        pass

    def wait(self, delivered, seconds):
        pass


def learner(recipe):
    model = build_model(recipe)
    bridge = LocalBridge(model, recipe, sends_gradients=True)
    groups = sync_groups(recipe, model)
    rank_model = RankModel(bridge, [fragment for group in groups for fragment in group.fragments])
    stop = StopFlag()
    world, seat = World(bridge.world.topology), Seat(0, 0, 2, "run")
    exchange = SyncerExchange(LearnerParts(rank_model, groups, expert_modules(model), world, Link(), seat, stop), {})
    engine = Engine(bridge, recipe.optim, BalanceLosses(recipe.moe, torch.device("cpu")), recipe.train.steps)
    return engine, exchange, stop


def arrive(exchange):
    """What ``exchange`` is once the shared values have come."""
    exchange._begin(0)
    exchange._newcomer = False


@pytest.mark.parametrize("kind", ["topk", "sigmoid_bias"])
def test_a_resumed_learner_sends_what_it_had_not_sent(kind, monkeypatch):
    moe = {"layers": [1], "num_experts": 4, "top_k": 2, "expert_dim": 6, "router": {"kind": kind}}
    same = {"policy": "same"}
    recipe = several({"dense": {"policy": "asp"}, "expert": same, "router": same}, moe=moe)
    engine, exchange, _ = learner(recipe)
    arrive(exchange)
    # Stopped where its boundary begins.
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "_boundary", lambda: False)
        exchange.after_step(engine.train_step(batches(recipe, 0, 0, 1, 1)), 1.0)
    state = exchange.state_dict()
    tensors = {name: tensor.clone() for name, tensor in exchange.tensors().items()}
    assert state["to_send"]

    _, again, stop = learner(recipe)
    again.restore(state, tensors)
    stop.reason = "over"  # so that it does not wait for the result
    assert not again.start()
    exchange._stop.reason = "over"
    assert not exchange._boundary()
    ((message, payload),) = again.link.posted
    ((wanted_message, wanted),) = exchange.link.posted
    assert message == wanted_message
    assert torch.equal(payload, wanted) and wanted.count_nonzero() > 0
    # Once it is sent nothing of it is kept.
    assert not any(name.startswith("contribution/") for name in again.tensors())


def test_a_learner_that_is_stopped_while_it_finishes_sends_nothing_twice(monkeypatch):
    """What its last boundary had not sent went out with the final update."""
    same = {"policy": "same"}
    recipe = several({"dense": {"policy": "bsp"}, "expert": same, "router": same})
    engine, exchange, stop = learner(recipe)
    arrive(exchange)
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "_boundary", lambda: False)
        exchange.after_step(engine.train_step(batches(recipe, 0, 0, 1, 1)), 1.0)
    stop.reason = "over"
    assert not exchange.finish() and len(exchange.link.posted) == 1
    _, again, _ = learner(recipe)
    again.restore(exchange.state_dict(), exchange.tensors())
    # The result has come meanwhile.
    monkeypatch.setattr(again.participant.sync, "must_wait", lambda: False)
    assert again.start() and not again.link.posted
