"""The training loop: batches in, steps, hooks, until the last step or a call to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_async.comm import World
from moe_async.data import Batch, Corpus, TrainStream, heldout_batches
from moe_async.engine.checkpoint import load_checkpoint, load_exchange, save_checkpoint
from moe_async.engine.checkpoint_folder import read_manifest
from moe_async.engine.diagnose import find_non_finite
from moe_async.engine.evaluate import Evaluation, evaluate
from moe_async.engine.hooks import Hook, StepRecord
from moe_async.engine.learner_exchange import LearnerExchange
from moe_async.engine.load_meta import load_meta
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.run_folder import RunFolder
from moe_async.engine.step import Engine
from moe_async.engine.stop import StopFlag
from moe_async.errors import CheckpointError, EngineError
from moe_async.observe import LoadWindow
from moe_async.recipe import dump_recipe, parse_recipe, state_differences

if TYPE_CHECKING:
    from moe_async.recipe import Recipe


class Trainer:
    """One run of training on one rank; every rank has one and calls its methods together.

    Args:
        engine: the model in training.
        recipe: the resolved recipe.
        world: this rank's view of the launch.
        corpus: the text.
        folder: where the run writes.
        stop: raised when the run shall end early.
        exchange: with the other learners, where this is one of several learners.

    Attributes:
        batches: this rank's micro-batches of the step at hand.
        observed: axes of the record of expert loads.
        pace: seconds that a step takes at least; it sleeps for the rest. For experiments with uneven learners.
        rejoins: whether it was resumed and yet begins with the newest shared weights, having lived on after its
            checkpoint.
    """

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        world: World,
        corpus: Corpus,
        folder: RunFolder,
        stop: StopFlag,
        exchange: LearnerExchange | None = None,
    ) -> None:
        self.engine = engine
        self.recipe = recipe
        self.world = world
        self.corpus = corpus
        self.folder = folder
        self.stop = stop
        self.exchange = exchange
        self.pace = 0.0
        self.rejoins = False
        self.hooks: list[Hook] = []
        self.load = LoadWindow(after=recipe.train.steps - max(20, recipe.train.steps // 10))
        self.tokens = 0
        self.dropped = 0
        self.skipped = 0
        self.saved_step = -1
        self.saved_path: Path | None = None
        self.first_evaluation: Evaluation | None = None
        self.last_evaluation: Evaluation | None = None
        self._evaluated_step = -1
        self._stream = TrainStream(corpus, recipe.data.seq_len, recipe.data.seed)
        rows = recipe.micro_batch_size(world.size)
        self._heldout = heldout_batches(corpus, recipe.data.seq_len, world.rank, world.size, 2 * rows)
        self.batches: Sequence[MicroBatch] = ()
        self.observed = load_meta(recipe, world, corpus.domains)
        self._warm = False
        self._timed_tokens = 0
        self._timed_seconds = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Label tokens of all ranks over the wall time of this process's steps; None before the second one.

        The first step is left out: it allocates and compiles.
        """
        return self._timed_tokens / self._timed_seconds if self._timed_seconds else None

    def run(self) -> bool:
        """Train to the last step, or until told to stop. True when the last step was reached.

        Raises:
            EngineError: too many steps in a row without a finite gradient.
        """
        in_a_row = 0
        if self.exchange is not None and not self._take_part(self.exchange):
            return False
        while not self.done and not self.stop.agreed(self.world):
            record = self._step()
            if self.done:
                # Before the hooks, which evaluate and save what the run ends with.
                self._close()
            in_a_row = in_a_row + 1 if record.report.left_out or not record.report.applied else 0
            for hook in self.hooks:
                hook.on_step(self, record)
            if in_a_row == self.recipe.train.max_bad_steps:
                self._give_up(record)
        # Again where there was no step left to make, or where the wait for the other learners was cut short.
        over = self.done and self._close()
        for hook in self.hooks:
            hook.on_end(self)
        return over

    def _take_part(self, exchange: LearnerExchange) -> bool:
        """Begin with the shared weights, at the others' place in the run. False when told to stop meanwhile."""
        if not exchange.start():
            return False
        self._align(exchange)
        return True

    def _align(self, exchange: LearnerExchange) -> None:
        """Be where the exchange says, in steps and in the text: a newcomer begins at the others' step, and so does a
        learner that was away for so long that they went on without it."""
        if self.engine.global_step == exchange.clock:
            return
        self.engine.global_step = exchange.clock
        self._stream = TrainStream(self.corpus, self.recipe.data.seq_len, self.recipe.data.seed)
        self._stream.skip(exchange.clock * self.recipe.train.global_batch * exchange.seat.learners)

    @property
    def done(self) -> bool:
        """Whether the run has come to its last step; with other learners, the mean of their steps counts."""
        place = self.engine.global_step if self.exchange is None else self.exchange.position
        return place >= self.engine.steps

    def _close(self) -> bool:
        """Apply what is under way, inside this learner and between learners. False when told to stop meanwhile."""
        self._drain()
        return self.exchange is None or self.exchange.over or self.exchange.finish()

    def _drain(self) -> None:
        """Apply what a delay has in flight: the weights are others then than those evaluated or saved."""
        outcomes = self.engine.drain()
        self.skipped += sum(not outcome.applied for outcome in outcomes)
        if outcomes:
            self._evaluated_step = self.saved_step = -1
        if outcomes and self.exchange is not None:
            self.exchange.drained()

    def _give_up(self, record: StepRecord) -> None:
        place = find_non_finite(self.engine.module, self.batches, self.engine.micro_batch_objective, self.world)
        layers = self.recipe.moe.moe_layers(self.recipe.model.layers) if self.recipe.moe else ()
        routers = [f"layer {layer}" for layer, bad in zip(layers, record.report.bad_tokens, strict=False) if bad]
        raise EngineError(
            f"{self.recipe.train.max_bad_steps} steps in a row were skipped because loss or gradient was not finite "
            f"(the last one is step {record.report.step}, loss {record.report.lm_loss}). "
            + (f"The first numbers that are not finite are in {place}. " if place else "")
            + (f"Routers that saw such numbers: {', '.join(routers)}. " if routers else "")
            + "Lower optim.lr, lengthen optim.schedule.warmup, or resume from an earlier checkpoint."
        )

    def _step(self) -> StepRecord:
        start, waited = time.perf_counter(), self.world.everyone.meter.seconds
        self.batches = self._next_batches()
        self.engine.observed = self.observed if self._records_next() else None
        loaded = time.perf_counter()
        if self.exchange is not None:
            self.engine.ahead = self.exchange.position - self.engine.global_step
        report = self.engine.train_step(self.batches)
        if self.pace:
            time.sleep(max(start + self.pace - time.perf_counter(), 0.0))
        seconds = time.perf_counter() - start
        if self.exchange is not None:
            self.exchange.after_step(report, seconds)
            self._align(self.exchange)
            seconds = time.perf_counter() - start
        self.tokens += report.label_tokens
        self.dropped += report.dropped
        self.skipped += bool(report.left_out) or not report.applied
        self.load.add(report.step, report.counts_LE)
        if self._warm:
            self._timed_tokens += report.label_tokens
            self._timed_seconds += seconds
        self._warm = True
        return StepRecord(
            report=report,
            tokens=self.tokens,
            seconds=seconds,
            data_wait=loaded - start,
            comm_wait=self.world.everyone.meter.seconds - waited,
            data_age=None if self.exchange is None else self.exchange.latest_age,
        )

    def _next_batches(self) -> Sequence[MicroBatch]:
        train, ranks = self.recipe.train, self.world.size
        # The ranks of all learners read one sequence of windows, as if they were those of one.
        learner, learners = (
            (0, 1) if self.exchange is None else (self.exchange.seat.learner, self.exchange.seat.learners)
        )
        batches = self._stream.next_step(
            train.global_batch * learners, learner * ranks + self.world.rank, learners * ranks, train.accumulation
        )
        return [self._on_device(batch) for batch in batches]

    def _on_device(self, batch: Batch) -> MicroBatch:
        device = self.world.device
        return MicroBatch(batch.tokens.to(device), batch.labels.to(device), domains=batch.domains.to(device))

    def _records_next(self) -> bool:
        """Whether the loads of the next step are recorded."""
        every = self.recipe.log.load_every
        return bool(every and self.observed.layers) and (self.engine.global_step + 1) % every == 0

    @property
    def evaluated(self) -> bool:
        """Whether the last evaluation is of the weights as they are now."""
        return self._evaluated_step == self.engine.global_step

    def evaluate(self) -> Evaluation:
        """Bits per byte of the held-out split now. Every rank calls it; blocks. Changes no state of the training."""
        self.engine.bridge.train(False)
        try:
            result = evaluate(self.engine.forward, self._heldout, self.corpus, self.world)
        finally:
            self.engine.bridge.train(True)
        self.first_evaluation = self.first_evaluation or result
        self.last_evaluation, self._evaluated_step = result, self.engine.global_step
        for hook in self.hooks:
            hook.on_evaluation(self, result)
        return result

    def save(self) -> Path:
        """Write a checkpoint of everything. Every rank calls it; blocks."""
        step = self.engine.global_step
        for hook in self.hooks:
            hook.on_save(self)
        self.saved_path = save_checkpoint(
            self.folder.checkpoints,
            step,
            self.engine.bridge,
            dump_recipe(self.recipe),
            self.state_dict(),
            self._kept_checkpoints(),
            None if self.exchange is None else self.exchange.tensors(),
        )
        self.saved_step = step
        return self.saved_path

    def _kept_checkpoints(self) -> int:
        """How many stay: learners that can only go on together need some of one round, however far apart they are."""
        keep, every = self.recipe.train.keep_checkpoints, self.recipe.train.checkpoint_every
        apart = 0 if self.exchange is None else self.exchange.apart
        return max(keep, math.ceil(apart / every) + 1) if every and apart else keep

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint. Every rank calls it; blocks.

        Raises:
            CheckpointError: the model, the experts or the optimizer of the checkpoint's recipe are others.
            DataError: the text or its order is another.
        """
        saved = parse_recipe(read_manifest(checkpoint).recipe, str(checkpoint))
        if differences := state_differences(saved, self.recipe):
            raise CheckpointError(
                f"{checkpoint} was written by another recipe: {'; '.join(differences)}. Resume with the entries that "
                "the run had (recipe.yaml in its folder), or start a new run."
            )
        manifest = load_checkpoint(checkpoint, self.engine.bridge)
        self.load_state_dict(manifest.trainer)
        if self.exchange is not None:
            own = manifest.trainer["exchange"]
            self.rejoins = not self.exchange.continues(own)
            if self.rejoins:
                # Its optimizer goes on. What it had in flight, its former life has applied.
                if self.engine.bridge.delayed is not None:
                    self.engine.bridge.delayed.load_state([])
            else:
                self.exchange.restore(own, load_exchange(checkpoint, self.world.rank))
        self.saved_step, self.saved_path = self.engine.global_step, checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Counters and positions, the same on every rank, as JSON values."""
        first, last = self.first_evaluation, self.last_evaluation
        return {
            "step": self.engine.global_step,
            "tokens": self.tokens,
            "dropped": self.dropped,
            "skipped": self.skipped,
            "data": self._stream.state_dict(),
            "load": self.load.state_dict(),
            "balance": self.engine.balance.state_dict(),
            "exchange": {} if self.exchange is None else self.exchange.state_dict(),
            "first_evaluation": None if first is None else [first.bits_per_byte, first.by_domain],
            "last_evaluation": None if last is None else [self._evaluated_step, last.bits_per_byte, last.by_domain],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self._stream.load_state_dict(state["data"])
        self.engine.global_step = state["step"]
        self.tokens, self.dropped, self.skipped = state["tokens"], state["dropped"], state["skipped"]
        self.load.load_state_dict(state["load"])
        self.engine.balance.load_state_dict(state["balance"])
        self.first_evaluation = Evaluation(*state["first_evaluation"]) if state["first_evaluation"] else None
        if state["last_evaluation"]:
            self._evaluated_step, *figures = state["last_evaluation"]
            self.last_evaluation = Evaluation(*figures)
