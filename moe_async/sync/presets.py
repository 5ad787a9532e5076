"""Policies by name: each preset is a choice of the parts in `moe_async.sync.settings`.

Sources, and what each preset does in detail, are in docs/synchronisation.md. All of them are tested, event by event,
against loops that were written from the papers.
"""

from __future__ import annotations

from typing import Literal

from moe_async.ops.outer import Outer
from moe_async.sync.settings import Combine, Gate, PolicyPlan, PolicySettings, SwitchWhen

Weight = Literal["equal", "tokens"]

_MEAN = Combine(counts_idle=True)
"""The mean of gradients."""


def bsp(optimizer: Outer) -> PolicySettings:
    """Bulk-synchronous: one optimizer step with the mean gradient of all learners (Valiant 1990)."""
    return PolicySettings(contribution="grad", max_lag=0, combine=_MEAN, outer=optimizer)


def m_sync(optimizer: Outer, count: int) -> PolicySettings:
    """One optimizer step with the first ``count`` gradients of the newest version; later ones are dropped.

    Backup workers (Chen et al. 2016); m-synchronous SGD (Begunov and Tyurin 2026).
    """
    return PolicySettings(contribution="grad", gate=Gate("first", count), max_lag=0, combine=_MEAN, outer=optimizer)


def asp(optimizer: Outer, discount: float = 0.0, max_lag: int | None = None) -> PolicySettings:
    """Asynchronous parameter server: one optimizer step with each gradient over the number of learners, as it comes.

    With ``max_lag`` gradients that lag behind further are refused (Ringmaster ASGD, Maranjyan et al. 2025).
    """
    return PolicySettings(
        contribution="grad",
        gate=Gate("each"),
        combine=Combine(over="members", discount=discount, counts_idle=True),
        max_lag=max_lag,
        outer=optimizer,
    )


def ssp(
    optimizer: Outer, bound: int, aggregate: Literal["push", "clock"] = "push", discount: float = 0.0
) -> PolicySettings:
    """Stale-synchronous parallel (Ho et al. 2013): as `asp`, but nobody starts a step more than ``bound`` steps ahead
    of the slowest. With ``aggregate="clock"`` the gradients of one step number make one optimizer step together."""
    if aggregate == "clock":
        return PolicySettings(contribution="grad", clock_bound=bound, combine=_MEAN, outer=optimizer)
    return PolicySettings(
        contribution="grad",
        gate=Gate("each"),
        combine=Combine(over="members", discount=discount, counts_idle=True),
        clock_bound=bound,
        outer=optimizer,
    )


def local_sgd(every: int, weight: Weight = "equal") -> PolicySettings:
    """The mean of the learners' weights after every ``every`` steps (Stich 2019)."""
    return PolicySettings(every=every, combine=Combine(weight))


def diloco(every: int, lr: float = 0.7, momentum: float = 0.9, weight: Weight = "equal") -> PolicySettings:
    """Nesterov momentum on the mean of how far the learners came in ``every`` steps (Douillard et al. 2023)."""
    return PolicySettings(every=every, combine=Combine(weight), outer=Outer("nesterov", lr, momentum))


def streaming_diloco(
    every: int,
    fragments: int,
    overlap: int = 0,
    mix: float = 0.5,
    lr: float = 0.7,
    momentum: float = 0.9,
    weight: Weight = "equal",
) -> PolicySettings:
    """DiLoCo fragment by fragment: results are taken ``overlap`` steps after sending and mixed into the local weights
    (Douillard et al. 2025)."""
    return PolicySettings(
        every=every,
        fragments=fragments,
        combine=Combine(weight),
        outer=Outer("nesterov", lr, momentum),
        overlap=overlap,
        mix=mix,
        shares_merge=True,
    )


def delayed_nesterov(
    every: int, delay: int, lr: float = 0.7, momentum: float = 0.9, share: float = 0.0
) -> PolicySettings:
    """Each learner's contribution moves the weights as it comes; the momentum changes after every ``delay`` of them
    (Liu et al. 2024)."""
    return PolicySettings(every=every, gate=Gate("each"), outer=Outer("delayed_nesterov", lr, momentum, delay, share))


def decoupled(
    every: int,
    fragments: int = 1,
    quorum: int = 1,
    grace: float = 0.0,
    weight: Weight = "tokens",
    over: Literal["arrived", "members"] = "members",
    discount: float = 0.0,
    max_lag: int | None = None,
    ahead: int = 4,
    outer: Outer | None = None,
) -> PolicySettings:
    """Learners that never wait for one another (after Decoupled DiLoCo, 2026): what a quorum and a grace window have
    brought is merged and sent to all, who keep what they learnt meanwhile."""
    return PolicySettings(
        every=every,
        fragments=fragments,
        gate=Gate("quorum", quorum, grace),
        max_lag=max_lag,
        combine=Combine(weight, over, discount),
        outer=outer or Outer(),
        overlap=None,
        ahead=ahead,
        mix=None,
        shares_merge=True,
    )


def switch(first: PolicySettings, then: PolicySettings, when: SwitchWhen) -> PolicyPlan:
    """One policy, then another (Sync-Switch, Li et al. 2021); the optimizer's state goes over as it is."""
    return PolicyPlan((first, then), when)
