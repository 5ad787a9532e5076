"""The loop itself: what it times, and when it gives up."""

from types import SimpleNamespace

import pytest
import torch

from moe_async.comm import World
from moe_async.engine import loop
from moe_async.engine.hooks import Hook
from moe_async.engine.loop import Trainer
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.step import StepReport, next_token_loss_sum
from moe_async.errors import EngineError
from moe_async.model import build_model
from moe_async.observe import LoadMeta, LoadWindow
from tests.helpers.small import SMALL, small_recipe

MAX_BAD = 5
TOKENS = torch.arange(12).view(2, 6)


class StubEngine:
    """Steps that are applied, or not, as told."""

    def __init__(self, applied, module):
        self.applied, self.steps, self.global_step, self.module = list(applied), len(applied), 0, module

    def train_step(self, batches):
        applied = self.applied[self.global_step]
        self.global_step += 1
        return StepReport(
            step=self.global_step, lm_loss=1.0, balance={}, learning_rate=0.1, grad_norm=1.0, applied=applied,
            label_tokens=100, routed_tokens=100, counts_LE=torch.ones(1, 2, dtype=torch.int64),
            zero_LE=torch.zeros(1, 0, dtype=torch.int64), dropped_LE=torch.zeros(1, 2, dtype=torch.int64),
            bad_tokens=(0 if applied else 4,),
        )  # fmt: skip

    def drain(self):
        return []

    def micro_batch_objective(self, output, batch):
        return next_token_loss_sum(output.logits, batch.targets())


def trainer_of(applied, module=None):
    trainer = Trainer.__new__(Trainer)
    trainer.recipe = small_recipe(train=SMALL["train"] | {"max_bad_steps": MAX_BAD})
    module = module or build_model(trainer.recipe)
    trainer.engine, trainer.world, trainer.hooks = StubEngine(applied, module), World(), []
    trainer.stop, trainer.exchange = SimpleNamespace(agreed=lambda world: False), None
    trainer.pace = 0.0
    trainer.load, trainer.observed = LoadWindow(0), LoadMeta((), (), ())
    trainer.tokens = trainer.dropped = trainer.skipped = 0
    trainer._warm, trainer._timed_tokens, trainer._timed_seconds = False, 0, 0.0
    trainer._next_batches = lambda: [MicroBatch(TOKENS, TOKENS)]
    return trainer


def test_gives_up_after_many_skipped_steps_in_a_row():
    trainer = trainer_of([False] * MAX_BAD)
    with pytest.raises(EngineError, match=rf"{MAX_BAD} steps in a row were skipped.*step {MAX_BAD}, .*Lower optim\.lr"):
        trainer.run()
    broken = [False] * (MAX_BAD - 1)
    recovered = trainer_of([*broken, True, *broken])
    assert recovered.run() and recovered.skipped == 2 * (MAX_BAD - 1)


def test_giving_up_names_the_first_module_with_such_numbers_and_the_routers_that_saw_them():
    model = build_model(small_recipe())
    model.layers[1].ffn.check_finite = False  # as `initialize` does
    with torch.no_grad():
        model.layers[0].ffn.w_out[3, 2] = float("nan")
    with pytest.raises(EngineError) as error:
        trainer_of([False] * MAX_BAD, model).run()
    assert "not finite are in the output of layers.0.ffn. Routers that saw such numbers: layer 1." in str(error.value)
    with pytest.raises(EngineError) as error:
        trainer_of([False] * MAX_BAD).run()
    assert "The first numbers" not in str(error.value)


class Diary(Hook):
    """The steps that hooks were told of, and whether the run ended well."""

    def __init__(self):
        self.steps, self.ended = [], False

    def on_step(self, trainer, record):
        self.steps.append((record.report.step, record.report.applied))

    def on_end(self, trainer):
        self.ended = True


def test_hooks_see_the_step_that_ends_the_run():
    trainer, diary = trainer_of([True, *[False] * MAX_BAD]), Diary()
    trainer.hooks = [diary]
    with pytest.raises(EngineError, match=f"the last one is step {MAX_BAD + 1}"):
        trainer.run()
    assert diary.steps == [(1, True), *((step, False) for step in range(2, MAX_BAD + 2))] and not diary.ended


def test_the_first_step_is_not_timed(monkeypatch):
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(clock))
    trainer = trainer_of([True] * 3)
    trainer._step()
    assert trainer.tokens_per_second is None
    trainer._step()
    # Each step reads the clock three times: 20 seconds.
    assert trainer.tokens_per_second == 100 / 20 and trainer.tokens == 200
