"""What is written and shown around the steps, and when evaluations and checkpoints happen."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from moe_async.engine.evaluate import Evaluation
from moe_async.engine.hooks import (
    CheckpointHook,
    EvaluationHook,
    Hook,
    MetricsHook,
    ProgressHook,
    StepRecord,
    TensorBoardHook,
)
from moe_async.engine.run_folder import RunFolder
from moe_async.engine.step import StepReport
from moe_async.errors import MoeAsyncError

EVALUATION = Evaluation(2.5, {"code": 2.0, "plants": 3.25})


def record_of(step, applied=True, counts=((3, 1), (2, 2)), **changes):
    report = StepReport(
        step=step, lm_loss=2.5, balance={"switch": 1.25, "z": 0.5}, learning_rate=1e-3, grad_norm=0.75,
        applied=applied, label_tokens=60, routed_tokens=64, counts_LE=torch.tensor(counts),
        zero_LE=torch.zeros(2, 0, dtype=torch.int64), dropped_LE=torch.tensor([[3, 0], [0, 1]]), bad_tokens=(0, 0),
    )  # fmt: skip
    values = {"tokens": 60 * step, "seconds": 0.5, "data_wait": 0.125, "comm_wait": 0.0625}
    return StepRecord(report=report, **(values | changes))


class FakeTrainer:
    """Notes what hooks ask for."""

    def __init__(self, steps=10):
        self.engine = SimpleNamespace(global_step=0, steps=steps)
        self.tokens_per_second = 1234.0
        self.saved_step = -1
        self.evaluated, self.saved = [], []

    @property
    def done(self):
        return self.engine.global_step >= self.engine.steps

    def evaluate(self):
        self.evaluated.append(self.engine.global_step)

    def save(self):
        self.saved.append(self.engine.global_step)
        self.saved_step = self.engine.global_step

    def run(self, hook, steps):
        for step in range(1, steps + 1):
            self.engine.global_step = step
            hook.on_step(self, record_of(step))
        hook.on_end(self)


def test_the_line_of_a_step_by_hand():
    line = record_of(3).line()
    assert line == {
        "step": 3, "tokens": 180, "lm_loss": 2.5, "switch_loss": 1.25, "z_loss": 0.5, "lr": 1e-3, "grad_norm": 0.75,
        "applied": True, "dropped": 4, "tokens_per_second": 120.0, "data_wait": 0.125, "comm_wait": 0.0625,
    }  # fmt: skip
    assert json.loads(json.dumps(line)) == line


def test_a_line_has_what_readers_of_metrics_rely_on():
    expected = {
        "step", "tokens", "lm_loss", "switch_loss", "lr", "grad_norm", "tokens_per_second", "data_wait", "comm_wait"
    }  # fmt: skip
    assert expected <= set(record_of(1).line())


def test_a_step_without_time_has_a_finite_rate():
    assert record_of(1, seconds=0.0).line()["tokens_per_second"] > 0


def test_metrics_are_a_line_for_each_step_and_evaluation(tmp_path):
    trainer, hook = FakeTrainer(), MetricsHook(RunFolder(tmp_path))
    hook.on_evaluation(trainer, EVALUATION)
    trainer.run(hook, 2)
    hook.on_evaluation(trainer, EVALUATION)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[1:3] == [record_of(1).line(), record_of(2).line()]
    figures = {
        "heldout_bits_per_byte": 2.5,
        "heldout_bits_per_byte_by_domain": {"code": 2.0, "plants": 3.25},
    }
    assert lines[0] == {"step": 0, **figures} and lines[3] == {"step": 2, **figures}


def test_progress_is_said_at_the_first_step_every_so_often_and_at_the_last():
    said = []
    FakeTrainer(steps=7).run(ProgressHook(said.append, every=3, steps=7, done=0, terminal=False), 7)
    assert [line.split("  ")[0] for line in said] == ["step 1/7", "step 3/7", "step 6/7", "step 7/7"]
    # The largest load over the mean is 3 / 2, in the first layer.
    assert said[0] == "step 1/7  loss 2.5000  grad 0.750  lr 1.00e-03  1,234 tokens/s  max/mean load 1.50"


def test_progress_of_a_dense_model_and_a_skipped_step():
    said = []
    hook = ProgressHook(said.append, every=100, steps=7, done=0, terminal=False)
    hook.on_step(FakeTrainer(), record_of(2, applied=False, counts=()))
    assert said == ["step 2: skipped, loss 2.5 or gradient norm 0.75 is not finite"]
    hook.on_step(FakeTrainer(), record_of(1, counts=()))
    assert said[1].endswith("max/mean load 1.00")


def test_an_evaluation_is_said_with_its_domains():
    said = []
    trainer = FakeTrainer()
    trainer.engine.global_step = 4
    ProgressHook(said.append, 1, 7, 0, terminal=False).on_evaluation(trainer, EVALUATION)
    assert said == ["step 4: held-out 2.500 bits per byte (code 2.000, plants 3.250)"]


@pytest.mark.parametrize(("every", "expected"), [(0, [10]), (4, [4, 8, 10]), (5, [5, 10]), (100, [10])])
def test_when_evaluations_happen(every, expected):
    trainer = FakeTrainer(steps=10)
    trainer.run(EvaluationHook(every), 10)
    assert trainer.evaluated == expected


@pytest.mark.parametrize(
    ("every", "steps", "expected"), [(0, 10, [10]), (4, 10, [4, 8, 10]), (5, 10, [5, 10]), (4, 6, [4, 6])]
)
def test_when_checkpoints_happen_each_step_at_most_once(every, steps, expected):
    trainer = FakeTrainer(steps=10)
    trainer.run(CheckpointHook(every), steps)
    assert trainer.saved == expected


def test_tensorboard_that_is_not_installed_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MoeAsyncError, match=r"pip install 'moe_async\[tensorboard\]'.*--set log\.tensorboard=false"):
        TensorBoardHook(RunFolder(tmp_path))


def test_a_hook_does_nothing_by_default():
    trainer = FakeTrainer()
    trainer.run(Hook(), 3)
    Hook().on_evaluation(trainer, EVALUATION)
    assert trainer.evaluated == trainer.saved == []
