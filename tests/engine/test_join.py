"""Coming back with a checkpoint: what does not fit is refused before anything is read in a wrong layout."""

from types import SimpleNamespace

import pytest

from moe_async.engine import join
from moe_async.engine.all_reduce_exchange import AllReduceExchange
from moe_async.engine.learner_exchange import LearnerExchange
from moe_async.engine.loop import Trainer
from moe_async.errors import CheckpointError
from moe_async.sync import presets
from moe_async.sync.settings import PolicyPlan

STATE = {
    "learner": 1, "incarnation": 2, "clock": 9,
    "sync": {"policies": [{"fragments": {"0": {"sequence": 3}}}, {"fragments": {"1": {"sequence": 1}}}]},
}  # fmt: skip


def comeback(monkeypatch, saved, own):
    manifest = SimpleNamespace(world_size=saved[0], expert_parallel=saved[1], trainer={"exchange": STATE})
    monkeypatch.setattr(join, "read_manifest", lambda path: manifest)
    world = SimpleNamespace(size=own[0], topology=SimpleNamespace(expert_parallel=own[1]))
    return join._comeback("there", world)


def test_it_says_who_it_was_and_what_it_would_send_next(monkeypatch):
    found = comeback(monkeypatch, (2, 2), (2, 2))
    assert found == {"learner": 1, "incarnation": 2, "clock": 9, "sequences": {"0": 3, "1": 1}}


@pytest.mark.parametrize("own", [(4, 2), (2, 1)])
def test_parts_of_another_layout_are_refused(monkeypatch, own):
    """With another expert-parallel size the parts of a rank are as long, and of other elements."""
    with pytest.raises(
        CheckpointError, match=rf"is of 2 ranks with .* size 2 but this learner has {own[0]} with {own[1]}"
    ):
        comeback(monkeypatch, (2, 2), own)


def test_checkpoints_of_a_common_round_stay(monkeypatch):
    """Rounds of 12 steps and a checkpoint every 5: a learner at 23 may have to go on with one at 12, from step 10."""
    groups = [SimpleNamespace(plan=PolicyPlan((presets.local_sgd(every),))) for every in (12, 24)]
    exchange = SimpleNamespace(groups=groups)
    assert AllReduceExchange.apart.fget(exchange) == 24 and LearnerExchange.apart.fget(exchange) == 0
    train = SimpleNamespace(keep_checkpoints=2, checkpoint_every=5)
    trainer = SimpleNamespace(recipe=SimpleNamespace(train=train), exchange=SimpleNamespace(apart=24))
    assert Trainer._kept_checkpoints(trainer) == 6
    trainer.exchange.apart = 0
    assert Trainer._kept_checkpoints(trainer) == 2
