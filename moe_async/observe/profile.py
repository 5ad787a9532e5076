"""What the experts of a model specialise in, from what its routers did with a labelled text.

Shape letters: L MoE layers, C domains, E choices of the router (experts, then zero experts).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_async.errors import LoadError
from moe_async.observe.figures import LoadSummary, shares, summarise
from moe_async.observe.probe import Probe
from moe_async.observe.specialise import (
    Information,
    Pair,
    Preference,
    agreement,
    coactivation,
    domain_information,
    preferred_tokens,
)
from moe_async.observe.verdicts import Verdict, verdicts
from moe_async.observe.windows import Array

STRONGEST = 40
"""Pairs of a layer that are named, at most."""


@dataclass(frozen=True)
class Stability:
    """How far two checkpoints route the same tokens alike.

    Attributes:
        agreement: share of the experts of a token that both chose, mean over tokens.
        chance: the same if each chose by its loads alone, without a look at the token.
    """

    agreement: float
    chance: float


@dataclass(frozen=True)
class LayerProfile:
    """What the experts of a layer specialise in.

    Attributes:
        layer: its name.
        information: between expert and domain; None where the text has one domain or none.
        domain_shares: of each domain, the share of its assignments that each expert gets, [C][E].
        coactivation: of each pair of experts, how often they serve the same token over what chance gives, [E][E], NaN
            where there is nothing to tell; None where tokens take one expert each.
        strongest: the pairs that do so most notably.
        preferred: of each expert, the tokens that tell it from the others.
        stability: between this checkpoint and another; None without another.
    """

    layer: str
    information: Information | None
    domain_shares: tuple[tuple[float, ...], ...]
    coactivation: tuple[tuple[float, ...], ...] | None
    strongest: tuple[Pair, ...]
    preferred: tuple[tuple[Preference, ...], ...]
    stability: Stability | None = None


@dataclass(frozen=True)
class Profile:
    """A checkpoint over a text.

    Attributes:
        summary: the figures that a run's record gives, over the text; a forward pass stands for a step.
        verdicts: diseases that the loads show.
        domains: labels of the text, in the order of ``domain_shares``.
        loads: of each layer and each choice of its router, the assignments over the fair share, [L][E]; zero experts,
            which are behind the experts, over the same share.
        layers: in the order of the model.
    """

    summary: LoadSummary
    verdicts: tuple[Verdict, ...]
    domains: tuple[str, ...]
    loads: tuple[tuple[float, ...], ...]
    layers: tuple[LayerProfile, ...]


def profile(probe: Probe, other: Probe | None = None, shuffles: int = 200) -> Profile:
    """Analyse what routers did.

    Args:
        probe: the model over the text.
        other: another model over the same text, such as a later checkpoint.
        shuffles: of the baseline of the information between expert and domain.

    Raises:
        LoadError: the other model has other layers or experts, or saw another text.
    """
    if other is not None:
        _refuse_other(probe, other)
    meta = probe.record.meta
    return Profile(
        summary=summarise(probe.record, probe.record.windows),
        verdicts=tuple(verdicts(probe.record)),
        domains=meta.domains[:-1],
        loads=tuple(_loads(probe, place) for place in range(len(meta.layers))),
        layers=tuple(_layer(probe, other, place, shuffles) for place in range(len(meta.layers))),
    )


def _layer(probe: Probe, other: Probe | None, place: int, shuffles: int) -> LayerProfile:
    record = probe.record
    choices = record.meta.experts[place] + record.meta.zero_experts
    named = len(record.meta.domains) - 1
    experts_NK = record.paths.experts[:, place]
    labelled_B = probe.domains_B < named
    several = len(np.unique(probe.domains_B[labelled_B])) > 1
    counts_BE = probe.counts_BLE[labelled_B, place, :choices]
    pairs = coactivation(experts_NK, choices) if (experts_NK >= 0).sum(axis=1).max(initial=0) > 1 else None
    return LayerProfile(
        layer=record.meta.layers[place],
        information=domain_information(counts_BE, probe.domains_B[labelled_B], named, shuffles) if several else None,
        domain_shares=_rows(shares(record.windows["domain_counts"][0, place, :named, :choices])),
        coactivation=None if pairs is None else _rows(pairs.lift_EE),
        strongest=() if pairs is None else pairs.strongest(STRONGEST),
        preferred=tuple(preferred_tokens(record.paths.token, experts_NK, choices)),
        stability=(
            None if other is None else Stability(*agreement(experts_NK, other.record.paths.experts[:, place], choices))
        ),
    )


def _loads(probe: Probe, place: int) -> tuple[float, ...]:
    experts = probe.record.meta.experts[place]
    counts_E = probe.record.windows["counts"][0, place, : experts + probe.record.meta.zero_experts]
    fair = counts_E[:experts].mean()
    return tuple((counts_E / fair if fair > 0 else np.zeros(len(counts_E))).tolist())


def _rows(table: Array) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in table.tolist())


def _refuse_other(probe: Probe, other: Probe) -> None:
    ours, theirs = probe.record.meta, other.record.meta
    for name in ("layers", "experts", "zero_experts", "top_k"):
        if getattr(ours, name) != getattr(theirs, name):
            raise LoadError(
                f"the {name} of the two checkpoints are {getattr(ours, name)} and {getattr(theirs, name)}; routing can "
                "be compared between checkpoints of one architecture."
            )
    if not np.array_equal(probe.record.paths.token, other.record.paths.token):
        raise LoadError("the two checkpoints saw different tokens; run both over one text.")
