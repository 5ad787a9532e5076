"""The syncer of a run: merges what its learners send, or lets them meet where they add up among themselves.

It needs no accelerator; the first learner brings the recipe.

python -m moe_async.syncer --listen 0.0.0.0:29400
python -m moe_async.syncer --listen 127.0.0.1:29400 --folder runs/my-run
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
import torch

from moe_async.comm.session import Door, Header
from moe_async.engine.door import code_fingerprints, difference, library_versions
from moe_async.engine.run_description import describe_run
from moe_async.engine.run_folder import finite
from moe_async.engine.seat import address
from moe_async.engine.summary import format_learners, format_summary
from moe_async.errors import MoeAsyncError, SyncError
from moe_async.sync.server import MergingServer

DEFAULT_TIMEOUT = 60.0
DEFAULT_START_AFTER = 600.0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="moe_async.syncer", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--listen", required=True, type=address, metavar="HOST:PORT", help="where learners find it; port 0: a free one"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="the run's folder, also to go on with one; default: a new one in the recipe's log.dir",
    )
    parser.add_argument(
        "--start-after", type=float, default=DEFAULT_START_AFTER, metavar="SECONDS",
        help="begin so long after the first learner though some are missing; default: %(default)g",
    )  # fmt: skip
    return parser.parse_args(arguments)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def compare(first: Header, other: Header) -> str:
    """What keeps a learner out: it has to have the code that runs here, and the recipe of the first learner."""
    return difference({**first, "code": code_fingerprints(), "libraries": library_versions()}, other)


def stop_with_starter(server: MergingServer) -> None:
    """Stop once the command that started the whole run is gone, if there is one."""
    starter = int(os.environ.get("MOE_ASYNC_STARTER", "0"))
    while starter:
        time.sleep(1.0)
        if not psutil.pid_exists(starter):
            server.stop()
            return


def report(server: MergingServer) -> None:
    """The closing table, and the run's summary.json."""
    description = server.run
    if description is None or not server.reports:
        return
    learners = {str(learner): server.reports[learner].get("learner", {}) for learner in sorted(server.reports)}
    evaluated = (found for found in server.reports.values() if "heldout_bits_per_byte" in found)
    first: dict[str, Any] = dict(next(evaluated, {}))
    first.pop("learner", None)
    rates = [found.get("tokens_per_second") for found in learners.values()]
    summary = {
        **first,
        "tokens": sum(found["tokens"] for found in learners.values()),
        "tokens_per_second": sum(rate for rate in rates if rate is not None) or None,
        "learners": learners,
    }
    (description.folder / "summary.json").write_text(json.dumps(finite(summary), indent=1) + "\n")
    if "heldout_bits_per_byte" in summary:
        say("\n" + format_summary(summary))
    say("\n" + format_learners(learners) + "\n")
    say(f"files: {description.folder}")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Serve one run and end the process."""
    parsed = parse_arguments(arguments)
    torch.set_num_threads(1)
    code = 0
    try:
        host, port = parsed.listen
        door = Door(host, port, DEFAULT_TIMEOUT)
        server = MergingServer(
            door, partial(describe_run, folder=parsed.folder), compare, say, DEFAULT_TIMEOUT, parsed.start_after
        )

        def on_signal(number: int, frame: FrameType | None) -> None:
            server.stop()

        threading.Thread(target=stop_with_starter, args=(server,), daemon=True).start()
        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        say(f"listening on {door.host}:{door.port}")
        server.serve()
        report(server)
        if server.meeting is not None and server.meeting.problem:
            raise SyncError(server.meeting.problem)
    except MoeAsyncError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 1
    sys.stdout.flush()
    # Threads of the communication library abort a process that ends under them.
    os._exit(code)


if __name__ == "__main__":
    main()
