"""Real gloo processes for a test, with per-rank tracebacks and a time limit that names the rank that hung."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

DEFAULT_TIMEOUT = 120.0


class RankFailure(AssertionError):
    """Some ranks of a spawned test failed, died or hung."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
    """``function(rank, *args)`` in ``world_size`` gloo processes; the return values in rank order.

    ``function`` and ``args`` must be picklable. A rank that raises, dies or is still running after ``timeout``
    seconds fails the test with every rank's story.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Forked from a server that has imported what they need and started no threads: that saves seconds each time.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.preload"])
        environment = dict(os.environ)
        ranks = [
            context.Process(target=_child, args=(rank, world_size, folder, environment, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        _wait(ranks, Path(folder), timeout)
        stories = _stories(ranks, Path(folder), timeout)
        for process in ranks:
            process.kill()
            process.join()
        if stories:
            raise RankFailure("\n".join(stories))
        return [torch.load(_result(folder, rank), weights_only=False) for rank in range(world_size)]


def _wait(ranks: list[Any], folder: Path, timeout: float) -> None:
    """Until all ranks ended, one failed (its partners may then hang), or the time is up."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
        if any(process.exitcode for process in ranks):
            for process in ranks:
                process.join(timeout=3)
            return
        time.sleep(0.02)


def _stories(ranks: list[Any], folder: Path, timeout: float) -> list[str]:
    stories = []
    failed = any(process.exitcode for process in ranks)
    for rank, process in enumerate(ranks):
        error = folder / f"{rank}.error"
        if error.exists():
            stories.append(f"--- rank {rank} raised\n{error.read_text()}")
        elif process.is_alive():
            why = "was still waiting when another rank failed" if failed else f"hung: not done after {timeout:.0f} s"
            stories.append(f"--- rank {rank} {why}")
        elif process.exitcode or not _result(folder, rank).exists():
            stories.append(f"--- rank {rank} died with exit code {process.exitcode} and no traceback")
    return stories


def _result(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"{rank}.pt"


def _child(
    rank: int,
    world_size: int,
    folder: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # The server's variables are those of the first test.
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), DS_ACCELERATOR="cpu")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.set_num_threads(1)
    import torch.distributed as dist

    code = 0
    try:
        store = dist.FileStore(str(Path(folder) / "rendezvous"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        result = function(rank, *args)
        torch.save(result, _result(folder, rank))
        dist.barrier()
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(traceback.format_exc())
        code = 1
    # Not a normal exit: tearing down gloo with a dead partner may hang or abort and would hide the story.
    os._exit(code)
