"""Merging without a merging process: learners that keep step add their updates up among themselves.

Every learner runs the decisions of the whole run: it hears the headers of all updates, in one order, so all decide
alike. Of the tensors it has its own; a merge weights them as the decision says and adds up over the learners. Shared
values and the outer optimizer's state are kept by every learner, and stay equal, because each applies the same sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_async.errors import SyncError
from moe_async.sync.arithmetic import SharedValue
from moe_async.sync.event_log import EventLog
from moe_async.sync.merger import Merger, Schedule
from moe_async.sync.messages import Merge, Publication, UpdateHeader, UpdateId
from moe_async.sync.syncer import SyncGroup

AddUp = Callable[[Tensor], None]
"""Adds up a tensor over the learners, in place; all of them call it with the same shape, in the same order."""


class JointMerger:
    """One learner's copy of the merger, over the parts [Y] of fragments that one of its ranks exchanges.

    Args:
        groups: what is exchanged; every policy merges the updates of all learners after the same steps.
        initial: version 0 of this rank's parts, by fragment; copied. The same at every learner.
        unit_sizes: elements of each unit in them.
        learner: whose copy this is.
        learners: how many there are, from the first step to the last.
        add_up: over the learners.
        log: where decisions go.
    """

    def __init__(
        self,
        groups: Sequence[SyncGroup],
        initial: Mapping[int, Tensor],
        unit_sizes: Mapping[int, Sequence[int]],
        learner: int,
        learners: int,
        add_up: AddUp,
        log: EventLog | None = None,
    ) -> None:
        self.learner, self.learners = learner, learners
        self._add_up = add_up
        self.merger = Merger(groups, initial, learners, log, unit_sizes=unit_sizes, rule=self._merge)

    def begin(self, now: float) -> None:
        """All learners take part from the first step on."""
        for learner in range(self.learners):
            self.merger.join(learner, 0, now)

    @property
    def rounds(self) -> int:
        """Merges so far, of all fragments."""
        return sum(policy.versions[number] for policy in self.merger.syncer.policies for number in policy.versions)

    def meet(
        self, own: Sequence[tuple[UpdateHeader, Tensor]], headers: Sequence[Sequence[UpdateHeader]], now: float
    ) -> list[tuple[Publication, Tensor]]:
        """Merge what all learners have brought after the same step. All of them call it; blocks in ``add_up``.

        Args:
            own: this learner's updates [Y].
            headers: of the updates of every learner, by learner, each in the order of ``own``.
            now: the time, in seconds.

        Returns:
            What this learner has to take, with the shared values [Y].

        Raises:
            SyncError: the learners have brought updates of different fragments or steps.
        """
        brought = [[(header.id.fragment, header.clock) for header in entries] for entries in headers]
        if len(headers) != self.learners or any(entry != brought[0] for entry in brought):
            raise SyncError(
                f"the learners bring updates of different fragments and steps, {brought}; all of them must follow one "
                "recipe from its first step."
            )
        found = []
        payloads = {header.id: contribution_Y for header, contribution_Y in own}
        for entries in zip(*headers, strict=True):
            for header in entries:
                payload_Y = payloads[header.id] if header.id.learner == self.learner else torch.empty(0)
                for outgoing in self.merger.arrive(header, payload_Y, now):
                    message, value_Y = outgoing.message, outgoing.value_X
                    if isinstance(message, Publication) and message.learner == self.learner and value_Y is not None:
                        found.append((message, value_Y))
        return found

    def _merge(
        self, values: Mapping[int, SharedValue], decision: Merge, payloads: dict[UpdateId, Tensor], schedule: Schedule
    ) -> None:
        """Weight what this learner has, add up over the learners, and move the shared value by the sum."""
        shared = values[decision.fragment]
        updates = {update: payloads.pop(update) for update in decision.updates}
        weights = dict(zip(decision.updates, decision.weights, strict=True))
        own = [update for update in decision.updates if update.learner == self.learner]
        direction_Y = shared.direction([updates[update] for update in own], [weights[update] for update in own])
        self._add_up(direction_Y)
        shared.move(direction_Y, schedule(decision.progress), decision.phase, decision.portion)

    def state_dict(self) -> dict[str, Any]:
        """Decisions' state as JSON values, the same at every learner; the tensors are in `tensors`."""
        return self.merger.state_dict()

    def tensors(self) -> dict[str, Tensor]:
        """Shared values and the outer optimizer's state, by name."""
        return self.merger.tensors()

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` and `tensors` gave."""
        self.merger.load_state_dict(state)
        self.merger.load_tensors(tensors)
