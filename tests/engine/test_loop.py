"""The loop itself: what it times, and when it gives up."""

from types import SimpleNamespace

import pytest
import torch

from moe_async.comm import World
from moe_async.engine import loop
from moe_async.engine.loop import MAX_SKIPPED, Trainer
from moe_async.engine.step import StepReport
from moe_async.errors import EngineError
from moe_async.observe import LoadWindow


class StubEngine:
    """Steps that are applied, or not, as told."""

    def __init__(self, applied):
        self.applied, self.steps, self.global_step = list(applied), len(applied), 0

    def train_step(self, batches):
        applied = self.applied[self.global_step]
        self.global_step += 1
        return StepReport(
            step=self.global_step, lm_loss=1.0, balance={}, learning_rate=0.1, grad_norm=1.0, applied=applied,
            label_tokens=100, routed_tokens=100, counts_LE=torch.ones(1, 2, dtype=torch.int64), dropped=0,
        )  # fmt: skip


def trainer_of(applied):
    trainer = Trainer.__new__(Trainer)
    trainer.engine, trainer.world, trainer.hooks = StubEngine(applied), World(), []
    trainer.stop = SimpleNamespace(agreed=lambda world: False)
    trainer.load = LoadWindow(0)
    trainer.tokens = trainer.dropped = trainer.skipped = 0
    trainer._warm, trainer._timed_tokens, trainer._timed_seconds = False, 0, 0.0
    trainer._next_batches = list
    return trainer


def test_gives_up_after_many_skipped_steps_in_a_row():
    trainer = trainer_of([False] * MAX_SKIPPED)
    with pytest.raises(EngineError, match=f"{MAX_SKIPPED} steps in a row were skipped.*lower optim.lr"):
        trainer.run()
    broken = [False] * (MAX_SKIPPED - 1)
    recovered = trainer_of([*broken, True, *broken])
    assert recovered.run() and recovered.skipped == 2 * (MAX_SKIPPED - 1)


def test_the_first_step_is_not_timed(monkeypatch):
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(clock))
    trainer = trainer_of([True] * 3)
    trainer._step()
    assert trainer.tokens_per_second is None
    trainer._step()
    # Each step reads the clock three times: 20 seconds.
    assert trainer.tokens_per_second == 100 / 20 and trainer.tokens == 200
