"""The parts of a policy as plain values: when to send and what, what to wait for, how to merge."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from moe_async.errors import SyncError
from moe_async.ops.outer import Outer

Contribution = Literal["delta", "grad"]
GateKind = Literal["barrier", "first", "each", "quorum"]


@dataclass(frozen=True)
class Gate:
    """When the updates of a fragment are merged.

    Attributes:
        kind: ``barrier``: those of all members with the same number of steps; ``first``: as soon as there are
            ``count``; ``each``: every one by itself; ``quorum``: ``grace`` seconds after updates of ``count`` members
            have come, everything that is there.
        count: see ``kind``; never more than there are members at work.
        grace: seconds.
    """

    kind: GateKind = "barrier"
    count: int = 1
    grace: float = 0.0


@dataclass(frozen=True)
class Combine:
    """The factors of the updates in a merge, for each unit on its own.

    Attributes:
        weight: ``equal``, or ``tokens`` that the unit saw since the sender's last update.
        over: weights are divided by their sum over the ``arrived`` updates of the merge, or over the latest known
            weights of all ``members``: then it does not matter in which groups updates arrive.
        discount: an update that lags behind by n versions counts ``1 / (1 + discount * n)``.
        counts_idle: with equal weights, whether a unit that saw no token counts in the divisor. A gradient is a mean
            over all tokens of its learner, so that of an expert without tokens is 0 and belongs into the mean of all;
            but a learner that did not train an expert has no say in where that should go.
    """

    weight: Literal["equal", "tokens"] = "equal"
    over: Literal["arrived", "members"] = "arrived"
    discount: float = 0.0
    counts_idle: bool = False


@dataclass(frozen=True)
class PolicySettings:
    """A policy, without the name under which recipes know it.

    Attributes:
        contribution: ``delta``: learners train on their own and send how far they came; ``grad``: they send gradients
            and the optimizer is the syncer's.
        every: steps between two updates of a fragment.
        fragments: parts that a class is cut into, each with its own turn within ``every`` steps.
        gate: when the syncer merges.
        max_lag: an update that lags behind by more versions is discarded; None: no bound.
        combine: factors.
        outer: what the merged direction does to the shared value; of a ``grad`` policy the optimizer itself.
        clock_bound: a learner starts its step n + 1 only if it is not more than this number of steps ahead of the
            slowest; None: no bound.
        overlap: steps that a learner goes on after sending before it takes the result, and waits for it if need be;
            0: it waits at once; None: it never waits for a result, and takes what there is between any two steps.
        ahead: a learner makes no further step while more than this number of its updates of one fragment are neither
            merged nor discarded; None: no bound.
        mix: what a taken value does to the local one: ``local = mix * local + (1 - mix) * shared``; None: the local
            value moves by as much as the shared one did, so that what was learnt since stays (`rebase`).
        shares_merge: a merge is sent to all members, not only to those that it settles.

    Raises:
        SyncError: a value is out of its range, or two of them do not fit together.
    """

    contribution: Contribution = "delta"
    every: int = 1
    fragments: int = 1
    gate: Gate = field(default_factory=Gate)
    max_lag: int | None = None
    combine: Combine = field(default_factory=Combine)
    outer: Outer = field(default_factory=Outer)
    clock_bound: int | None = None
    overlap: int | None = 0
    ahead: int | None = None
    mix: float | None = 0.0
    shares_merge: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("every", self.every, 1), ("fragments", self.fragments, 1), ("gate.count", self.gate.count, 1),
            ("gate.grace", self.gate.grace, 0), ("combine.discount", self.combine.discount, 0),
            ("max_lag", self.max_lag, 0), ("clock_bound", self.clock_bound, 0), ("ahead", self.ahead, 0),
        ):  # fmt: skip
            if value is not None and value < least:
                raise SyncError(f"{name} of a policy is {value}; it must be at least {least}.")
        if self.mix is not None and not 0 <= self.mix <= 1:
            raise SyncError(f"mix of a policy is {self.mix}; it must be a share from 0 to 1, or None.")
        if self.blocks and self.fragments > 1:
            raise SyncError(
                f"ahead is 0 with {self.fragments} fragments and a quorum of {self.gate.count}: learners that wait for "
                "one another on different fragments would wait for ever. Use ahead: 1 or more, quorum: 1, or "
                "fragments: 1."
            )
        if self.overlap is not None and not 0 <= self.overlap < self.every:
            raise SyncError(
                f"overlap is {self.overlap} but a fragment is sent every {self.every} steps, so its result would come "
                f"after it is sent again. Use overlap: {self.every - 1} at most."
            )

    def due(self, fragment: int, clock: int) -> bool:
        """Whether the ``fragment``-th of the fragments is sent after step ``clock`` (the first step is 1)."""
        offset = fragment * self.every // self.fragments
        return clock > 0 and (clock - offset) % self.every == 0

    @property
    def blocks(self) -> bool:
        """Whether a learner waits after each update for a merge that needs others, but not all of them."""
        return self.ahead == 0 and self.gate.kind == "quorum" and self.gate.count > 1

    @property
    def asynchronous(self) -> bool:
        """Whether merges happen without the updates of all members."""
        return self.gate.kind != "barrier"


@dataclass(frozen=True)
class SwitchWhen:
    """When a run goes over from one policy to the next; the first condition that holds counts.

    Attributes:
        step: mean number of steps of the learners.
        plateau: merges in a row whose mean loss does not come ``improvement`` below the best before.
        improvement: in nats.
    """

    step: float | None = None
    plateau: int | None = None
    improvement: float = 0.0


@dataclass(frozen=True)
class PolicyPlan:
    """What holds for a group of parameters over the whole run: one policy, or two in turn.

    Attributes:
        phases: the policies; of one kind of contribution and the same fragments.
        when: condition for the change; None with one phase.

    Raises:
        SyncError: the policies cannot follow one another.
    """

    phases: tuple[PolicySettings, ...]
    when: SwitchWhen | None = None

    def __post_init__(self) -> None:
        for first, then in pairwise(self.phases):
            if first.contribution != then.contribution or first.fragments != then.fragments:
                raise SyncError(
                    f"a policy that exchanges {first.contribution} in {first.fragments} fragments cannot be followed "
                    f"by one that exchanges {then.contribution} in {then.fragments}; use two of one kind, and the same "
                    "number of fragments."
                )
            if first.asynchronous and not then.asynchronous and then.fragments > 1 and first.every != then.every:
                # Learners hear of the change at different steps, and would owe one another different fragments.
                raise SyncError(
                    f"fragments are sent every {first.every} steps and then, by a policy that waits for all learners, "
                    f"every {then.every}: some would wait for ever. Use the same number of steps, or fragments: 1."
                )
