"""Signals, and launchers that vanish."""

import os
import signal
from types import SimpleNamespace

import psutil
import pytest

from moe_async.engine import stop
from moe_async.engine.stop import ALONE_SECONDS, GRACE_SECONDS, StopFlag


class Processes:
    """A chain of made-up processes above this one: (pid, command) from the parent up."""

    def __init__(self, monkeypatch, *chain):
        self.chain = list(chain)
        monkeypatch.setattr(os, "getppid", lambda: self.chain[0][0])
        monkeypatch.setattr(psutil, "Process", self.process)

    def process(self, pid=None):
        if pid is None:
            above = [SimpleNamespace(pid=p, cmdline=lambda command=c: command.split()) for p, c in self.chain]
            return SimpleNamespace(parents=lambda: above)
        index = [p for p, _ in self.chain].index(pid)
        return SimpleNamespace(ppid=lambda: self.chain[index + 1][0])


LAUNCHER = (20, "python -u -m deepspeed.launcher.launch --world_info=x")
COMMAND = (10, "python /venv/bin/deepspeed --num_gpus 2")
SHELL, INIT = (5, "bash train.sh"), (1, "init")


def test_deepspeeds_launcher_and_command_are_watched(monkeypatch):
    system = Processes(monkeypatch, LAUNCHER, COMMAND, SHELL, INIT)
    flag = StopFlag(launched=True)
    assert not flag.orphaned()
    system.chain = [LAUNCHER, COMMAND, INIT]  # the shell may go
    assert not flag.orphaned()
    system.chain = [LAUNCHER, INIT]
    assert flag.orphaned()
    system.chain = [INIT]
    assert flag.orphaned()


def test_a_launcher_that_was_gone_before_anybody_looked(monkeypatch):
    Processes(monkeypatch, INIT)
    assert StopFlag(launched=True).orphaned()
    assert not StopFlag(launched=False).orphaned()  # a daemon of one's own
    Processes(monkeypatch, LAUNCHER, INIT)
    assert StopFlag(launched=True).orphaned()


def test_a_shell_is_not_watched(monkeypatch):
    system = Processes(monkeypatch, SHELL, INIT)
    flag = StopFlag()
    system.chain = [INIT]
    assert not flag.orphaned()


def test_torchrun_is_watched_and_the_shell_above_it_not(monkeypatch):
    torchrun = (20, "python /venv/bin/torchrun --nproc-per-node 2")
    system = Processes(monkeypatch, torchrun, SHELL, INIT)
    flag = StopFlag()
    system.chain = [torchrun, INIT]
    assert not flag.orphaned()
    system.chain = [INIT]
    assert flag.orphaned()


def test_a_process_that_cannot_be_looked_at_is_no_proof(monkeypatch):
    system = Processes(monkeypatch, LAUNCHER, COMMAND, INIT)
    flag = StopFlag(launched=True)

    def refuse(pid=None):
        raise psutil.AccessDenied()

    monkeypatch.setattr(psutil, "Process", refuse)
    assert not flag.orphaned()
    system.chain = [INIT]
    assert flag.orphaned()
    assert not StopFlag().orphaned()


@pytest.mark.parametrize("signals", [["SIGINT", "SIGINT"], ["SIGINT", "SIGTERM", "SIGINT"]])
def test_a_second_interrupt_is_at_once(signals):
    flag = StopFlag()
    for name in signals[:-1]:
        flag.on_signal(signal.Signals[name], None)
    assert flag.reason == signals[-2]
    with pytest.raises(KeyboardInterrupt):
        flag.on_signal(signal.SIGINT, None)


def test_a_second_sigterm_changes_nothing():
    flag = StopFlag()
    for _ in range(2):
        flag.on_signal(signal.SIGTERM, None)
    assert flag.reason == "SIGTERM"


@pytest.mark.parametrize("installed", [False, True])
def test_an_orphan_ends_itself_after_its_time(monkeypatch, installed):
    Processes(monkeypatch, INIT)
    flag = StopFlag(launched=True)
    slept, ended = [], []
    monkeypatch.setattr(stop.time, "sleep", slept.append)
    monkeypatch.setattr(stop.os, "_exit", ended.append)
    monkeypatch.setattr(stop.signal, "signal", lambda *arguments: None)
    if installed:
        flag.install()
    flag._end_when_orphaned()
    assert slept == [GRACE_SECONDS if installed else ALONE_SECONDS] and ended == [1]
    assert flag.reason == "launcher gone"
