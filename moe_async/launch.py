"""Starts a whole run on this machine: a syncer, and one deepspeed launch for each learner.

python -m moe_async.launch recipes/quickstart.yaml
python -m moe_async.launch recipes/quickstart.yaml --learners 4 --ranks 1 --set train.steps=100
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from moe_async.engine.common_round import saved_learners
from moe_async.engine.deepspeed_bridge import accelerator_count
from moe_async.engine.run_folder import new_run
from moe_async.errors import MoeAsyncError, RecipeError
from moe_async.recipe import Recipe, load_recipe

STOP_SECONDS = 60.0
"""For so long processes that were told to stop may save what they have; then they are killed."""

LATE_SECONDS = 10.0
"""For so long a learner that was started anew may take to end by itself once the run is over."""

_LISTENING = re.compile(r"listening on .*:(\d+)$")
_CHATTER = re.compile(r"\[[-0-9: ,]+\] \[(INFO|WARNING)\] \[(real_accelerator|runner|launch)\.py:")
"""What DeepSpeed's launcher says of itself, once for each learner."""

START_SECONDS = 60.0
"""For so long the syncer may take until it listens."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="moe_async.launch", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", help="YAML file that describes the run")
    parser.add_argument("--learners", type=int, help="number of learners; default: the recipe's sync.learners")
    parser.add_argument("--ranks", type=int, help="ranks of each learner; default: the recipe's parallel.expert")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="replace a recipe entry, such as moe.top_k=1; may be given several times",
    )  # fmt: skip
    parser.add_argument("--resume", metavar="FOLDER", help="the folder of a run that was stopped: go on with it")
    parser.add_argument(
        "--pace", type=pace, action="append", default=[], metavar="LEARNER:SECONDS",
        help="let each step of a learner take at least so long, for experiments; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--restarts", type=int, default=3, metavar="N",
        help="how often a learner or the syncer that died is started anew, with sync.via: syncer; default: %(default)d",
    )  # fmt: skip
    return parser.parse_args(arguments)


def pace(text: str) -> tuple[int, float]:
    """Learner and seconds of ``LEARNER:SECONDS``."""
    learner, _, seconds = text.partition(":")
    try:
        return int(learner), float(seconds)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no pace; write LEARNER:SECONDS, such as 0:2.5") from None


@dataclass
class Part:
    """A process of the run.

    Attributes:
        name: with which its lines are marked.
        command: makes the command line that starts it anew.
        process: what runs.
        restarts: how often it has been started anew.
    """

    name: str
    command: Callable[[], list[str]]
    process: subprocess.Popen[str]
    restarts: int = 0


class Run:
    """The processes of one run on this machine.

    Args:
        recipe: the resolved recipe.
        recipe_path, overrides: from which it came.
        ranks: of each learner.
        restarts: how often a part may be started anew.
        resume: folder of a run to go on with; None: a new one.
        paces: seconds that each step of a learner takes at least, by learner.
    """

    def __init__(
        self,
        recipe: Recipe,
        recipe_path: str,
        overrides: Sequence[str],
        ranks: int,
        restarts: int,
        resume: Path | None = None,
        paces: Mapping[int, float] | None = None,
    ) -> None:
        self._recipe, self._path, self._overrides = recipe, recipe_path, list(overrides)
        self._ranks, self._restarts = ranks, restarts
        self._accelerators = accelerator_count()
        wanted = ranks * recipe.sync.learners
        if self._accelerators and wanted > self._accelerators:
            raise RecipeError(
                f"{recipe.sync.learners} learners of {ranks} ranks need {wanted} accelerators but this machine has "
                f"{self._accelerators}. Use fewer --ranks or --learners, or start learners on several machines by hand."
            )
        self._resume, self._paces = resume, paces or {}
        self._port = 0
        self._listening = threading.Event()
        self._folder = resume
        self._stopping = self._over = self._alone = self._failed = 0.0
        self._dismissed: set[str] = set()
        self._lock = threading.Lock()
        self._parts: dict[str, Part] = {}

    def start(self) -> None:
        """Start the syncer, then the learners.

        Raises:
            MoeAsyncError: the syncer does not come up, or there is nothing to go on with.
        """
        learners = self._recipe.sync.learners
        checkpoints = saved_learners(self._resume, learners, self._joint) if self._resume else [None] * learners
        # Named from here, so that a syncer that is started anew finds what it had.
        folder = self._folder = (
            self._resume or new_run(Path(self._recipe.log.dir).expanduser(), self._recipe.name or "run").path
        )
        # The syncer takes a free port, and the same one when it is started anew.
        self._start("syncer", partial(self._syncer_command, folder))
        if not self._listening.wait(START_SECONDS) or self._parts["syncer"].process.poll() is not None:
            self.kill()
            raise MoeAsyncError("the syncer did not start; its lines above say why.")
        for learner, saved in enumerate(checkpoints):
            come_back = ["--resume", str(saved)] if saved is not None else []
            # Only the first time: one that dies is started anew with the newest weights.
            self._start(f"learner {learner}", partial(self._learner_command, learner), come_back)

    @property
    def _joint(self) -> bool:
        """Whether learners add up among themselves, so that none can be missing."""
        return self._recipe.sync.via == "all_reduce"

    def _syncer_command(self, folder: Path) -> list[str]:
        listen = ["--listen", f"127.0.0.1:{self._port}", "--folder", str(folder)]
        return [sys.executable, "-m", "moe_async.syncer", *listen]

    def _learner_command(self, learner: int) -> list[str]:
        command = ["deepspeed", "--num_gpus", str(self._ranks)]
        if self._accelerators:
            # Learners on one machine share it: each takes accelerators of its own.
            first = learner * self._ranks
            devices = ",".join(str(device) for device in range(first, first + self._ranks))
            command = ["deepspeed", "--include", f"localhost:{devices}"]
        command += ["--master_port", str(free_port()), "--module", "moe_async.train", "--recipe", self._path]
        command += ["--join", f"127.0.0.1:{self._port}", "--learner", str(learner)]
        if learner in self._paces:
            command += ["--pace", str(self._paces[learner])]
        for override in self._overrides:
            command += ["--set", override]
        return command

    def _start(self, name: str, command: Callable[[], list[str]], once: Sequence[str] = (), restarts: int = 0) -> None:
        # A process group of its own: a learner dies with all its ranks, and alone.
        process = subprocess.Popen(
            [*command(), *once],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            bufsize=1,
            env=os.environ
            | {
                "PYTHONUNBUFFERED": "1",
                "MOE_ASYNC_LOCAL_RANKS": str(self._local_ranks),
                # Each part ends by itself when this process is gone.
                "MOE_ASYNC_STARTER": str(os.getpid()),
            },
        )  # fmt: skip
        self._parts[name] = Part(name, command, process, restarts)
        assert process.stdout is not None
        threading.Thread(target=self._show, args=(name, process.stdout), daemon=True).start()

    @property
    def _local_ranks(self) -> int:
        """Ranks on this machine, over all learners: they share its cores."""
        return self._ranks * self._recipe.sync.learners

    def _show(self, name: str, lines: IO[str]) -> None:
        for line in lines:
            if name == "syncer" and (found := _LISTENING.match(line)):
                self._port = int(found[1])
                self._listening.set()
            if _CHATTER.match(line):
                continue
            # The syncer's closing table is the run's.
            prefix = "" if name == "syncer" else f"[{name}] "
            with self._lock:
                print(f"{prefix}{line}", end="", flush=True)

    def wait(self) -> int:
        """Until the run is over; restarts what died. The exit code: 0 when the run came to its end."""
        while True:
            time.sleep(0.2)
            syncer = self._parts["syncer"]
            if self._stopping and time.monotonic() - self._stopping > STOP_SECONDS:
                self.kill()
            ended = [part for part in self._parts.values() if part.process.poll() is not None]
            died = [part for part in ended if part.process.returncode]
            if died and self._joint and not self._stopping:
                self._fail(died[0])
            if len(ended) == len(self._parts):
                return max(part.process.returncode != 0 for part in ended if part.name not in self._dismissed)
            if self._stopping or self._failed:
                continue
            if syncer.process.poll() == 0:
                self._dismiss()
                continue
            if len(ended) == len(self._parts) - 1 and not died:
                self._end_syncer(syncer)
            for part in died:
                if not self._revive(part):
                    print(f"error: {part.name} died for the last time; the run stops.", file=sys.stderr, flush=True)
                    self.stop()
                    break

    def _fail(self, part: Part) -> None:
        """Nobody goes on without a part that has ended: the others hear of it from the syncer, or from this process."""
        if not self._failed:
            self._failed = time.monotonic()
            print(
                f"error: {part.name} ended with code {part.process.returncode}; with sync.via all_reduce nobody goes "
                "on without all the others, so the run ends. The other lines say why. Start the whole run again with "
                f"--resume {self._folder}, which goes on from the newest checkpoints that fit together.",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        if time.monotonic() - self._failed > LATE_SECONDS:
            self.stop()

    def _end_syncer(self, syncer: Part) -> None:
        """All learners have ended well. A syncer that died after they had finished waits for them in vain."""
        self._alone = self._alone or time.monotonic()
        if syncer.process.poll() is None and time.monotonic() - self._alone > LATE_SECONDS:
            print("the syncer missed the end of the run, so there is no closing table.", file=sys.stderr, flush=True)
            self.stop()

    def _dismiss(self) -> None:
        """The run is over; learners write their last files. One that was started anew has come too late."""
        self._over = self._over or time.monotonic()
        for part in self._parts.values():
            late = time.monotonic() - self._over > (LATE_SECONDS if part.restarts else STOP_SECONDS)
            if part.process.poll() is None and late:
                self._dismissed.add(part.name)
                _signal(part, signal.SIGKILL)
            elif part.process.poll() and part.restarts:
                self._dismissed.add(part.name)

    def _revive(self, part: Part) -> bool:
        if part.restarts >= self._restarts:
            return False
        print(
            f"{part.name} died with code {part.process.returncode}; starting it anew "
            f"({part.restarts + 1} of {self._restarts})",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        self._start(part.name, part.command, restarts=part.restarts + 1)
        return True

    def stop(self) -> None:
        """Tell all parts to stop; learners save what they have."""
        self._stopping = self._stopping or time.monotonic()
        for part in self._parts.values():
            _signal(part, signal.SIGINT)

    def kill(self) -> None:
        """End all parts at once."""
        for part in self._parts.values():
            _signal(part, signal.SIGKILL)


def _signal(part: Part, number: signal.Signals) -> None:
    try:
        os.killpg(part.process.pid, number)
    except ProcessLookupError:
        return


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Start a run and wait for its end."""
    parsed = parse_arguments(arguments)
    overrides = list(parsed.overrides)
    if parsed.learners is not None:
        overrides.append(f"sync.learners={parsed.learners}")
    try:
        recipe = load_recipe(parsed.recipe, overrides)
        if recipe.sync.between is None:
            raise RecipeError(
                f"{parsed.recipe} is for one learner: its sync.between is null. Start it with deepspeed --module "
                "moe_async.train --recipe, or add a policy for each class of parameters to sync.between."
            )
        ranks = parsed.ranks or recipe.parallel.expert
        recipe.check_world(ranks)
        resume = Path(parsed.resume).expanduser().resolve() if parsed.resume else None
        if resume is not None and not (resume / "syncer").is_dir():
            raise RecipeError(
                f"{resume} is not the folder of a run with several learners: it has no folder syncer. Give a folder "
                "such as runs/quickstart, or leave --resume out."
            )
        run = Run(recipe, parsed.recipe, overrides, ranks, parsed.restarts, resume, dict(parsed.pace))

        def on_signal(number: int, frame: FrameType | None) -> None:
            run.stop()

        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)
        run.start()
        code = run.wait()
    except MoeAsyncError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
