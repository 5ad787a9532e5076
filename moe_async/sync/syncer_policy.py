"""The syncer's side of a policy: a state machine that is told what happened and says what to do.

It knows headers and times but no tensors, reads no clock and sends nothing, so that the same object decides under a
virtual clock and over a network. Whoever drives it carries out the decisions, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from moe_async.sync.attendance import Attendance
from moe_async.sync.combine import combine_weights, portion
from moe_async.sync.gates import Arrival, Member, Opening, opening
from moe_async.sync.messages import Decision, Discard, Farewell, Merge, Publication, Switch, UpdateHeader, UpdateId
from moe_async.sync.settings import PolicyPlan, PolicySettings


class SyncerPolicy:
    """Decides on the fragments of one group of parameters.

    Args:
        plan: the policy, or two in turn.
        fragments: numbers of the fragments.
        learners: expected number of learners.
    """

    def __init__(self, plan: PolicyPlan, fragments: Sequence[int], learners: int) -> None:
        self.plan = plan
        self.learners = learners
        self.phase = 0
        self._attendance = Attendance()
        self.versions = dict.fromkeys(fragments, 0)
        self._pending: dict[int, list[Arrival]] = {fragment: [] for fragment in fragments}
        self._received: dict[tuple[int, int], tuple[int, int]] = {}
        self._settled: dict[tuple[int, int], tuple[int, int]] = {}
        self._latest: dict[int, dict[int, tuple[int, ...]]] = {fragment: {} for fragment in fragments}
        self._sent: dict[int, dict[int, int]] = {fragment: {} for fragment in fragments}
        self._held: set[int] = set()
        self._deferred: set[tuple[int, int]] = set()
        self._best_loss: float | None = None
        self._without_improvement = 0

    @property
    def settings(self) -> PolicySettings:
        """The policy that holds now."""
        return self.plan.phases[self.phase]

    @property
    def members(self) -> Mapping[int, Member]:
        """Learners that take part now."""
        return self._attendance.members

    @property
    def progress(self) -> float:
        """Steps that the expected learners have made on average, as far as is known here."""
        return self._attendance.steps / self.learners

    def joining_clock(self) -> int:
        """Steps at which a newcomer begins: those of the slowest where clocks are bound, else of the fastest."""
        at_work = self._attendance.at_work()
        if not at_work:
            return self._attendance.farthest()
        if self.settings.clock_bound is not None:
            return min(at_work)
        if self.settings.gate.kind == "barrier":
            # A round that has begun does without the newcomer, also if only learners that left have sent so far.
            at_work += [arrival.header.clock for pending in self._pending.values() for arrival in pending]
        return max(at_work)

    def join(self, learner: int, incarnation: int, clock: int, now: float) -> list[Decision]:
        """A learner begins a life at ``clock`` steps."""
        self._attendance.join(learner, incarnation, clock)
        for sent in self._sent.values():
            sent.pop(learner, None)
        settings = self.settings
        rounds = settings.contribution == "grad" and settings.gate.kind == "barrier" and settings.clock_bound is None
        decisions: list[Decision] = []
        for fragment, pending in self._pending.items():
            if pending and rounds:
                # The gradient of a newcomer has to be of the version that the pending ones are about to make.
                self._deferred.add((learner, fragment))
            else:
                decisions.append(self._publication(learner, fragment))
        return [*decisions, *self._settle(now)]

    def come_back(self, learner: int, now: float) -> list[Decision]:
        """A learner that had been counted out goes on with its own steps: only its connection was lost."""
        self._attendance.come_back(learner)
        bound, slowest = self.settings.clock_bound, self._attendance.slowest()
        if bound is not None and slowest is not None and self.members[learner].seen - slowest > bound:
            self._held.add(learner)
            return self._settle(now)
        return [*self.publish_all(learner), *self._settle(now)]

    def has_missed(self, learner: int) -> bool:
        """Whether a learner that was counted out cannot go on where it was: the others made a round without it that it
        would make up alone, or would have to wait for it under a bound on clocks."""
        return self._attendance.has_missed(learner, self.settings.clock_bound is not None)

    def leave(self, learner: int, now: float) -> list[Decision]:
        """A learner is gone. What it sent before stays; nobody waits for it any more."""
        member = self._attendance.leave(learner)
        if member is None:
            return []
        self._held.discard(learner)
        self._deferred = {entry for entry in self._deferred if entry[0] != learner}
        for fragment in self._pending:
            self._latest[fragment].pop(learner, None)
        return [Farewell(learner, member.incarnation), *self._settle(now)]

    def finish(self, learner: int, now: float) -> list[Decision]:
        """A learner makes no further step, and sends no further update."""
        if learner not in self.members:
            return []
        self._attendance.finish(learner)
        return self._settle(now)

    def arrive(self, header: UpdateHeader, now: float) -> list[Decision]:
        """An update has come."""
        refused = self._refuse(header)
        if refused:
            return refused
        learner, fragment = header.id.learner, header.id.fragment
        self._received[learner, fragment] = (header.id.incarnation, header.id.sequence)
        self._latest[fragment][learner] = header.tokens
        self._sent[fragment][learner] = header.clock
        self._attendance.hear(learner, header.clock, header.final)
        decisions: list[Decision] = []
        settings, lag = self.settings, self.versions[fragment] - header.base_version
        if settings.max_lag is not None and lag > settings.max_lag:
            decisions.append(Discard(header.id, f"lags {lag} versions behind, more than {settings.max_lag}"))
            self._mark_settled(header.id)
            if settings.clock_bound is None:
                decisions.append(self._publication(learner, fragment))
        else:
            self._pending[fragment].append(Arrival(header, now))
        if settings.clock_bound is not None:
            self._held.add(learner)
        return [*decisions, *self._settle(now)]

    def tick(self, now: float) -> list[Decision]:
        """Time has passed; call it when `due` says so, or more often."""
        return self._settle(now)

    def due(self) -> float | None:
        """When `tick` has something to do; None: not before something else happens."""
        times = [found.at for fragment in self._pending if (found := self._opening(fragment)) is not None]
        return min(times, default=None)

    def publish_all(self, learner: int) -> list[Decision]:
        """The shared values as they are, for one member."""
        return [self._publication(learner, fragment) for fragment in self.versions]

    def holds(self, learner: int) -> bool:
        """Whether a learner gets nothing before others have caught up."""
        return learner in self._held

    def has_received(self, update: UpdateId) -> bool:
        """Whether an update has come; numbers of one life only grow."""
        incarnation, sequence = self._received.get((update.learner, update.fragment), (-1, -1))
        return incarnation == update.incarnation and update.sequence <= sequence

    def pending(self) -> list[UpdateId]:
        """Updates that wait to be merged."""
        return [arrival.header.id for pending in self._pending.values() for arrival in pending]

    def _refuse(self, header: UpdateHeader) -> list[Decision]:
        """Decisions on an update that has been here before, or is of a former life of its learner; empty: it is new."""
        key = (header.id.learner, header.id.fragment)
        member = self.members.get(header.id.learner)
        if member is None or header.id.incarnation != member.incarnation:
            return [Discard(header.id, "its sender is no member")]
        if self.has_received(header.id):
            repeated: list[Decision] = [Discard(header.id, "came before", repeated=True)]
            if self._settled_sequence(*key) >= header.id.sequence and header.id.learner not in self._held:
                repeated.append(self._publication(*key))
            return repeated
        return []

    def _settle(self, now: float) -> list[Decision]:
        """Every merge that is due, with what follows from it."""
        decisions: list[Decision] = []
        phase = None
        while phase != self.phase:
            # Another policy may open the gate of a fragment that was looked at before.
            phase = self.phase
            for fragment in self._pending:
                while (found := self._opening(fragment)) is not None and found.at <= now:
                    decisions.extend(self._merge(fragment, found))
        decisions.extend(self._release())
        return decisions

    def _opening(self, fragment: int) -> Opening | None:
        return opening(self.settings.gate, self._pending[fragment], self.members, self._sent[fragment])

    def _merge(self, fragment: int, found: Opening) -> Iterator[Decision]:
        headers = found.in_order()
        version = self.versions[fragment]
        # A sender that left before the merge still had its share in the work.
        latest = {header.id.learner: header.tokens for header in headers} | self._latest[fragment]
        members = len(self.members.keys() | {header.id.learner for header in headers})
        weights = combine_weights(self.settings.combine, headers, version, latest, members)
        slowest = min((member.seen for member in self.members.values()), default=0)
        self.versions[fragment] = version + 1
        if self.settings.gate.kind == "barrier":
            self._attendance.round_made(headers[0].clock, self._sent[fragment])
        merged = {header.id for header in headers}
        self._pending[fragment] = [entry for entry in self._pending[fragment] if entry.header.id not in merged]
        for header in headers:
            self._mark_settled(header.id)
        yield Merge(
            fragment,
            version + 1,
            tuple(header.id for header in headers),
            weights,
            tuple(
                (max(header.clock - slowest, 0), version - header.base_version, header.local_steps)
                for header in headers
            ),
            self.progress,
            self.phase,
            portion(self.settings.combine, headers, version, members),
        )
        receivers = {learner for learner, waiting in self._deferred if waiting == fragment}
        self._deferred = {entry for entry in self._deferred if entry[1] != fragment}
        if self.settings.clock_bound is None:
            receivers |= {header.id.learner for header in headers}
        if self._switches(headers):
            self.phase += 1
            yield Switch(tuple(self.versions), self.phase, self.progress)
        if self.settings.shares_merge:
            receivers = set(self.members)
        for learner in sorted(receivers & set(self.members)):
            yield self._publication(learner, fragment)

    def _release(self) -> Iterator[Decision]:
        """Publications for the learners that the clock bound held back and that may go on."""
        if not self._held:
            return
        # Without a bound only those are held that another policy left here.
        bound = math.inf if self.settings.clock_bound is None else self.settings.clock_bound
        slowest = self._attendance.slowest()
        for learner in sorted(self._held):
            if slowest is None or self.members[learner].seen - slowest <= bound:
                self._held.discard(learner)
                for fragment in self.versions:
                    yield self._publication(learner, fragment)

    def _switches(self, headers: Sequence[UpdateHeader]) -> bool:
        when = self.plan.when
        if when is None or self.phase + 1 >= len(self.plan.phases):
            return False
        if when.plateau is not None:
            loss = sum(header.loss for header in headers) / len(headers)
            if self._best_loss is None or loss < self._best_loss - when.improvement:
                self._best_loss, self._without_improvement = loss, 0
            else:
                self._without_improvement += 1
            if self._without_improvement >= when.plateau:
                return True
        return when.step is not None and self.progress >= when.step

    def _publication(self, learner: int, fragment: int) -> Publication:
        return Publication(
            fragment=fragment,
            version=self.versions[fragment],
            learner=learner,
            incarnation=self.members[learner].incarnation,
            settled=self._settled_sequence(learner, fragment),
            progress=self.progress,
            seen=self.members[learner].seen,
            phase=self.phase,
        )

    def _mark_settled(self, update: UpdateId) -> None:
        # A barrier merges the updates of a learner in order, and so do the other gates.
        self._settled[update.learner, update.fragment] = (update.incarnation, update.sequence)

    def _settled_sequence(self, learner: int, fragment: int) -> int:
        incarnation, sequence = self._settled.get((learner, fragment), (-1, -1))
        member = self.members.get(learner)
        return sequence if member is not None and member.incarnation == incarnation else -1

    def state_dict(self) -> dict[str, Any]:
        """Everything the next decisions depend on, as JSON values."""
        return {
            "phase": self.phase,
            "attendance": self._attendance.state_dict(),
            "versions": {str(fragment): version for fragment, version in self.versions.items()},
            "pending": {
                str(fragment): [{"at": entry.at, **asdict(entry.header)} for entry in pending]
                for fragment, pending in self._pending.items()
            },
            "received": [[*key, *value] for key, value in self._received.items()],
            "settled": [[*key, *value] for key, value in self._settled.items()],
            "latest": [
                [fragment, learner, list(tokens)]
                for fragment, latest in self._latest.items()
                for learner, tokens in latest.items()
            ],
            "sent": [
                [fragment, learner, clock] for fragment, sent in self._sent.items() for learner, clock in sent.items()
            ],
            "held": sorted(self._held),
            "deferred": sorted(map(list, self._deferred)),
            "best_loss": self._best_loss,
            "without_improvement": self._without_improvement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.phase = state["phase"]
        self._attendance.load_state_dict(state["attendance"])
        self.versions = {int(fragment): version for fragment, version in state["versions"].items()}
        self._pending = {
            int(fragment): [_read_arrival(entry) for entry in pending] for fragment, pending in state["pending"].items()
        }
        self._received = {(a, b): (c, d) for a, b, c, d in state["received"]}
        self._settled = {(a, b): (c, d) for a, b, c, d in state["settled"]}
        self._latest = {fragment: {} for fragment in self.versions}
        for fragment, learner, tokens in state["latest"]:
            self._latest[fragment][learner] = tuple(tokens)
        self._sent = {fragment: {} for fragment in self.versions}
        for fragment, learner, clock in state["sent"]:
            self._sent[fragment][learner] = clock
        self._held = set(state["held"])
        self._deferred = {(learner, fragment) for learner, fragment in state["deferred"]}
        self._best_loss, self._without_improvement = state["best_loss"], state["without_improvement"]


def _read_arrival(entry: dict[str, Any]) -> Arrival:
    entry = dict(entry)
    at = entry.pop("at")
    return Arrival(read_header(entry), at)


def read_header(entry: dict[str, Any]) -> UpdateHeader:
    """A header from the JSON values that ``dataclasses.asdict`` made of it."""
    return UpdateHeader(**{**entry, "id": UpdateId(**entry["id"]), "tokens": tuple(entry["tokens"])})
