"""What the launcher runs on every rank: trains one learner from a recipe.

deepspeed --num_gpus 2 --module moe_async.train --recipe recipes/quickstart.yaml
torchrun --nproc-per-node 2 -m moe_async.train --recipe recipes/quickstart.yaml --set train.steps=100
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from moe_async.comm import World, leave_process_group, read_launch
from moe_async.data import Corpus, TrigramModel, load_corpus, make_tokenizer
from moe_async.engine.checkpoint_folder import abandon_after
from moe_async.engine.generate import generate
from moe_async.engine.hooks import (
    CheckpointHook,
    EvaluationHook,
    FirstStepHook,
    Hook,
    MetricsHook,
    ProgressHook,
    TensorBoardHook,
)
from moe_async.engine.join import join_run, make_exchange
from moe_async.engine.load_record import LoadHook, open_store
from moe_async.engine.loop import Trainer
from moe_async.engine.run_folder import RunFolder, finite, forget_after, learner_run, new_run, resumed_run
from moe_async.engine.seat import Seat, address
from moe_async.engine.start import check_same_text, check_vocabulary, initialize, join_world
from moe_async.engine.stop import StopFlag, launcher_processes
from moe_async.engine.summary import build_summary, format_summary
from moe_async.errors import DataError, MoeAsyncError, RecipeError
from moe_async.model import build_model
from moe_async.recipe import Recipe, deepspeed_config, dump_recipe, load_recipe

PATIENCE_SECONDS = 10.0
"""For this long a rank leaves it to the first rank of its machine to tell of an error that both have."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="moe_async.train", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--recipe", required=True, help="YAML file that describes the run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="replace a recipe entry, such as moe.top_k=1; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--resume", metavar="WHAT", help="'latest', the folder of a run, or a checkpoint: go on from there"
    )
    parser.add_argument(
        "--join", type=address, metavar="HOST:PORT", help="be one of several learners: the address of their syncer"
    )
    parser.add_argument(
        "--learner", type=int, default=-1, metavar="N", help="with --join: the place to take; default: a free one"
    )
    parser.add_argument(
        "--pace", type=float, default=0.0, metavar="SECONDS", help="let a step take at least so long, for experiments"
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help="given by the launcher; not used")
    return parser.parse_args(arguments)


def process_start() -> float:
    """When the launch of this rank began, as a Unix time: the start of its launcher, or of this process."""
    began = [time.time()]
    for pid in (os.getpid(), *launcher_processes()):
        # Some systems do not let a process look at others.
        with contextlib.suppress(psutil.Error):
            began.append(float(psutil.Process(pid).create_time()))
    return min(began)


