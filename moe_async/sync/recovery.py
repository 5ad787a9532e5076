"""Making the merger of a run, or bringing it back to where an earlier syncer of the same folder was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_async.comm.session import Header
from moe_async.errors import SyncError
from moe_async.sync.event_log import EventLog
from moe_async.sync.journal import Journal
from moe_async.sync.merger import Merger
from moe_async.sync.run import RunDescription


@dataclass(frozen=True)
class OpenRun:
    """A run that a syncer may go on with.

    Attributes:
        merger: where the journal ends.
        journal: to be written from now on, and closed.
        first_hello: what the learner said that began the run.
        recovered: seconds of the run at which the journal ends; None: it begins.
    """

    merger: Merger
    journal: Journal
    first_hello: Header
    recovered: float | None


def open_run(run: RunDescription, hello: Header, compare: Callable[[Header, Header], str]) -> OpenRun:
    """Make a run's merger from what is in its folder.

    Args:
        run: what the recipe makes of it.
        hello: of the learner that knocked first.
        compare: what keeps a learner out of the run that another began; empty: nothing.

    Raises:
        SyncError: the folder is of another run, of another version, or damaged.
    """
    journal = Journal(run.folder / "syncer")
    try:
        first = journal.keep_hello(hello)
        if problem := compare(first, hello):
            raise SyncError(problem)
        log = EventLog(run.folder / "events.jsonl", keep=False, size=journal.state().get("log_size", 0))
        merger = Merger(run.groups, run.initial, run.learners, log, run.schedule)
        recovered = journal.recover(merger)
    except Exception:
        # Nothing of it may stay: the next one who knocks would go on with a part.
        journal.close()
        raise
    return OpenRun(merger, journal, first, recovered)
