"""Who takes part under a policy, how far each learner has come, and whom the others went on without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from moe_async.sync.gates import Member, owes


class Attendance:
    """The members of one group of parameters, at the syncer.

    Attributes:
        members: learners that take part now.
        steps: that all learners have made, as far as is known; those of learners that left stay counted.
    """

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.steps = 0
        self._away: dict[int, Member] = {}
        self._missed: set[int] = set()
        self._seen: dict[int, int] = {}

    def join(self, learner: int, incarnation: int, clock: int) -> None:
        """A new life of a learner begins at ``clock`` steps."""
        self._forget(learner)
        self.members[learner] = Member(incarnation, joined_clock=clock, seen=clock)
        self._hear(learner, clock)

    def come_back(self, learner: int) -> None:
        """A learner that was away goes on as the one it was: it owes what it owed."""
        member = self._away[learner]
        self._forget(learner)
        self.members[learner] = replace(member, final=False)

    def leave(self, learner: int) -> Member | None:
        """A learner is gone; what it was, or None for one that was no member."""
        member = self.members.pop(learner, None)
        if member is not None:
            self._away[learner] = member
        return member

    def finish(self, learner: int) -> None:
        """A member makes no further step."""
        self.members[learner] = replace(self.members[learner], final=True)

    def hear(self, learner: int, clock: int, final: bool) -> None:
        """A member has told how many steps it has made, and whether those were its last."""
        self._hear(learner, clock)
        member = self.members[learner]
        self.members[learner] = replace(member, seen=max(clock, member.seen), final=member.final or final)

    def round_made(self, clock: int, sent: Mapping[int, int]) -> None:
        """What members had to send after ``clock`` steps is merged: who is away and had not sent it has missed it.

        Args:
            clock: of the round.
            sent: by learner, the steps after which its last update of the fragment was sent.
        """
        self._missed |= {
            learner for learner, member in self._away.items() if owes(member, sent.get(learner, -1), clock)
        }

    def has_missed(self, learner: int, bounded: bool) -> bool:
        """Whether the others have gone on without a learner that is away, so that it cannot go on where it was.

        Args:
            learner: who.
            bounded: clocks are bound to one another: those who did not wait for it would have to, now.
        """
        if learner not in self._away:
            return False
        slowest = self.slowest()
        behind = bounded and slowest is not None and slowest > self._away[learner].seen
        return behind or learner in self._missed

    def at_work(self) -> list[int]:
        """Steps of the members that make further ones, as far as is known."""
        return [member.seen for member in self.members.values() if not member.final]

    def slowest(self) -> int | None:
        """Steps of the slowest member that makes further ones; None: there is none."""
        return min(self.at_work(), default=None)

    def farthest(self) -> int:
        """Steps of the learner that has come farthest, also of one that left."""
        return max(self._seen.values(), default=0)

    def _hear(self, learner: int, clock: int) -> None:
        before = self._seen.get(learner, 0)
        self._seen[learner] = max(clock, before)
        self.steps += self._seen[learner] - before

    def _forget(self, learner: int) -> None:
        self._away.pop(learner, None)
        self._missed.discard(learner)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "members": _written(self.members),
            "away": _written(self._away),
            "missed": sorted(self._missed),
            "seen": [[learner, clock] for learner, clock in self._seen.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.members, self._away = _read(state["members"]), _read(state["away"])
        self._missed = set(state["missed"])
        self._seen = dict(map(tuple, state["seen"]))
        self.steps = sum(self._seen.values())


def _written(members: Mapping[int, Member]) -> list[list[Any]]:
    return [[learner, asdict(member)] for learner, member in members.items()]


def _read(entries: Iterable[Any]) -> dict[int, Member]:
    return {learner: Member(**member) for learner, member in entries}
