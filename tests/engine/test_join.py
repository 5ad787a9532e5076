"""Coming back with a checkpoint: what does not fit is refused before anything is read in a wrong layout."""

from types import SimpleNamespace

import pytest

from moe_async.engine import join, loop
from moe_async.engine.all_reduce_exchange import AllReduceExchange
from moe_async.engine.learner_exchange import LearnerExchange
from moe_async.engine.loop import Trainer
from moe_async.engine.schedule import learning_rate
from moe_async.engine.step import Engine
from moe_async.errors import CheckpointError
from moe_async.sync import presets
from moe_async.sync.settings import PolicyPlan
from tests.helpers.small import small_recipe

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


@pytest.mark.parametrize("same_life", [True, False])
def test_what_a_former_life_has_applied_is_not_applied_again(monkeypatch, same_life):
    """A learner that lived on after its checkpoint begins without what was in flight at that time."""
    manifest = SimpleNamespace(recipe="", trainer={"exchange": {"incarnation": 0}})
    monkeypatch.setattr(loop, "read_manifest", lambda path: manifest)
    monkeypatch.setattr(loop, "parse_recipe", lambda text, name: None)
    monkeypatch.setattr(loop, "state_differences", lambda saved, recipe: [])
    monkeypatch.setattr(loop, "load_checkpoint", lambda path, bridge: manifest)
    monkeypatch.setattr(loop, "load_exchange", lambda path, rank: "tensors")
    restored, left = [], []
    trainer = object.__new__(Trainer)
    trainer.recipe, trainer.world = None, SimpleNamespace(rank=0)
    delayed = SimpleNamespace(load_state=left.append)
    trainer.engine = SimpleNamespace(global_step=4, bridge=SimpleNamespace(delayed=delayed))
    trainer.load_state_dict = lambda state: None
    trainer.exchange = SimpleNamespace(
        continues=lambda state: same_life, restore=lambda state, tensors: restored.append(tensors)
    )
    trainer.resume("there")
    assert trainer.rejoins is not same_life and trainer.saved_path == "there"
    assert (restored, left) == ((["tensors"], []) if same_life else ([], [[]]))


@pytest.mark.parametrize(("step", "clock"), [(4, 4), (4, 7), (7, 4), (0, 3)])
def test_where_the_others_are_is_where_a_learner_goes_on(monkeypatch, step, clock):
    """In steps and in the text, whether that is ahead of its own place or behind."""
    monkeypatch.setattr(loop, "TrainStream", lambda *arguments: Windows())
    trainer = object.__new__(Trainer)
    trainer.corpus, trainer._stream = None, Windows()
    trainer.recipe = SimpleNamespace(data=SimpleNamespace(seq_len=1, seed=0), train=SimpleNamespace(global_batch=6))
    trainer.engine = SimpleNamespace(global_step=step)
    trainer._stream.skip(step * 6 * 2)
    trainer._align(SimpleNamespace(clock=clock, seat=SimpleNamespace(learners=2)))
    assert trainer.engine.global_step == clock and trainer._stream.drawn == clock * 6 * 2


class Windows:
    drawn = 0

    def skip(self, windows):
        self.drawn += windows


def test_what_is_drained_has_the_rate_of_the_place_in_the_run():
    """A slow learner ends after fewer steps of its own than the schedule has gone through."""
    rates = []
    engine = object.__new__(Engine)
    engine.bridge = SimpleNamespace(set_learning_rate=rates.append, drain=list)
    engine._inside_step, engine.global_step, engine.ahead, engine.steps = False, 10, 9.5, 20
    engine._optim = small_recipe(optim__schedule={"kind": "cosine", "warmup": 2}).optim
    engine.drain()
    assert rates == [learning_rate(engine._optim, 18.5, 20)] != [learning_rate(engine._optim, 9, 20)]
