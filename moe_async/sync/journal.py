"""The syncer's journal: everything that it was told, written down before it acts, so that a killed one comes back as it
was.

The policies and the merger follow from their inputs alone, so a snapshot and the inputs since then give the same state,
to the bit. An entry has left the process when `Journal.add` returns; a machine that loses its power may lose the last
ones, which learners send again because they were not acknowledged.

A folder holds ``format.json`` (the version of the rest), ``snapshot-<n>/`` (``state.json``, ``tensors.safetensors``)
and ``journal-<n>/`` (``inputs.jsonl`` and one ``<i>.safetensors`` for each payload), the inputs since snapshot n.
Snapshot 0 is the beginning.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_async.errors import SyncError
from moe_async.sync.merger import Merger, Outgoing
from moe_async.sync.syncer_policy import read_header

Entry = dict[str, Any]

_STATE, _TENSORS, _INPUTS, _HELLO = "state.json", "tensors.safetensors", "inputs.jsonl", "hello.json"
_FORMAT = "format.json"
FORMAT_VERSION = 1
"""Of the state of policies and of journal entries; another number for each change that makes older ones unreadable."""


_STATES_OF_ROOM, _LEAST_ROOM = 8, 2**28
"""Payloads may take so many times the room of a snapshot, and so many bytes in any case, before the next snapshot."""


def apply_input(merger: Merger, entry: Entry, payload_X: Tensor | None) -> list[Outgoing]:
    """Tell the merger what an entry says."""
    now, kind = entry["now"], entry["kind"]
    if kind == "arrive":
        assert payload_X is not None
        return merger.arrive(read_header(entry["header"]), payload_X, now)
    if kind == "join":
        return merger.join(entry["learner"], entry["incarnation"], now, entry["clock"])
    if kind == "leave":
        return merger.leave(entry["learner"], now)
    if kind == "finish":
        return merger.finish(entry["learner"], now)
    if kind == "tick":
        return merger.tick(now)
    if kind == "pause":
        # The policies wait for it as if it were here.
        return []
    raise SyncError(f"the journal has an entry of kind {kind!r}, which this version does not know.")


def keep_hello(folder: Path, hello: Entry) -> Entry:
    """What the learner said that began the run; written down in ``folder`` the first time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _HELLO
    if not path.exists():
        path.write_text(json.dumps(hello))
    found: Entry = json.loads(path.read_text())
    return found


def _check_format(folder: Path) -> None:
    """Refuse a folder of another format, and mark a new one.

    Raises:
        SyncError: it has another format.
    """
    path = folder / _FORMAT
    begun = any(folder.glob("snapshot-*")) or any(folder.glob("journal-*"))
    if not begun:
        path.write_text(json.dumps({"version": FORMAT_VERSION}))
        return
    try:
        version = json.loads(path.read_text())["version"]
    except (OSError, ValueError, KeyError, TypeError):
        version = "unknown"
    if version != FORMAT_VERSION:
        raise SyncError(
            f"{folder} was written in format version {version}; this release reads version {FORMAT_VERSION}. Go on "
            "with the release of moe_async that wrote it, or give the syncer another --folder to begin anew."
        )


