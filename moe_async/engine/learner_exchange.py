"""What a learner shares with the others of its run, between two steps, by whichever way the values travel.

The training loop, reports and checkpoints know a `LearnerExchange`; how updates become shared values is what its forms
differ in: `moe_async.engine.syncer_exchange` sends them to the syncer, `moe_async.engine.all_reduce_exchange` adds them
up with the other learners. What is due when, and what becomes of the local values, is the policies' in both.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from moe_async.comm import World
from moe_async.engine.learner_model import RankModel
from moe_async.engine.seat import Seat
from moe_async.engine.stop import StopFlag
from moe_async.engine.syncer_link import SyncerLink
from moe_async.errors import CheckpointError
from moe_async.sync.event_log import EventLog
from moe_async.sync.figures import LearnerFigures
from moe_async.sync.participant import Participant
from moe_async.sync.staleness import StalenessTally
from moe_async.sync.syncer import LearnerSync, SyncGroup

if TYPE_CHECKING:
    from moe_async.engine.report import StepReport

_PARTICIPANT, _CONTRIBUTION = "participant/", "contribution/"


@dataclass(frozen=True)
class LearnerParts:
    """What an exchange works with on one rank of a learner.

    Attributes:
        model: this rank's part of the model.
        groups: what is exchanged under which policy.
        experts: of each MoE layer in module order, the prefix of its experts (`moe_async.model.keys.expert_modules`).
        world: this rank's view of the learner.
        link: this rank's link to the syncer, with a seat.
        seat: the learner's place.
        stop: raised when the run shall end early.
        log: where takes and sends are noted, on rank 0; None elsewhere.
    """

    model: RankModel
    groups: Sequence[SyncGroup]
    experts: Sequence[str]
    world: World
    link: SyncerLink
    seat: Seat
    stop: StopFlag
    log: EventLog | None = None


class LearnerExchange(ABC):
    """Exchanges what a learner learns. Every rank has one and calls its methods together.

    Args:
        parts: what it works with.

    Attributes:
        seat: the learner's place.
        link: this rank's link to the syncer.
        figures, ages: what this learner did so far.
        to_send: the updates of this boundary between steps are still to be sent.
        latest_age: the largest data age of its updates that were settled since the last step; None: none was.
    """

    via: ClassVar[str]
    """The form's name in recipes."""

    def __init__(self, parts: LearnerParts) -> None:
        self.seat, self.link = parts.seat, parts.link
        self.figures = LearnerFigures()
        self.ages = StalenessTally()
        self.model, self.groups, self._experts = parts.model, tuple(parts.groups), list(parts.experts)
        self._world, self._stop, self._log = parts.world, parts.stop, parts.log
        self._participant: Participant | None = None
        self.to_send = False
        self.latest_age: int | None = None
        self._began, self._seconds_before = time.monotonic(), 0.0
        self._last_tokens = 0

    @property
    def joined(self) -> bool:
        """Whether this learner takes part."""
        return self._participant is not None

    @property
    def participant(self) -> Participant:
        """Policies and views; there once `start` has returned."""
        assert self._participant is not None
        return self._participant

    @property
    def clock(self) -> int:
        """Steps that this learner has made."""
        return self.participant.sync.clock

    @property
    def position(self) -> float:
        """Place in the schedule of the run: steps that its learners have made on average, as far as is known here."""
        return self.participant.sync.position()

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether this learner has what came out of the run."""

    @property
    def reports(self) -> bool:
        """Whether this learner evaluates what came out of the run, for all: they end with the same weights."""
        return self.seat.learner == 0

    @property
    def apart(self) -> int:
        """Steps by which learners may be apart that can only go on together; 0 where each can by itself."""
        return 0

    @abstractmethod
    def start(self) -> bool:
        """Begin with the shared values, or go on with those of a checkpoint. Blocks. False when told to stop meanwhile.

        Raises:
            SyncError: the run cannot begin, or not with this learner.
        """

    def after_step(self, report: StepReport, seconds: float) -> bool:
        """Exchange what is due after a step, and wait where a policy says so. Blocks. False when told to stop.

        Args:
            report: of the step.
            seconds: that it took.

        Raises:
            SyncError: the exchange cannot go on.
        """
        tokens = {
            f"{prefix}.{expert}": count
            for prefix, counts in zip(self._experts, report.counts_LE.tolist(), strict=True)
            for expert, count in enumerate(counts)
        }
        self.latest_age = None
        self.model.hold()
        self.participant.sync.step_done(report.label_tokens, tokens, report.lm_loss)
        self.figures.steps += 1
        self.figures.tokens += report.label_tokens
        self._last_tokens = report.label_tokens
        self.figures.busy += seconds
        self.to_send = True
        return self._boundary()

    def drained(self) -> None:
        """Dense weights have changed after the last step, by gradients that a delay held back: they are to be sent."""
        self.participant.sync.drained(self._last_tokens)

    @abstractmethod
    def finish(self) -> bool:
        """Send what is left, wait until all learners have, and take what came out. Blocks. False when told to stop.

        Raises:
            SyncError: the exchange cannot go on.
        """

    @abstractmethod
    def pause(self) -> None:
        """Leave in order to come back. Every rank calls it."""

    def report(self, summary: Mapping[str, Any]) -> None:
        """Tell the syncer how it went; rank 0 calls it. Does not block."""
        self.link.report(summary)

    def leave(self) -> None:
        """Leave for good. Every rank calls it."""
        self.link.leave()

    def summary(self) -> dict[str, Any]:
        """What this learner did, over all its ranks. Every rank calls it; blocks."""
        traffic = torch.tensor(self._traffic(), device=self._world.device)
        self.figures.sent, self.figures.received = self._world.everyone.all_reduce(traffic).tolist()
        staleness, discarded = self._merged()
        staleness = {**staleness, "data_age": self.ages.summary(self.seat.learner)["data_age"]}
        return self.figures.summary(self._seconds, staleness, discarded)

    @property
    def _seconds(self) -> float:
        """Since it began, without the time between a stop and going on."""
        return self._seconds_before + time.monotonic() - self._began

    # What a checkpoint keeps: policies, views, figures, and what a form has under way.

    def state_dict(self) -> dict[str, Any]:
        """As JSON values, the same on every rank; empty for a learner that has not joined yet."""
        if not self.joined:
            return {}
        return {
            "via": self.via,
            "learner": self.seat.learner,
            "incarnation": self.participant.sync.incarnation,
            "clock": self.clock,
            "to_send": self.to_send,
            "last_tokens": self._last_tokens,
            "sync": self.participant.sync.state_dict(),
            "figures": asdict(self.figures),
            "seconds": self._seconds,
            "ages": self.ages.state_dict(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """This rank's views of the fragments, a gradient that was not sent, and what its form has under way."""
        if not self.joined:
            return {}
        found = {f"{_PARTICIPANT}{name}": tensor for name, tensor in self.participant.tensors().items()}
        if self.to_send:
            found |= {f"{_CONTRIBUTION}{name}": tensor for name, tensor in self.model.contribution().items()}
        return found

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Whether this learner may go on with what `state_dict` gave; otherwise it begins with the newest values."""
        return True

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` and `tensors` gave, after the model has its weights, and go on with it.

        Raises:
            CheckpointError: they are of the other form.
        """
        saved = state.get("via", "syncer")
        if saved != self.via:
            raise CheckpointError(
                f"the checkpoint was written with sync.via {saved} but this run has {self.via}; each keeps the shared "
                f"values elsewhere. Resume with --set sync.via={saved}."
            )
        self._begin(state["clock"])
        self.participant.sync.load_state_dict(state["sync"])
        own = {name.removeprefix(_PARTICIPANT): tensors[name] for name in tensors if name.startswith(_PARTICIPANT)}
        self.participant.load_tensors(own)
        unsent = {name.removeprefix(_CONTRIBUTION): tensors[name] for name in tensors if name.startswith(_CONTRIBUTION)}
        self.model.load_contribution(unsent)
        self.figures = LearnerFigures(**state["figures"])
        self._began, self._seconds_before = time.monotonic(), state["seconds"]
        self.ages.load_state_dict(state["ages"])
        self.to_send, self._last_tokens = state["to_send"], state["last_tokens"]

    # For the forms.

    @property
    def _life(self) -> int:
        """The incarnation that its updates carry."""
        return self.seat.incarnation

    def _begin(self, clock: int) -> None:
        """Take part from ``clock`` steps on, with the local values as they are."""
        sync = LearnerSync(self.groups, self.seat.learner, self._life, clock)
        self._participant = Participant(sync, self.model, self.model.part_sizes())

    def _take(self, adopt: bool = False) -> None:
        for taken in self.participant.take(adopt):
            for age in taken.ages:
                self.ages.add_age(self.seat.learner, age)
                self.latest_age = max(age, self.latest_age or 0)
            if self._log is not None:
                self._log.take(taken.publication, taken.mix, self.clock, time.monotonic() - self._began)

    @abstractmethod
    def _boundary(self) -> bool:
        """Send, wait and take between two steps. False when told to stop."""

    @abstractmethod
    def _traffic(self) -> Sequence[int]:
        """Bytes that this rank has sent and received."""

    @abstractmethod
    def _merged(self) -> tuple[Mapping[str, Any], int]:
        """Staleness of this learner's updates when they were merged, and how many were discarded."""
