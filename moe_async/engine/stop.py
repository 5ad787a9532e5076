"""Stopping cleanly: signals and a vanished launcher raise a flag, which all ranks agree on between steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

import psutil
import torch

from moe_async.comm import World

GRACE_SECONDS = 120.0
"""After its launcher vanished, a rank has this long to end its step, save and leave; then it is ended."""

ALONE_SECONDS = 5.0
"""The same for a rank that has not joined the others yet, and so has nothing to save."""


_ORPHANED = "launcher gone"
_FOLLOWING = "the other learners"
_CODES = {"": 0, _ORPHANED: 1, _FOLLOWING: 1000, **{name: signal.Signals[name].value for name in ("SIGINT", "SIGTERM")}}
"""Reasons to stop as numbers, for the ranks to agree on."""


class StopFlag:
    """Raised by SIGTERM, by Ctrl-C, or when the launcher is gone.

    A second Ctrl-C interrupts at once. The launcher may pass a signal on to its ranks one after another, so a rank
    stops only when all have agreed (`agreed`).

    Args:
        launched: DeepSpeed's launcher started this process.
        starter: process id of the command that started the whole run, above the launcher; 0: there is none.
    """

    def __init__(self, launched: bool = False, starter: int = 0) -> None:
        self.reason = ""
        self._launched = launched
        self._starter = starter
        self._launcher = launcher_processes()
        self._interrupted = False
        self._grace = ALONE_SECONDS

    def watch(self) -> None:
        """Watch the launcher from a thread, and end this process when the launcher is gone."""
        threading.Thread(target=self._end_when_orphaned, name="launcher-watch", daemon=True).start()

    def install(self) -> None:
        """Take over SIGTERM and SIGINT, once there is something to save."""
        self._grace = GRACE_SECONDS
        signal.signal(signal.SIGTERM, self.on_signal)
        signal.signal(signal.SIGINT, self.on_signal)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise the flag; a second SIGINT raises KeyboardInterrupt."""
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.reason = signal.Signals(number).name

    def follow(self) -> None:
        """Raise the flag because the other learners of the run stop."""
        self.reason = self.reason or _FOLLOWING

    def orphaned(self) -> bool:
        """Whether the launcher, or a command that started it, is gone."""
        if self._starter and not psutil.pid_exists(self._starter):
            return True
        parent = os.getppid()
        if not self._launcher:
            # It was gone before anybody looked: the first process of the system took over.
            return self._launched and parent == 1
        if parent != self._launcher[0]:
            return True
        try:
            above = psutil.Process(parent).ppid()
        except psutil.Error:
            # A process that cannot be looked at just now is no proof; one that is gone changes the parent.
            return False
        return above != self._launcher[1] if len(self._launcher) > 1 else self._launched and above == 1

    def _end_when_orphaned(self) -> None:
        """A rank may be blocked in a collective whose partner is dead; nobody is left to end it but itself."""
        while not self.orphaned():
            time.sleep(1.0)
        self.reason = self.reason or _ORPHANED
        time.sleep(self._grace)
        os._exit(1)

    def agreed(self, world: World) -> bool:
        """Whether any rank was told to stop, and then all know why. Every rank calls it at the same point; blocks."""
        code = torch.tensor([_CODES[self.reason]], device=world.device)
        told = int(world.everyone.all_reduce(code, op="max").item())
        # A rank may hear of it from another before it notices itself.
        self.reason = self.reason or next(reason for reason, number in _CODES.items() if number == told)
        return told > 0


def launcher_processes() -> tuple[int, ...]:
    """Process ids of the launcher that started this rank and, for DeepSpeed's, of the `deepspeed` command above it.

    Ending the `deepspeed` command alone leaves its launcher and the ranks running, so a rank watches both. A rank that
    was started by hand or by Slurm watches nobody: its parent may be a shell that is closed while the run goes on.
    """
    chain: list[int] = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents()[:2]:
            if not any(part.endswith(_LAUNCHERS) for part in process.cmdline()[:4]):
                break
            chain.append(process.pid)
    return tuple(chain)


_LAUNCHERS = (
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "/deepspeed",
    "/torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
)