class Session:
    """The parts of one rank's run, made one after another."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.began = process_start()
        self.recipe: Recipe = load_recipe(arguments.recipe, arguments.overrides)
        self.tokenizer = make_tokenizer(self.recipe.data.tokenizer)
        check_vocabulary(self.recipe, self.tokenizer)
        share_cores()
        # Before joining: a rank whose launcher dies while it waits for the others is ended too.
        starter = int(os.environ.get("MOE_ASYNC_STARTER", "0"))
        self.stop = StopFlag(launched="CROSS_SIZE" in os.environ, starter=starter)
        self.stop.watch()
        self.world = join_world(self.recipe)
        # Not earlier: a rank that still waits for others to join has nothing to save and shall end at once.
        self.stop.install()
        self.say(
            f"{self.recipe.name}: {self.world.size} ranks on {self.world.device.type}, experts over "
            f"{self.world.topology.expert_parallel}, precision {self.recipe.train.precision}"
        )
        for warning in self.recipe.warnings():
            self.say(f"warning: {warning}")
        # A learner that comes back takes the place that its checkpoint tells of.
        found = open_folder(self.recipe, arguments.resume, self.world) if arguments.resume else None
        checkpoint = found[1] if found else None
        self.link, self.seat = join_run(self.recipe, self.world, arguments.join, arguments.learner, checkpoint)
        self.corpus: Corpus = load_corpus(self.recipe.data, self.tokenizer)
        check_same_text(self.corpus, self.world)
        self.say(
            f"text: {sum(self.corpus.train_bytes):,} bytes to train on, {sum(self.corpus.heldout_bytes):,} held out, "
            f"domains {', '.join(self.corpus.domains)}"
        )
        # Not earlier: a run that cannot start leaves no folder.
        self.folder, self.checkpoint = found or open_folder(self.recipe, None, self.world, self.seat)
        self.say(f"run folder: {self.folder.path}")
        engine = initialize(build_model(self.recipe, self.world), self.recipe, self.world)
        exchange = None
        if self.link is not None and self.seat is not None:
            exchange = make_exchange(engine, self.recipe, self.link, self.seat, self.stop, self.folder)
        self.trainer = Trainer(engine, self.recipe, self.world, self.corpus, self.folder, self.stop, exchange)
        self.trainer.pace = arguments.pace
        self.first_step = FirstStepHook(self.began)

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.world.rank == 0:
            print(text, flush=True)

    def run(self) -> None:
        """Train, then report, or save and leave when told to stop."""
        trainer, steps = self.trainer, self.recipe.train.steps
        if self.checkpoint is not None:
            trainer.resume(self.checkpoint)
            more = "; it has sent more since then and goes on from the newest shared weights" if trainer.rejoins else ""
            self.say(f"resumed from {self.checkpoint} at step {trainer.engine.global_step}{more}")
            if trainer.engine.global_step >= steps and self.world.everyone.broadcast_object(self._is_reported()):
                self.say(f"nothing is left to do: train.steps is {steps}. Train longer with --set train.steps=...")
                return
        if self.world.rank == 0:
            self._prepare_folder()
        trainer.hooks = self._hooks()
        if trainer.first_evaluation is None and self.reports:
            trainer.evaluate()
        if trainer.run():
            reports = trainer.exchange is None or trainer.exchange.reports
            if reports and not trainer.evaluated:
                # Nothing was trained, because the run had been stopped at this very step.
                trainer.evaluate()
            self._leave(self._report() if reports else {})
        else:
            if trainer.exchange is not None:
                trainer.exchange.pause()
            self.say(
                f"stopped by {self.stop.reason or 'another rank'} at step {trainer.engine.global_step}; checkpoint "
                f"{trainer.saved_path}. Go on with --resume {self.folder.path}"
            )

    @property
    def reports(self) -> bool:
        """Whether this learner evaluates while it trains."""
        return self.seat is None or self.seat.learner == 0

    def _leave(self, summary: dict[str, Any]) -> None:
        """Tell the syncer how it went, and go. Every rank takes part."""
        if self.trainer.exchange is not None:
            own = {**self.trainer.exchange.summary(), "tokens_per_second": self.trainer.tokens_per_second}
            if self.world.rank == 0:
                self.trainer.exchange.report(finite({**summary, "learner": own}))
            self.trainer.exchange.leave()

    def _is_reported(self) -> bool:
        """Whether the folder's summary is of the step at which the run now is, and no other learner waits for this."""
        try:
            summary = json.loads(self.folder.summary.read_text())
        except (OSError, ValueError):
            return False
        return (
            self.seat is None and isinstance(summary, dict) and summary.get("step") == self.trainer.engine.global_step
        )

    def _prepare_folder(self) -> None:
        """Write down what is run, and put aside what an interrupted run wrote after this one's first step."""
        self.folder.recipe.write_text(dump_recipe(self.recipe))
        config = deepspeed_config(self.recipe, self.world.size)
        self.folder.deepspeed.write_text(json.dumps(config, indent=1) + "\n")
        # The figures of an earlier end are not those of the end that comes.
        self.folder.summary.unlink(missing_ok=True)
        # Where a learner has lived on after its checkpoint, those steps are part of the run.
        step = sys.maxsize if self.trainer.rejoins else self.trainer.engine.global_step
        forget_after(self.folder.metrics, step)
        for path in abandon_after(self.folder.checkpoints, step):
            self.say(f"a later checkpoint of another branch is now {path}")

    def _hooks(self) -> list[Hook]:
        recipe, log = self.recipe, self.recipe.log
        everywhere: list[Hook] = [CheckpointHook(recipe.train.checkpoint_every)]
        if self.reports:
            everywhere.insert(0, EvaluationHook(recipe.train.eval_every))
        if self.world.rank != 0:
            return [*everywhere]
        done, terminal = self.trainer.engine.global_step, sys.stderr.isatty()
        shown: list[Hook] = [
            self.first_step,
            MetricsHook(self.folder),
            ProgressHook(self.say, log.every, recipe.train.steps, done, terminal),
        ]
        if log.load_every and self.trainer.observed.layers:
            shown.insert(2, self._load_hook())
        if log.tensorboard:
            shown.append(TensorBoardHook(self.folder))
        return [*shown, *everywhere]

    def _load_hook(self) -> LoadHook:
        step = sys.maxsize if self.trainer.rejoins else self.trainer.engine.global_step
        store, aside = open_store(self.folder.expert_load, self.trainer.observed, step)
        if aside is not None:
            self.say(f"the record of expert loads so far is of another number of ranks; it is now {aside}")
        return LoadHook(store, self.trainer.engine)

    def _report(self) -> dict[str, Any]:
        """The closing table, some generated text, and where the files are. Every rank takes part."""
        # On every rank, though only one shows it: no rank waits while another counts.
        trigram = TrigramModel.count(self.corpus.train, self.tokenizer.vocab_size).bits_per_byte(self.corpus)
        summary = build_summary(self.trainer, trigram, time.time() - self.began, self.first_step.seconds)
        self._write_summary(summary)
        if self.seat is None:
            # The table of a run with several learners is the syncer's.
            self.say("\n" + format_summary(summary) + "\n")
        summary["samples"] = self._samples()
        summary["seconds"] = time.time() - self.began
        self._write_summary(summary)
        for sample in summary["samples"]:
            self.say(f"> {sample['prompt']}|{sample['text']}\n")
        self.say(
            f"files: {self.folder.path} (summary.json, metrics.jsonl, expert_load)\n"
            f"checkpoint: {self.trainer.saved_path}\n"
            f"done in {summary['seconds']:.0f} s"
            + (f", first step after {self.first_step.seconds:.0f} s" if self.first_step.seconds else "")
        )
        return summary

    def _write_summary(self, summary: dict[str, Any]) -> None:
        if self.world.rank == 0:
            self.folder.summary.write_text(json.dumps(finite(summary), indent=1) + "\n")

    def _samples(self) -> list[dict[str, str]]:
        log, engine = self.recipe.log, self.trainer.engine
        if not log.sample_tokens:
            return []
        engine.bridge.train(False)
        texts = generate(
            engine.forward,
            self.tokenizer,
            log.prompts,
            log.sample_tokens,
            context=self.recipe.data.seq_len,
            seed=self.recipe.train.seed,
            device=self.world.device,
        )
        engine.bridge.train(True)
        return [{"prompt": prompt, "text": text} for prompt, text in zip(log.prompts, texts, strict=True)]


