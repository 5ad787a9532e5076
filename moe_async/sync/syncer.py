"""All policies of a run together: one state machine for the syncer, one for each learner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_async.ops.outer import Outer
from moe_async.sync.fragments import Fragment
from moe_async.sync.learner_policy import LearnerPolicy, Position
from moe_async.sync.messages import Decision, Publication, UpdateHeader, UpdateId, Welcome
from moe_async.sync.settings import PolicyPlan
from moe_async.sync.syncer_policy import SyncerPolicy


@dataclass(frozen=True)
class SyncGroup:
    """Parameters that are exchanged under one policy.

    Attributes:
        name: the parameter classes in it, such as ``dense+router``.
        plan: their policy.
        fragments: their fragments.
        rules: the outer optimizer of single keys, by name, where it is not the policy's; see `moe_async.sync.segments`.
    """

    name: str
    plan: PolicyPlan
    fragments: tuple[Fragment, ...]
    rules: Mapping[str, Outer] = field(default_factory=dict)


class Syncer:
    """Decides for the whole run; no I/O and no tensors.

    Args:
        groups: everything that is exchanged, the same at every learner.
        learners: expected number of learners.
    """

    def __init__(self, groups: Sequence[SyncGroup], learners: int) -> None:
        self.groups = tuple(groups)
        self.policies = [
            SyncerPolicy(group.plan, [fragment.number for fragment in group.fragments], learners) for group in groups
        ]
        self._of = {fragment: policy for policy in self.policies for fragment in policy.versions}
        self.incarnations: dict[int, int] = {}
        self._finished: set[int] = set()

    @property
    def progress(self) -> float:
        """Steps that the learners have made on average, as far as the syncer has heard."""
        return max(policy.progress for policy in self.policies)

    @property
    def members(self) -> set[int]:
        """Learners that take part now."""
        return set(self.policies[0].members)

    @property
    def finished(self) -> bool:
        """Whether there are learners and all of them have sent everything they had."""
        # A final update is not enough: those of other fragments may still be on their way.
        return bool(self.members) and self.members <= self._finished

    def join(self, learner: int, incarnation: int, now: float, clock: int | None = None) -> list[Decision]:
        """A learner has come, or come back; an earlier incarnation of it is gone.

        Args:
            learner, incarnation: who.
            now: the time.
            clock: its steps, when only its connection had been lost; None: it begins where the others are.
        """
        if clock is not None and self.incarnations.get(learner) == incarnation:
            if learner not in self.members:
                values = [decision for policy in self.policies for decision in policy.come_back(learner, now)]
            else:
                # It was never counted out. One that is held back by a bound stays so.
                policies = [policy for policy in self.policies if not policy.holds(learner)]
                values = [decision for policy in policies for decision in policy.publish_all(learner)]
            return [Welcome(learner, incarnation, clock), *values]
        decisions = self.leave(learner, now)
        if clock is None:
            bound = [policy for policy in self.policies if policy.settings.clock_bound is not None]
            clocks = [policy.joining_clock() for policy in bound or self.policies]
            clock = min(clocks) if bound else max(clocks)
        self.incarnations[learner] = incarnation
        decisions.append(Welcome(learner, incarnation, clock))
        for policy in self.policies:
            decisions += policy.join(learner, incarnation, clock, now)
        return decisions

    def leave(self, learner: int, now: float) -> list[Decision]:
        """A learner is gone."""
        self._finished.discard(learner)
        decisions: list[Decision] = []
        for policy in self.policies:
            found = policy.leave(learner, now)
            # One farewell is enough, however many policies hold.
            decisions += found if policy is self.policies[0] else found[1:]
        return decisions

    def finish(self, learner: int, now: float) -> list[Decision]:
        """A learner makes no further step and sends nothing more."""
        self._finished.add(learner)
        return [decision for policy in self.policies for decision in policy.finish(learner, now)]

    def arrive(self, header: UpdateHeader, now: float) -> list[Decision]:
        """An update has come."""
        return self._of[header.id.fragment].arrive(header, now)

    def tick(self, now: float) -> list[Decision]:
        """Time has passed."""
        return [decision for policy in self.policies for decision in policy.tick(now)]

    def due(self) -> float | None:
        """When `tick` has something to do next."""
        times = [time for policy in self.policies if (time := policy.due()) is not None]
        return min(times, default=None)

    def publish_all(self, learner: int) -> list[Decision]:
        """All shared values for one member."""
        return [decision for policy in self.policies for decision in policy.publish_all(learner)]

    def has_received(self, update: UpdateId) -> bool:
        """Whether an update has come, from a learner that still takes part or from one that is gone."""
        return self._of[update.fragment].has_received(update)

    def must_begin_anew(self, learner: int, incarnation: int, sequences: Mapping[int, int]) -> bool:
        """Whether a learner that comes back cannot go on as the one it was.

        Either it comes from a checkpoint and has lived on after it, so that what it has done since is merged and would
        be a second time; or it has been counted out, and the others have gone on in a way that it can't follow, see
        `SyncerPolicy.has_missed`.

        Args:
            learner, incarnation: who it was.
            sequences: by fragment, the number that its next update would have; empty: it has never stopped living.
        """
        if self.incarnations.get(learner, incarnation) != incarnation:
            return bool(sequences)
        return any(policy.has_missed(learner) for policy in self.policies) or any(
            self.has_received(UpdateId(learner, incarnation, sequence, fragment))
            for fragment, sequence in sequences.items()
            if fragment in self._of
        )

    def pending(self) -> set[UpdateId]:
        """Updates that wait to be merged."""
        return {update for policy in self.policies for update in policy.pending()}

    def version(self, fragment: int) -> int:
        """Of one fragment."""
        return self._of[fragment].versions[fragment]

    def state_dict(self) -> dict[str, Any]:
        """Everything the next decisions depend on, as JSON values."""
        return {
            "policies": [policy.state_dict() for policy in self.policies],
            "incarnations": [[learner, number] for learner, number in self.incarnations.items()],
            "finished": sorted(self._finished),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        for policy, entry in zip(self.policies, state["policies"], strict=True):
            policy.load_state_dict(entry)
        self.incarnations = dict(map(tuple, state["incarnations"]))
        self._finished = set(state["finished"])


class LearnerSync:
    """The decisions of one learner over all its groups.

    Args:
        groups: as at the syncer.
        learner, incarnation: who this is.
        clock: steps at which it begins.
    """

    def __init__(self, groups: Sequence[SyncGroup], learner: int, incarnation: int = 0, clock: int = 0) -> None:
        self.groups = tuple(groups)
        self.fragments = {fragment.number: fragment for group in groups for fragment in group.fragments}
        position = Position(float(clock), clock)
        self.policies = [
            LearnerPolicy(
                group.plan,
                {fragment.number: len(fragment.units) for fragment in group.fragments},
                learner,
                incarnation,
                clock,
                position,
            )
            for group in groups
        ]
        self._of = {
            fragment.number: policy
            for group, policy in zip(groups, self.policies, strict=True)
            for fragment in group.fragments
        }

    @property
    def clock(self) -> int:
        """Steps that the learner has finished."""
        return self.policies[0].clock

    @property
    def incarnation(self) -> int:
        """The life that its updates are of."""
        return self.policies[0].incarnation

    @property
    def contribution(self) -> str:
        """What the learner sends: ``delta`` or ``grad``, the same in all groups."""
        return self.policies[0].settings.contribution

    def position(self) -> float:
        """Steps that the learners have made on average, by what this one knows."""
        return self.policies[0].position()

    def mix(self, fragment: int) -> float | None:
        """How a shared value of the fragment is taken; see `PolicySettings.mix`."""
        return self._of[fragment].settings.mix

    def step_done(self, dense_tokens: int, expert_tokens: Mapping[str, int], loss: float) -> None:
        """A step is over.

        Args:
            dense_tokens: its label tokens.
            expert_tokens: its routed tokens by expert, as in `Unit.expert`.
            loss: its mean language-model loss.
        """
        tokens = {
            number: [expert_tokens[unit.expert] if unit.expert else dense_tokens for unit in fragment.units]
            for number, fragment in self.fragments.items()
        }
        for policy in self.policies:
            policy.step_done(tokens, loss)

    def drained(self, dense_tokens: int) -> None:
        """Dense weights have changed after the last step, by gradients that a delay held back; see `LearnerPolicy`."""
        tokens = {
            number: [0 if unit.expert else dense_tokens for unit in fragment.units]
            for number, fragment in self.fragments.items()
        }
        for policy in self.policies:
            policy.drained(tokens)

    def owes(self) -> bool:
        """Whether there are updates to be sent now."""
        return any(policy.owes() for policy in self.policies)

    def due_updates(self) -> list[UpdateHeader]:
        """Updates to be sent now; they count as sent."""
        return [header for policy in self.policies for header in policy.due_updates()]

    def last_updates(self) -> list[UpdateHeader]:
        """What is left to be sent after the last step."""
        return [header for policy in self.policies for header in policy.last_updates()]

    def receive(self, publications: Iterable[Publication]) -> None:
        """Publications have come."""
        for publication in publications:
            self._of[publication.fragment].receive(publication)

    def takes(self, adopt: bool = False) -> list[Publication]:
        """Publications to be taken now; they count as taken. See `LearnerPolicy.takes`."""
        return [entry for policy in self.policies for entry in policy.takes(adopt)]

    def must_wait(self) -> bool:
        """Whether the next step has to wait for a publication."""
        return any(policy.must_wait() for policy in self.policies)

    def flights(self, fragment: int) -> list[tuple[int, int]]:
        """Updates of a fragment that are neither merged nor discarded: sequence number, and steps when it was sent."""
        return self._of[fragment].flights(fragment)

    def inbox(self) -> set[tuple[int, int]]:
        """Fragment and version of the publications that have come and are not taken yet."""
        return {(entry.fragment, entry.version) for policy in self.policies for entry in policy.inbox()}

    def state_dict(self) -> dict[str, Any]:
        """Everything the next decisions depend on, as JSON values."""
        return {"policies": [policy.state_dict() for policy in self.policies]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        for policy, entry in zip(self.policies, state["policies"], strict=True):
            policy.load_state_dict(entry)
