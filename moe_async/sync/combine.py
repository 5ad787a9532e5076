"""Combiners: the factor of each update in a merge, unit by unit. Plain numbers, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_async.sync.messages import UpdateHeader
from moe_async.sync.settings import Combine


def combine_weights(
    combine: Combine,
    updates: Sequence[UpdateHeader],
    version: int,
    latest: Mapping[int, Sequence[int]],
    members: int,
) -> tuple[tuple[float, ...], ...]:
    """The factor of each unit of each update; what is added up is ``sum_i factor_i * contribution_i``.

    A unit that saw no token contributes nothing and has the factor 0, whatever the rule; when no update has tokens for
    a unit, its direction is zero.

    Args:
        combine: the rule.
        updates: what is merged.
        version: of the fragment before the merge.
        latest: tokens of each unit in the latest update of every learner that has sent one, those merged now included.
        members: learners that share the work, at least the distinct senders.
    """
    units = len(updates[0].tokens)
    rows = [[0.0] * units for _ in updates]
    for unit in range(units):
        claims = [_claim(combine, update.tokens[unit]) for update in updates]
        discounts = [_discount(combine, update, version) for update in updates]
        if combine.over == "arrived":
            shares = [_share(combine, update.tokens[unit]) for update in updates]
            total = sum(share * discount for share, discount in zip(shares, discounts, strict=True))
        else:
            known = [_share(combine, tokens[unit]) for tokens in latest.values()]
            # Who has not been heard of yet counts as much as the others on average.
            total = sum(known) * max(members, len(known)) / len(known)
        for row, claim, discount in zip(rows, claims, discounts, strict=True):
            row[unit] = claim * discount / total if total else 0.0
    return tuple(tuple(row) for row in rows)


def portion(combine: Combine, updates: Sequence[UpdateHeader], version: int, members: int) -> float:
    """How much of the mean over all members a merge holds, by number of updates; arguments as in `combine_weights`.

    It is 1 where factors are over those that arrived, whoever they are.
    """
    if combine.over == "arrived":
        return 1.0
    return sum(_discount(combine, update, version) for update in updates) / max(members, len(updates))


def _discount(combine: Combine, update: UpdateHeader, version: int) -> float:
    return 1 / (1 + combine.discount * max(version - update.base_version, 0))


def _claim(combine: Combine, tokens: int) -> float:
    return float(tokens) if combine.weight == "tokens" else float(tokens > 0)


def _share(combine: Combine, tokens: int) -> float:
    """What a claim adds to the divisor."""
    return 1.0 if combine.counts_idle and combine.weight == "equal" else _claim(combine, tokens)
