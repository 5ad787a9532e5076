"""Gates: which pending updates of a fragment are merged, and when. Functions of headers and times; no state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from moe_async.sync.messages import UpdateHeader
from moe_async.sync.settings import Gate


@dataclass(frozen=True)
class Arrival:
    """An update that waits at the syncer, and when it came (seconds)."""

    header: UpdateHeader
    at: float


@dataclass(frozen=True)
class Member:
    """A learner that takes part.

    Attributes:
        incarnation: its current life.
        joined_clock: steps at which it began; it owes no update of steps up to that.
        seen: steps that it has finished, as far as the syncer has heard.
        final: it makes no further step.
    """

    incarnation: int
    joined_clock: int = 0
    seen: int = 0
    final: bool = False


@dataclass(frozen=True)
class Opening:
    """A merge of ``updates`` at time ``at``; it is due when that is not later than now."""

    at: float
    updates: Sequence[Arrival]

    def in_order(self) -> list[UpdateHeader]:
        """Floating-point sums depend on their order, so it is that of learners and never that of arrival."""
        return sorted((arrival.header for arrival in self.updates), key=lambda header: header.id)


def owes(member: Member, sent: int, clock: int) -> bool:
    """Whether an update of ``clock`` steps is still to come from a learner whose last one was of ``sent`` steps."""
    return member.joined_clock < clock and sent < clock and not (member.final and member.seen < clock)


def opening(
    gate: Gate, pending: Sequence[Arrival], members: Mapping[int, Member], sent: Mapping[int, int]
) -> Opening | None:
    """The next merge of a fragment; None while it waits for further updates.

    Args:
        gate: the rule.
        pending: updates in the order of their arrival.
        members: learners alive, by number.
        sent: of learners that have sent updates of the fragment in this life, the steps after which the last one was.
    """
    return _GATES[gate.kind](gate, pending, members, sent) if pending else None


def _barrier(
    gate: Gate, pending: Sequence[Arrival], members: Mapping[int, Member], sent: Mapping[int, int]
) -> Opening | None:
    clock = min(arrival.header.clock for arrival in pending)
    # Nobody sends of a number of steps that is behind it: a learner may be ahead after a change of policy, and what a
    # former life sent does not stand for what this one will send.
    if any(owes(member, sent.get(learner, -1), clock) for learner, member in members.items()):
        return None
    group = [arrival for arrival in pending if arrival.header.clock == clock]
    return Opening(group[-1].at, group)


def _first(
    gate: Gate, pending: Sequence[Arrival], members: Mapping[int, Member], sent: Mapping[int, int]
) -> Opening | None:
    wanted = min(gate.count, len(_at_work(pending, members)))
    return Opening(pending[-1].at, pending) if len(pending) >= wanted else None


def _each(
    gate: Gate, pending: Sequence[Arrival], members: Mapping[int, Member], sent: Mapping[int, int]
) -> Opening | None:
    return Opening(pending[0].at, (pending[0],))


def _quorum(
    gate: Gate, pending: Sequence[Arrival], members: Mapping[int, Member], sent: Mapping[int, int]
) -> Opening | None:
    came = list({arrival.header.id.learner: arrival for arrival in reversed(pending)}.values())
    wanted = gate.count if len(came) >= gate.count else min(gate.count, len(_at_work(pending, members)))
    if len(came) < wanted:
        return None
    at = sorted(arrival.at for arrival in came)[wanted - 1]
    return Opening(at + max(gate.grace, 0.0), pending)


def _at_work(pending: Sequence[Arrival], members: Mapping[int, Member]) -> Collection[int]:
    """Learners whose updates are there or may still come."""
    return {arrival.header.id.learner for arrival in pending} | {
        learner for learner, member in members.items() if not member.final
    }


Rule = Callable[[Gate, Sequence[Arrival], Mapping[int, Member], Mapping[int, int]], Opening | None]
_GATES: Mapping[str, Rule] = {
    "barrier": _barrier,
    "first": _first,
    "each": _each,
    "quorum": _quorum,
}