class Journal:
    """Writes and reads one syncer's folder.

    Args:
        folder: made when it is missing.

    Attributes:
        paused: learners that left in order to come back, and have not.

    Raises:
        SyncError: the folder was written in another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        _check_format(folder)
        self.number = max((int(path.name.split("-")[1]) for path in folder.glob("snapshot-*")), default=0)
        self._count = 0
        self.paused: set[int] = set()
        self._payloads = self._payload_bytes = self._state_bytes = 0
        self._open()

    def _open(self) -> None:
        self._current.mkdir(exist_ok=True)
        path = self._current / _INPUTS
        if path.exists():
            # What a crash cut short was never acted on.
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        self._inputs = path.open("a")

    @property
    def _current(self) -> Path:
        return self.folder / f"journal-{self.number}"

    def add(self, entry: Entry, payload_X: Tensor | None = None) -> None:
        """Write an input down, its payload first: an entry whose payload is missing is never read."""
        if payload_X is not None:
            save_file({"payload": payload_X}, self._current / f"{self._count}.safetensors")
            entry = {**entry, "payload": self._count}
        self._inputs.write(json.dumps(entry) + "\n")
        self._inputs.flush()
        self._note(entry, payload_X)

    def is_long(self, updates: int) -> bool:
        """Whether it has so many updates since the last snapshot, or takes far more room than that."""
        room = max(_STATES_OF_ROOM * self._state_bytes, _LEAST_ROOM)
        return self._payloads >= updates or self._payload_bytes > room

    def pause(self, learners: Iterable[int], now: float) -> None:
        """Note that learners leave in order to come back."""
        for learner in sorted(set(learners) - self.paused):
            self.add({"kind": "pause", "now": now, "learner": learner})

    def _note(self, entry: Entry, payload_X: Tensor | None) -> None:
        self._count += 1
        if payload_X is not None:
            self._payloads += 1
            self._payload_bytes += payload_X.nbytes
        if entry["kind"] == "pause":
            self.paused.add(entry["learner"])
        elif entry["kind"] == "join":
            self.paused.discard(entry["learner"])

    def entries(self) -> Iterator[tuple[Entry, Tensor | None]]:
        """Inputs since the newest snapshot, in order."""
        path = self._current / _INPUTS
        lines = path.read_text().splitlines() if path.exists() else []
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                raise SyncError(f"line {number + 1} of {path} is damaged; restore the folder from a copy.") from None
            yield entry, self._payload(entry)

    def _payload(self, entry: Entry) -> Tensor | None:
        if "payload" not in entry:
            return None
        path = self._current / f"{entry['payload']}.safetensors"
        try:
            return load_file(path)["payload"]
        except (OSError, SafetensorError) as error:
            raise SyncError(f"{path} is damaged ({error}); restore the folder from a copy.") from error

    def snapshot(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Write the whole state; the inputs before it are not needed any more and are deleted."""
        number = self.number + 1
        aside = self.folder / f".snapshot-{number}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        # One tensor may stand under several names, and safetensors wants each to own its memory.
        save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, aside / _TENSORS)
        (aside / _STATE).write_text(json.dumps(state))
        aside.rename(self.folder / f"snapshot-{number}")
        self._state_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._payloads = self._payload_bytes = 0
        self._inputs.close()
        old, self.number, self._count = self.number, number, 0
        self._open()
        for name in (f"snapshot-{old}", f"journal-{old}"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def state(self) -> dict[str, Any]:
        """What the newest snapshot was given as state; empty where there is none.

        Raises:
            SyncError: it is damaged.
        """
        path = self._snapshot / _STATE
        try:
            found: dict[str, Any] = json.loads(path.read_text()) if self.number else {}
        except (OSError, ValueError) as error:
            raise SyncError(f"{path} is damaged ({error}); restore the folder from a copy.") from error
        return found

    def keep_hello(self, hello: Entry) -> Entry:
        """See `keep_hello`."""
        return keep_hello(self.folder, hello)

    @property
    def _snapshot(self) -> Path:
        return self.folder / f"snapshot-{self.number}"

    def recover(self, merger: Merger) -> float | None:
        """Bring a new merger to where the journal ends, and go on writing there.

        Returns:
            The time of the last entry or snapshot, in seconds; None when the folder holds nothing yet.
        """
        state = self.state()
        last: float | None = state.get("now")
        if state:
            try:
                tensors = load_file(self._snapshot / _TENSORS)
            except (OSError, SafetensorError) as error:
                raise SyncError(f"{self._snapshot} is damaged ({error}); restore the folder from a copy.") from error
            merger.load_state_dict(state["merger"])
            merger.load_tensors(tensors)
        for entry, payload_X in self.entries():
            apply_input(merger, entry, payload_X)
            self._note(entry, payload_X)
            last = entry["now"]
        return last

    def close(self) -> None:
        """Close the file."""
        self._inputs.close()