def share_cores() -> None:
    """Give each CPU rank of this machine its share of the cores; more threads than cores slow every rank down."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    if "SLURM_CPUS_PER_TASK" in os.environ and "RANK" not in os.environ:
        torch.set_num_threads(int(os.environ["SLURM_CPUS_PER_TASK"]))
    else:
        cores = len(os.sched_getaffinity(0))
        # Several learners on one machine share its cores too; the command that starts them says so.
        ranks = int(os.environ.get("MOE_ASYNC_LOCAL_RANKS", read_launch().local_world_size))
        torch.set_num_threads(max(1, cores // ranks))


def open_folder(
    recipe: Recipe, resume: str | None, world: World, seat: Seat | None = None
) -> tuple[RunFolder, Path | None]:
    """The run's folder and the checkpoint to start from, the same on every rank. Every rank calls it; blocks."""
    result: tuple[RunFolder, Path | None] | str = ""
    if world.rank == 0:
        runs, name = Path(recipe.log.dir).expanduser(), recipe.name or "run"
        try:
            if seat is not None and not resume:
                result = learner_run(runs, seat.folder, seat.learner), None
            else:
                result = resumed_run(runs, name, resume) if resume else (new_run(runs, name), None)
        except (MoeAsyncError, OSError) as error:
            result = str(error)
    result = world.everyone.broadcast_object(result)
    if isinstance(result, str):
        raise MoeAsyncError(result)
    return result


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one rank and end the process; when a rank fails the launcher then ends the others."""
    parsed = parse_arguments(arguments)
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    first_here = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    try:
        session = Session(parsed)
        session.run()
        session.world.everyone.barrier()
        leave_process_group()
    except (RecipeError, DataError) as error:
        # Every rank of a machine reads the same files and fails alike, and one message is enough. A rank that still
        # lives after a while failed alone, and nobody else tells.
        if not first_here:
            # The launcher's signal ends the waiting.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(PATIENCE_SECONDS)
        print(f"error: {error}", file=sys.stderr, flush=True)
        leave_at_once(1)
    except MoeAsyncError as error:
        print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        leave_at_once(1)
    except BaseException as error:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        leave_at_once(130 if isinstance(error, KeyboardInterrupt) else 1)
    leave_at_once(0)


def leave_at_once(code: int) -> NoReturn:
    """End the process without the interpreter's own end: threads of the communication library abort a process that
    ends under them, and groups would wait for ranks that may be dead."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
