"""What happens around the steps of a run: records, progress, evaluations, checkpoints.

Hooks run on every rank in one order. Those that communicate (evaluation, checkpoint) do it on every rank; those that
write or show (the others) are given to rank 0 alone.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from moe_async.engine.evaluate import Evaluation
from moe_async.engine.report import StepReport
from moe_async.engine.run_folder import RunFolder, append_line
from moe_async.errors import MoeAsyncError
from moe_async.ops.load import load_balance

if TYPE_CHECKING:
    from moe_async.engine.loop import Trainer

Say = Callable[[str], None]


@dataclass(frozen=True)
class StepRecord:
    """A step as its observers see it.

    Attributes:
        report: what the step did.
        tokens: label tokens since the beginning of the run, over all ranks.
        seconds: wall time of the step.
        data_wait: seconds spent getting the micro-batches.
        comm_wait: seconds this rank spent in its own blocking collectives (all-to-all, ZeRO 0 reductions).
        data_age: of several learners: the learner's own steps since it sent an update that came back, merged, with this
            step; the largest where several did, None where none did.
    """

    report: StepReport
    tokens: int
    seconds: float
    data_wait: float
    comm_wait: float
    data_age: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.report.label_tokens / max(self.seconds, 1e-9)

    def line(self) -> dict[str, Any]:
        """The step's line in metrics.jsonl."""
        report = self.report
        return {
            "step": report.step,
            "tokens": self.tokens,
            "lm_loss": report.lm_loss,
            **{f"{name}_loss": value for name, value in report.balance.items()},
            "lr": report.learning_rate,
            "grad_norm": report.grad_norm,
            "applied": report.applied,
            **({"left_out": list(report.left_out)} if report.left_out else {}),
            "dropped": report.dropped,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "data_wait": round(self.data_wait, 6),
            "comm_wait": round(self.comm_wait, 6),
            **({} if self.data_age is None else {"data_age": self.data_age}),
        }


class Hook:
    """Called around the steps of a run; every method does nothing by default."""

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """After each optimizer step."""

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """After each evaluation."""

    def on_save(self, trainer: Trainer) -> None:
        """Before each checkpoint."""

    def on_end(self, trainer: Trainer) -> None:
        """When the run is over or was told to stop."""


class MetricsHook(Hook):
    """Writes metrics.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.metrics

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Append the step's line."""
        append_line(self._path, record.line())

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Append the evaluation's line."""
        append_line(self._path, evaluation_line(trainer.engine.global_step, evaluation))


def evaluation_line(step: int, evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation's line in metrics.jsonl."""
    return {
        "step": step,
        "heldout_bits_per_byte": evaluation.bits_per_byte,
        "heldout_bits_per_byte_by_domain": evaluation.by_domain,
    }


class FirstStepHook(Hook):
    """Notes how long the first optimizer step took to come."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.seconds: float | None = None

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Note the time once."""
        if self.seconds is None:
            self.seconds = time.time() - self._began


class ProgressHook(Hook):
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, say: Say, every: int, steps: int, done: int, terminal: bool) -> None:
        self._say = say
        self._every = every
        self._steps = steps
        self._bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True) if terminal else None

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Move the bar, or say a line every ``every`` steps, at the first step and at a skipped one."""
        report = record.report
        if not report.applied:
            self._tell(
                f"step {report.step}: skipped, loss {report.lm_loss} or gradient norm {report.grad_norm} is not finite"
            )
        elif report.left_out:
            self._tell(f"step {report.step}: {report.left_out[0]} gradients left out, which are not finite")
        rate = trainer.tokens_per_second or record.tokens_per_second
        worst = max((load_balance(counts).max_over_mean for counts in report.counts_LE), default=1.0)
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {report.lm_loss:.3f}, {rate:,.0f} tok/s, load {worst:.2f}", refresh=False)
            self._bar.update(1)
        elif report.step % self._every == 0 or report.step in (1, self._steps):
            self._say(
                f"step {report.step}/{self._steps}  loss {report.lm_loss:.4f}  grad {report.grad_norm:.3f}  "
                f"lr {report.learning_rate:.2e}  {rate:,.0f} tokens/s  max/mean load {worst:.2f}"
            )

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Say the held-out figure."""
        domains = ", ".join(f"{domain} {bits:.3f}" for domain, bits in evaluation.by_domain.items())
        self._tell(
            f"step {trainer.engine.global_step}: held-out {evaluation.bits_per_byte:.3f} bits per byte ({domains})"
        )

    def on_end(self, trainer: Trainer) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def _tell(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text)
        else:
            self._say(text)


class TensorBoardHook(Hook):
    """Writes TensorBoard scalars into the run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        try:
            tensorboard = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise MoeAsyncError(
                "log.tensorboard is true but TensorBoard is not installed; run "
                "`pip install 'moe_async[tensorboard]'`, or use --set log.tensorboard=false."
            ) from error
        self._writer = tensorboard.SummaryWriter(str(folder.path / "tensorboard"))

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Write the step's scalars."""
        for name, value in record.line().items():
            if name not in ("step", "applied", "left_out"):
                self._writer.add_scalar(f"train/{name}", value, record.report.step)

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Write the held-out figures."""
        step = trainer.engine.global_step
        self._writer.add_scalar("heldout/bits_per_byte", evaluation.bits_per_byte, step)
        for domain, bits in evaluation.by_domain.items():
            self._writer.add_scalar(f"heldout/{domain}", bits, step)

    def on_end(self, trainer: Trainer) -> None:
        """Flush to disk."""
        self._writer.close()


class EvaluationHook(Hook):
    """Evaluates every ``every`` steps (0: never) and after the last. Every rank has one."""

    def __init__(self, every: int) -> None:
        self._every = every

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Evaluate when it is time."""
        step = record.report.step
        if trainer.done or (self._every and step % self._every == 0):
            trainer.evaluate()


class CheckpointHook(Hook):
    """Saves every ``every`` steps (0: never) and at the end, also when told to stop. Every rank has one."""

    def __init__(self, every: int) -> None:
        self._every = every

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Save when it is time."""
        if self._every and record.report.step % self._every == 0:
            trainer.save()

    def on_end(self, trainer: Trainer) -> None:
        """Save what is not saved yet."""
        if trainer.saved_step != trainer.engine.global_step:
            trainer.save()
