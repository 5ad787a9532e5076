"""The syncer without its surroundings: its policies, the shared values and the event log.

Whoever drives it tells it what came and at what time; it says what to send to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_async.sync.arithmetic import SharedValue
from moe_async.sync.event_log import EventLog
from moe_async.sync.messages import Decision, Discard, Merge, Publication, UpdateHeader, UpdateId, Welcome
from moe_async.sync.segments import Segment, segments
from moe_async.sync.staleness import StalenessTally
from moe_async.sync.syncer import Syncer, SyncGroup

Schedule = Callable[[float], float]
"""From progress in steps to a factor on the learning rate of the outer optimizer."""


MergeRule = Callable[[Mapping[int, SharedValue], Merge, dict[UpdateId, Tensor], Schedule], None]
"""Carries out a merge on the shared values and forgets the payloads that went into it."""


def constant(progress: float) -> float:
    """The schedule that changes nothing."""
    return 1.0


@dataclass(frozen=True)
class Outgoing:
    """A message to one learner: a welcome, or a publication with its value [X], which is not to be changed."""

    message: Welcome | Publication
    value_X: Tensor | None = None


class Merger:
    """Merges what comes.

    Args:
        groups: what is exchanged under which policy.
        initial: version 0 of every fragment [X], by number; copied.
        learners: expected number of learners.
        log: where decisions go.
        schedule: of the outer learning rate.
        unit_sizes: elements of each unit of each fragment, where ``initial`` holds parts of them; None: the whole.
        rule: how a merge is carried out; None: `merge`, for a merger that has all payloads.
    """

    def __init__(
        self,
        groups: Sequence[SyncGroup],
        initial: Mapping[int, Tensor],
        learners: int,
        log: EventLog | None = None,
        schedule: Schedule = constant,
        unit_sizes: Mapping[int, Sequence[int]] | None = None,
        rule: MergeRule | None = None,
    ) -> None:
        self.syncer = Syncer(groups, learners)
        self.log = log or EventLog()
        self.values = shared_values(groups, initial, unit_sizes)
        self._rule = rule or merge
        self.staleness = StalenessTally()
        self._schedule = schedule
        self._payloads: dict[UpdateId, Tensor] = {}
        self._snapshots: dict[int, tuple[int, Tensor]] = {}

    def join(self, learner: int, incarnation: int, now: float, clock: int | None = None) -> list[Outgoing]:
        """A learner has come; with ``clock`` one that was away and kept its state and its steps."""
        return self._carry_out(self.syncer.join(learner, incarnation, now, clock), now)

    def leave(self, learner: int, now: float) -> list[Outgoing]:
        """A learner is gone."""
        return self._carry_out(self.syncer.leave(learner, now), now)

    def finish(self, learner: int, now: float) -> list[Outgoing]:
        """A learner makes no further step."""
        return self._carry_out(self.syncer.finish(learner, now), now)

    def arrive(self, header: UpdateHeader, payload_X: Tensor, now: float) -> list[Outgoing]:
        """An update has come; its payload is kept, not copied, until it is merged."""
        # A repeated update does not replace the payload that came first.
        self._payloads.setdefault(header.id, payload_X)
        return self._carry_out(self.syncer.arrive(header, now), now)

    def tick(self, now: float) -> list[Outgoing]:
        """Time has passed."""
        return self._carry_out(self.syncer.tick(now), now)

    def publish_all(self, learner: int, now: float) -> list[Outgoing]:
        """Everything shared, for one member."""
        return self._carry_out(self.syncer.publish_all(learner), now)

    def _carry_out(self, decisions: Sequence[Decision], now: float) -> list[Outgoing]:
        outgoing = []
        for decision in decisions:
            self.log.decision(decision, now)
            if isinstance(decision, Merge):
                self._rule(self.values, decision, self._payloads, self._schedule)
                for update, staleness in zip(decision.updates, decision.staleness, strict=True):
                    self.staleness.add_update(update.learner, *staleness)
            elif isinstance(decision, Discard):
                if not decision.repeated:
                    self.staleness.add_discard(decision.update.learner)
                if decision.update not in self.syncer.pending():
                    self._payloads.pop(decision.update, None)
            elif isinstance(decision, Welcome):
                outgoing.append(Outgoing(decision))
            elif isinstance(decision, Publication):
                outgoing.append(Outgoing(decision, self._snapshot(decision)))
        return outgoing

    def _snapshot(self, publication: Publication) -> Tensor:
        """A copy of a shared value, one for all who get the same version."""
        version, value_X = self._snapshots.get(publication.fragment, (-1, None))
        if version != publication.version or value_X is None:
            value_X = self.values[publication.fragment].value_X.clone()
            self._snapshots[publication.fragment] = (publication.version, value_X)
        return value_X

    def state_dict(self) -> dict[str, Any]:
        """Decisions' state as JSON values; the tensors are in `tensors`."""
        return {"syncer": self.syncer.state_dict(), "staleness": self.staleness.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.syncer.load_state_dict(state["syncer"])
        self.staleness.load_state_dict(state["staleness"])

    def tensors(self) -> dict[str, Tensor]:
        """Shared values, outer states and the payloads that wait, by name."""
        tensors = {
            f"fragment/{number}/{name}": tensor
            for number, shared in self.values.items()
            for name, tensor in shared.tensors().items()
        }
        for update, payload_X in self._payloads.items():
            name = f"{update.learner}/{update.incarnation}/{update.sequence}/{update.fragment}"
            tensors[f"payload/{name}"] = payload_X
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        self._snapshots.clear()
        for number, shared in self.values.items():
            prefix = f"fragment/{number}/"
            shared.load_tensors(
                {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            )
        self._payloads = {
            UpdateId(*map(int, name.split("/")[1:])): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith("payload/")
        }


def shared_values(
    groups: Sequence[SyncGroup], initial: Mapping[int, Tensor], unit_sizes: Mapping[int, Sequence[int]] | None = None
) -> dict[int, SharedValue]:
    """The shared values of all groups at version 0, of copies of the initial values; arguments as in `Merger`."""
    return {
        fragment.number: SharedValue(
            initial[fragment.number].detach().clone(),
            fragment.unit_sizes if unit_sizes is None else unit_sizes[fragment.number],
            [
                # Parts travel under policies of deltas alone, where one optimizer moves a whole fragment.
                segments(fragment, phase.outer, group.rules)
                if unit_sizes is None
                else (Segment(sum(unit_sizes[fragment.number]), phase.outer),)
                for phase in group.plan.phases
            ],
        )
        for group in groups
        for fragment in group.fragments
    }


def merge(
    values: Mapping[int, SharedValue], decision: Merge, payloads: dict[UpdateId, Tensor], schedule: Schedule
) -> None:
    """Carry out a merge and forget the payloads that went into it."""
    contributions = [payloads.pop(update) for update in decision.updates]
    values[decision.fragment].merge(
        contributions, decision.weights, schedule(decision.progress), decision.phase, decision.portion
    )
