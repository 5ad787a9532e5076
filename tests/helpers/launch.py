"""Real launches of the training command, as a user starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 180.0


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    """This process's variables, with the virtual environment's programs first and the package importable."""
    programs = str(Path(sys.executable).parent)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


class Launch:
    """One ``deepspeed`` launch in a process group of its own, with its output in a file."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.output = folder / f"output-{time.monotonic_ns()}.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def text(self) -> str:
        """What was printed so far."""
        return self.output.read_text()

    def wait(self, seconds: float = LIMIT) -> int:
        """The exit code of the command; kills everything and fails after ``seconds``."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_group()
            raise AssertionError(f"still running after {seconds:.0f} s:\n{self.text()}") from None

    def wait_for(self, text: str, seconds: float = LIMIT) -> None:
        """Until ``text`` was printed."""
        deadline = time.monotonic() + seconds
        while text not in self.text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill_group()
                raise AssertionError(f"{text!r} was never printed:\n{self.text()}")
            time.sleep(0.05)

    def ranks(self) -> list[psutil.Process]:
        """The training processes."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "--local_rank" in " ".join(child.cmdline())]

    def kill_group(self) -> None:
        """Kill the command and all its children."""
        os.killpg(self.process.pid, signal.SIGKILL)


def train(folder: Path, recipe: Path, *arguments: str, ranks: int = 2) -> Launch:
    """Start ``moe_async.train`` under the deepspeed launcher."""
    return Launch(
        folder, "deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port()),
        "--module", "moe_async.train", "--recipe", str(recipe), *arguments,
    )  # fmt: skip


def all_gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether all of them ended within ``seconds``."""
    return not psutil.wait_procs(processes, timeout=seconds)[1]
