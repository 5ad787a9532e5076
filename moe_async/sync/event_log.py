"""The event log: every decision of a run in its order, as JSON Lines, from which `moe_async.sync.replay` does it again.

Each entry has ``event``, ``time`` (seconds) and what the event is about. The syncer's decisions are ``merge``,
``discard``, ``switch``, ``welcome``, ``farewell``; a learner's are ``send`` and ``take``, with the number of steps
(``clock``) after which it did so, and ``end``, its last step.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from moe_async.errors import SyncError
from moe_async.sync.messages import (
    Decision,
    Discard,
    Farewell,
    Merge,
    Publication,
    Switch,
    UpdateHeader,
    UpdateId,
    Welcome,
)

Entry = dict[str, Any]

_EVENTS: dict[type, str] = {
    Merge: "merge",
    Discard: "discard",
    Switch: "switch",
    Welcome: "welcome",
    Farewell: "farewell",
}


class EventLog:
    """Collects entries in memory and, where a path is given, in a file as they come.

    Args:
        path: a file to append to; a line at its end that a crash cut short is removed. None: memory alone.
        keep: whether entries stay in memory.
        size: bytes of the file that are kept; None: all whole lines.
    """

    def __init__(self, path: Path | None = None, keep: bool = True, size: int | None = None) -> None:
        self.entries: list[Entry] = []
        self._keep = keep
        self._file: TextIO | None = None if path is None else _open(path, size)

    def add(self, entry: Entry) -> None:
        """Append an entry; it has left this process when the call returns, so a killed process loses none."""
        if self._keep:
            self.entries.append(entry)
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()

    def decision(self, decision: Decision, time: float) -> None:
        """Append a decision of the syncer; publications are left out, for what a learner takes is what counts."""
        event = _EVENTS.get(type(decision))
        if event is not None:
            self.add({"event": event, "time": time, **asdict(decision)})

    def send(self, header: UpdateHeader, time: float) -> None:
        """Append the sending of an update."""
        self.add({"event": "send", "time": time, "header": asdict(header)})

    def take(self, publication: Publication, mix: float | None, clock: int, time: float) -> None:
        """Append the taking of a shared value after ``clock`` steps, and how it was mixed with the local one."""
        self.add({"event": "take", "time": time, "clock": clock, "mix": mix, **asdict(publication)})

    def end(self, learner: int, incarnation: int, clock: int, time: float) -> None:
        """Append that a learner made its last step, or died after it."""
        self.add({"event": "end", "time": time, "learner": learner, "incarnation": incarnation, "clock": clock})

    def size(self) -> int:
        """Bytes written to the file so far; 0 without one."""
        return 0 if self._file is None else self._file.tell()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _open(path: Path, size: int | None) -> TextIO:
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read(size).rfind(b"\n") + 1)
    return path.open("a")


def read_entries(path: Path) -> Iterator[Entry]:
    """Entries of a file; a last line that a crash cut short is left out.

    Raises:
        SyncError: a line that has an end is no JSON object, or the file is no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise SyncError(f"{path} is damaged ({error}); restore the file from a copy.") from error
    for number, line in enumerate(lines[:-1], 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise SyncError(f"line {number} of {path} is damaged ({error}); restore the file from a copy.") from error
        if not isinstance(entry, dict):
            raise SyncError(
                f"line {number} of {path} is no JSON object but {line[:40]!r}; restore the file from a copy."
            )
        yield entry


def read_merge(entry: Entry) -> Merge:
    """The merge that an entry tells of."""
    return Merge(
        fragment=entry["fragment"],
        version=entry["version"],
        updates=tuple(UpdateId(**update) for update in entry["updates"]),
        weights=tuple(tuple(row) for row in entry["weights"]),
        staleness=tuple((gap, lag, drift) for gap, lag, drift in entry["staleness"]),
        progress=entry["progress"],
        phase=entry["phase"],
        portion=entry["portion"],
    )


def interleave(syncer: Iterable[Entry], learners: Iterable[Iterable[Entry]]) -> list[Entry]:
    """One log of the syncer's and the learners' own, in an order in which everything can be done again.

    Whoever sends comes before the merge of what was sent, a version is made before it is taken, and each log keeps its
    order. Several such orders give the same parameters.

    Raises:
        SyncError: there is no such order: a log is incomplete.
    """
    streams = [deque(syncer), *(deque(entries) for entries in learners)]
    welcomed: set[tuple[int, int]] = set()
    sent: set[tuple[int, ...]] = set()
    versions: dict[int, int] = {}
    order: list[Entry] = []

    def may_follow(entry: Entry) -> bool:
        event = entry["event"]
        if event == "merge":
            return all(tuple(update.values()) in sent for update in entry["updates"])
        if event == "send":
            return (entry["header"]["id"]["learner"], entry["header"]["id"]["incarnation"]) in welcomed
        if event == "take":
            made = entry["version"] <= versions.get(entry["fragment"], 0)
            return made and (entry["learner"], entry["incarnation"]) in welcomed
        return True

    while any(streams):
        stream = next((stream for stream in streams if stream and may_follow(stream[0])), None)
        if stream is None:
            heads = [stream[0] for stream in streams if stream]
            raise SyncError(f"the event logs do not fit together: {heads[0]} cannot follow what is there.")
        entry = stream.popleft()
        if entry["event"] == "welcome":
            welcomed.add((entry["learner"], entry["incarnation"]))
        elif entry["event"] == "send":
            sent.add(tuple(entry["header"]["id"].values()))
        elif entry["event"] == "merge":
            versions[entry["fragment"]] = entry["version"]
        order.append(entry)
    return order
