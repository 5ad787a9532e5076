"""What learners and the syncer tell one another, and what the syncer decides: numbers only, no tensors.

The payload of an update or a publication, a flat tensor, travels beside its header.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class UpdateId:
    """Which update: one is applied once, however often it is sent.

    Attributes:
        learner: who sent it.
        incarnation: which life of that learner; a restarted one counts on.
        sequence: updates of this fragment that this incarnation sent before.
        fragment: what it is for.
    """

    learner: int
    incarnation: int
    sequence: int
    fragment: int


@dataclass(frozen=True)
class UpdateHeader:
    """An update as the syncer sees it.

    Attributes:
        id: which one.
        base_version: version of the fragment that the learner had taken last when it sent this. A learner that never
            waits may have trained on older ones for most of the contribution.
        clock: steps that the learner has finished.
        local_steps: of them, those since its last update of this fragment.
        tokens: since then, of each unit of the fragment: label tokens of a dense unit, routed tokens of an expert.
        loss: mean language-model loss over those steps, in nats per token.
        final: the learner makes no further step.
    """

    id: UpdateId
    base_version: int
    clock: int
    local_steps: int
    tokens: tuple[int, ...]
    loss: float = 0.0
    final: bool = False


@dataclass(frozen=True)
class Publication:
    """A shared value on its way to one learner.

    Attributes:
        fragment, version: what it is.
        learner, incarnation: to whom.
        settled: of that incarnation's updates of the fragment, the highest sequence number that was merged or
            discarded; -1: none.
        progress: steps that the learners of the run have made on average, as far as the syncer has heard.
        seen: steps of the addressee in it.
        phase: which of the policies of `switch` holds from now on; 0 without one.
    """

    fragment: int
    version: int
    learner: int
    incarnation: int
    settled: int
    progress: float
    seen: int
    phase: int = 0


@dataclass(frozen=True)
class Merge:
    """The updates that make the next version of a fragment, in the order of the sum.

    Attributes:
        fragment: which one.
        version: the one made.
        updates: whose contributions.
        weights: for each update the factor of each unit; the factors of a left out unit are 0.
        staleness: of each update: clock gap (steps ahead of the slowest member), version lag (versions made since
            the one that the learner had taken last) and drift (local steps since its last update).
        progress: see `Publication`, when it was made.
        phase: policy under which it was made.
        portion: how much of the mean over all members it holds: 1, or where the factors are over all members the part
            of those whose updates are in it; see `moe_async.ops.outer.outer_step`.
    """

    fragment: int
    version: int
    updates: tuple[UpdateId, ...]
    weights: tuple[tuple[float, ...], ...]
    staleness: tuple[tuple[int, int, int], ...]
    progress: float
    phase: int = 0
    portion: float = 1.0


@dataclass(frozen=True)
class Discard:
    """An update that is not merged, and why.

    Attributes:
        update: which one.
        reason: in words.
        repeated: it came before, and what was decided then holds; only this copy is dropped.
    """

    update: UpdateId
    reason: str
    repeated: bool = False


@dataclass(frozen=True)
class Switch:
    """From the next arrival on another policy holds for these fragments."""

    fragments: tuple[int, ...]
    phase: int
    progress: float


@dataclass(frozen=True)
class Welcome:
    """A learner takes part from now on; publications of the shared values follow.

    Attributes:
        learner, incarnation: who.
        clock: number of steps at which it begins, so that it keeps step with the others.
    """

    learner: int
    incarnation: int
    clock: int


@dataclass(frozen=True)
class Farewell:
    """A learner takes no part any more: it died, or its connection did."""

    learner: int
    incarnation: int


Decision = Merge | Discard | Publication | Switch | Welcome | Farewell
"""What follows from one event at the syncer, in the order in which it has to be done."""
