"""The learner's side of an all-reduce between learners, between two steps.

Rank r of every learner is in a group with the ranks r of the others (`moe_async.comm.peers`), over which they add up
their parts of each fragment. Every rank keeps the shared values and the outer optimizer's state of its part, and runs
the decisions of the whole run (`moe_async.sync.joint`); the syncer sees no values. It says ``go`` once all learners are
at the same boundary (`moe_async.sync.meeting`), and the ranks of a learner act on its messages only when all of them
have got them. So nobody enters an all-reduce to which somebody may not come, however slow the others are, and no rank
waits for another learner while one of its own is in an all-to-all.

A learner or the syncer that is gone ends the run for all: at the next boundary, or in the all-reduce they are in, after
`sync.timeout` seconds at most.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_async.comm.peers import PeerGroup, meet_peers
from moe_async.comm.session import Header
from moe_async.engine.learner_exchange import LearnerExchange, LearnerParts
from moe_async.errors import CommunicationError, SyncError
from moe_async.sync.event_log import EventLog
from moe_async.sync.joint import JointMerger
from moe_async.sync.messages import UpdateHeader
from moe_async.sync.syncer_policy import read_header

_READY: Header = {"kind": "ready"}
_HALT: Header = {"kind": "halt"}
_SLICE_SECONDS = 0.2
"""How long a rank waits for its own link before it asks the others how they are."""

_TELL_SECONDS = 5.0
"""For so long a rank that has lost its partners waits for the syncer to say who is gone."""

_SHARED = "shared/"


class AllReduceExchange(LearnerExchange):
    """The form in which learners of fixed membership add up among themselves.

    Args:
        parts: what it works with.
        events: the run's own event log, on rank 0 of learner 0; None elsewhere.
    """

    via: ClassVar[str] = "all_reduce"

    def __init__(self, parts: LearnerParts, events: Path | None = None) -> None:
        super().__init__(parts)
        self._events = events
        self._peers: PeerGroup | None = None
        self._joint: JointMerger | None = None
        self._heard: deque[str] = deque()
        self._delivered = 0
        self._halted = self._asked = self._stopping = self._finished = False

    @property
    def over(self) -> bool:
        """Whether the last updates of all learners are merged and taken."""
        return self._finished

    @property
    def apart(self) -> int:
        """A learner is at most at the end of the round behind the one at whose beginning another is."""
        return 2 * min(phase.every for group in self.groups for phase in group.plan.phases)

    @property
    def joint(self) -> JointMerger:
        """This rank's copy of the merger; there once `start` has returned."""
        assert self._joint is not None
        return self._joint

    @property
    def peers(self) -> PeerGroup:
        """The same ranks of all learners; there once `start` has returned."""
        assert self._peers is not None
        return self._peers

    @property
    def _life(self) -> int:
        # However often it knocked before the run began, nobody comes or goes afterwards.
        return 0

    def start(self) -> bool:
        """Wait until all learners are there, and begin with them. Blocks. False when told to stop meanwhile.

        Raises:
            SyncError: the syncer or a learner went away, or the learners come back from different rounds.
        """
        if self._world.rank == 0:
            self.link.send(_READY)
        if not self._await("begin"):
            return False
        link, seat = self.link, self.seat
        try:
            self._peers = meet_peers(
                link.host, link.port, str(self._world.rank), seat.learner, seat.learners, link.timeout
            )
            if self._participant is None:
                self._begin(0)
                self._make_joint().begin(self._now())
            self._compare()
        except CommunicationError as error:
            raise self._gone(error) from error
        self._began = time.monotonic()
        return self._boundary()

    def finish(self) -> bool:
        """Merge what is left with all learners, and take what came out. Blocks. False when told to stop.

        Raises:
            SyncError: a learner or the syncer is gone.
        """
        self._finished = not self._halted and self._meet(last=True)
        return self._finished

    def pause(self) -> None:
        """Leave; the others are told to stop too, and come back together. Every rank calls it."""
        if self._world.rank == 0:
            self.link.send(_HALT)
        self.link.leave()

    def state_dict(self) -> dict[str, Any]:
        """As JSON values, the same on every rank but for the size of the run's event log; empty before the run."""
        if not self.joined:
            return {}
        log = self.joint.merger.log
        own = {"merger": self.joint.state_dict(), "rounds": self.joint.rounds, "log_size": log.size()}
        return super().state_dict() | own

    def tensors(self) -> dict[str, Tensor]:
        """This rank's views of the fragments, and its part of the shared values and the outer optimizer's state."""
        if not self.joined:
            return {}
        return super().tensors() | {f"{_SHARED}{name}": tensor for name, tensor in self.joint.tensors().items()}

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` and `tensors` gave, after the model has its weights, and go on with it."""
        super().restore(state, tensors)
        shared = {name.removeprefix(_SHARED): tensors[name] for name in tensors if name.startswith(_SHARED)}
        self._make_joint(state["log_size"]).load(state["merger"], shared)

    def _make_joint(self, log_size: int | None = None) -> JointMerger:
        """A merger that begins with the local values; ``log_size`` bytes of the run's event log are kept."""
        initial = {
            fragment.number: self.model.read(fragment.number) for group in self.groups for fragment in group.fragments
        }
        # Entries in memory would grow with the run, and nobody reads them there.
        log = EventLog(self._events, keep=False, size=log_size)
        seat = self.seat
        self._joint = JointMerger(
            self.groups, initial, self.model.part_sizes(), seat.learner, seat.learners, self._add_up, log
        )
        return self._joint

    def _add_up(self, tensor: Tensor) -> None:
        self.peers.add_up(tensor)

    def _compare(self) -> None:
        """All learners have to begin with the same shared values.

        Raises:
            SyncError: they do not.
        """
        digest = hashlib.sha256()
        for name, tensor in sorted(self.joint.tensors().items()):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        own = {"rounds": self.joint.rounds, "step": self.clock, "digest": digest.hexdigest()}
        found = self.peers.gather(own)
        if any(entry["rounds"] != own["rounds"] for entry in found):
            places = ", ".join(
                f"learner {learner} at step {entry['step']} after {entry['rounds']} merges"
                for learner, entry in enumerate(found)
            )
            raise SyncError(
                f"the checkpoints do not fit together: {places}. Learners go on together only from between the same "
                "two exchanges. Resume with python -m moe_async.launch RECIPE --resume FOLDER, which takes the newest "
                "checkpoints that fit, or start a new run."
            )
        if any(entry["digest"] != own["digest"] for entry in found):
            raise SyncError(
                "the learners begin with different shared weights, though after as many merges. Resume all of them "
                "from checkpoints of one run, or start a new one on machines and libraries that are alike."
            )

    # Exchanging.

    def _boundary(self) -> bool:
        """Exchange what is due, if anything is. False when told to stop."""
        began = time.monotonic()
        if self.to_send and self.participant.sync.owes():
            goes_on = self._meet(last=False)
            self.to_send = not goes_on
        else:
            self._agree()
            goes_on, self.to_send = not self._stopping, False
        self.figures.waited += time.monotonic() - began
        return goes_on

    def _meet(self, last: bool) -> bool:
        """Exchange with all learners, once they are at this boundary too. False when told to stop before that."""
        self._agree()
        if self._stopping:
            return False
        # What is not sent yet is not taken from the policies before the others are there, so that it can be saved.
        self.link.send({"kind": "at", "place": {"step": self.clock, "last": last}})
        if not self._await("go"):
            return False
        updates = self.participant.contribute(last)
        try:
            headers = [
                [_header(entry) for entry in entries]
                for entries in self.peers.gather([asdict(header) for header, _ in updates])
            ]
            publications = self.joint.meet(updates, headers, self._now())
        except CommunicationError as error:
            raise self._gone(error) from error
        for header, _ in updates:
            self.figures.rounds += 1
            if self._log is not None:
                self._log.send(header, self._now())
        for publication, value_Y in publications:
            self.participant.receive(publication, value_Y)
        self._take(adopt=last)
        return True

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _traffic(self) -> Sequence[int]:
        added = 0 if self._peers is None else self._peers.bytes
        return [own + added for own in self.link.bytes]

    def _merged(self) -> tuple[Mapping[str, Any], int]:
        return self.joint.merger.staleness.summary(self.seat.learner), 0

    # Agreeing with the other ranks of this learner.

    def _await(self, kind: str) -> bool:
        """Wait for a message of the syncer, on all ranks. False when the run stops instead."""
        while True:
            self._agree()
            while self._heard:
                heard = self._heard.popleft()
                if heard == kind:
                    return True
            if self._halted:
                return False
            if self._stopping and not self._asked:
                # The others may have been told to go already; then they count on this learner once more.
                self._asked = True
                if self._world.rank == 0:
                    self.link.send(_HALT)
            self.link.wait(self._delivered, _SLICE_SECONDS)

    def _agree(self) -> None:
        """Find out which messages have come to all ranks, and whether any is to stop or has lost its link."""
        link = self.link
        mine = [-link.received, link.lost, bool(link.refusal), bool(self._stop.reason)]
        state = torch.tensor(mine, dtype=torch.int64, device=self._world.device)
        least, lost, refused, stop = self._world.everyone.all_reduce(state, op="max").tolist()
        if lost or refused:
            raise self._gone()
        for header, _ in link.next(-least - self._delivered):
            self._heard.append(header["kind"])
            self._halted = self._halted or header["kind"] == _HALT["kind"]
        self._delivered = -least
        self._stopping = bool(stop) or self._halted
        if self._halted:
            self._stop.follow()

    def _gone(self, error: CommunicationError | None = None) -> SyncError:
        """Why the exchange cannot go on: what the syncer says of it, if it does."""
        deadline = time.monotonic() + _TELL_SECONDS
        while not self.link.refusal and not self.link.lost and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.link.refusal:
            return SyncError(f"the run cannot go on: {self.link.refusal}")
        what = (
            f"the syncer at {self.link.host}:{self.link.port} is gone"
            if self.link.lost
            else f"{error or 'another rank of this learner has lost the syncer'}"
        )
        return SyncError(
            f"the run cannot go on: {what}. With sync.via all_reduce all learners and the syncer take part to the end. "
            f"Start the whole run again with python -m moe_async.launch RECIPE --resume FOLDER, where FOLDER is that "
            f"of the run {self.seat.folder}."
        )


def _header(entry: Mapping[str, Any]) -> UpdateHeader:
    return read_header(dict(entry))
