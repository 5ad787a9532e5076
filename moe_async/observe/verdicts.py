"""Known diseases of routing, found in a record: what it shows, and the recipe entry that treats it.

Each finder takes the first and the last tenth of a record, so that a disease that heals in the first steps is none.

Shape letters: E choices of the router (experts, then zero experts), C domains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moe_async.observe.figures import LayerFigures, first_part, last_part, refuse_empty, summarise
from moe_async.observe.store import LoadRecord
from moe_async.observe.windows import Array, Windows
from moe_async.ops.load import effective_experts, relative_loads

COLLAPSED = 0.35
"""A layer has collapsed when, of the experts that it could use beyond a token's top k, it uses less than this part."""
OSCILLATING = 0.3
"""A bias oscillates when an expert's load swings across the mean at more than this part of the steps."""
OWNED, COMMON = 0.9, 0.6
"""A domain owns an expert when this part of its assignments is of that domain, though it has at most the second of the
tokens."""
SATURATED = 0.98
"""A router is saturated when the largest probability, on average, is more than this: almost no gradient reaches it."""
LARGE_LOGITS = 50.0
"""A router is saturated when the root mean square of the logsumexp of its logits is larger: its softmax is a step."""
ENOUGH = 50
"""Assignments of an expert's fair share below which nothing is said of single experts."""
ENOUGH_IN_LAYER = 8
"""Assignments of a layer for each of its experts below which nothing is said of the layer: so few cannot be even."""
ENOUGH_IN_STEP = 16
"""Assignments of an expert's fair share in one step below which loads swing by chance."""

_BALANCE = "Add {loss: switch, coefficient: 0.01} to moe.balance or raise its coefficient"


@dataclass(frozen=True)
class Verdict:
    """A disease that a record shows.

    Attributes:
        disease: collapse, dying experts, oscillating bias, owned expert or router saturation.
        layer: where.
        experts: that have it; empty where it is one of the whole layer.
        evidence: the figures that show it.
        treatment: the recipe entry that treats it.
    """

    disease: str
    layer: str
    experts: tuple[int, ...]
    evidence: str
    treatment: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.layer}: {self.disease}: {self.evidence}. {self.treatment}"


@dataclass(frozen=True)
class _Layer:
    """One layer at the beginning and at the end of a record."""

    record: LoadRecord
    place: int
    figures: LayerFigures
    first: Windows
    last: Windows

    def loads(self, part: Windows) -> Array:
        """Assignments to each expert, zero experts apart, [experts]."""
        counts: Array = part["counts"][0, self.place, : self.figures.experts]
        return counts

    @property
    def changes(self) -> bool:
        """Whether the record has a beginning and an end; one window has not."""
        return bool(self.first["last_step"][0] < self.last["last_step"][0])

    @property
    def balanced_by(self) -> str:
        """What keeps the experts even now, in words."""
        terms = self.record.meta.balanced_by
        return f"The run has {'; '.join(terms)}." if terms else "The run has nothing that keeps experts even."


def verdicts(record: LoadRecord) -> list[Verdict]:
    """The diseases that a record shows, in the order of its layers; none for a healthy run.

    Raises:
        LoadError: the record has no layer or no step.
    """
    refuse_empty(record)
    first, last = first_part(record.windows).total(), last_part(record.windows).total()
    found: list[Verdict] = []
    for place, figures in enumerate(summarise(record).layers):
        layer = _Layer(record, place, figures, first, last)
        found += [verdict for find in _FINDERS if (verdict := find(layer)) is not None]
    return found


def _collapse(layer: _Layer) -> Verdict | None:
    now, before = layer.figures.effective_experts, float(effective_experts(layer.loads(layer.first)))
    if not _has_collapsed(layer):
        return None
    loads_E = layer.loads(layer.last)
    busiest = int(loads_E.argmax())
    start = f" (at the start {before:.1f})" if layer.changes else ""
    return Verdict(
        "collapse",
        layer.figures.layer,
        (busiest,),
        f"{now:.1f} effective experts of {layer.figures.experts}{start}; expert {busiest} has "
        f"{loads_E[busiest] / loads_E.sum():.0%} of the assignments, {len(layer.figures.dead)} experts have none",
        f"{_BALANCE}, or use moe.router: {{kind: sigmoid_bias}}. {layer.balanced_by}",
    )


def _has_collapsed(layer: _Layer) -> bool:
    experts, top_k = layer.figures.experts, min(layer.record.meta.top_k[layer.place], layer.figures.experts)
    used = layer.figures.effective_experts
    enough = layer.loads(layer.last).mean() >= ENOUGH_IN_LAYER
    return enough and experts > top_k and used > 0 and (used - top_k) / (experts - top_k) < COLLAPSED


def _dying(layer: _Layer) -> Verdict | None:
    loads_E, before_E = layer.loads(layer.last), relative_loads(layer.loads(layer.first))
    if _has_collapsed(layer) or loads_E.mean() < ENOUGH:
        return None
    relative_E = relative_loads(loads_E)
    experts = tuple(sorted(layer.figures.dead + layer.figures.starved))
    if not experts:
        return None
    changes = [f"{before_E[expert]:.2f} -> " if layer.changes else "" for expert in experts]
    shown = ", ".join(
        f"expert {expert} {change}{relative_E[expert]:.2f}"
        for expert, change in zip(experts[:4], changes, strict=False)
    )
    more = f" and {len(experts) - 4} more" if len(experts) > 4 else ""
    period = " from the first to the last tenth of the steps" if layer.changes else ""
    return Verdict(
        "dying experts",
        layer.figures.layer,
        experts,
        f"load over fair share{period}: {shown}{more}",
        f"{_BALANCE}; with small micro-batches give it scope: step. {layer.balanced_by}",
    )


def _oscillating(layer: _Layer) -> Verdict | None:
    experts, place = layer.figures.experts, layer.place
    bias_E = layer.last["bias"][0, place, :experts]
    steps = layer.last["steps"][0]
    if not bias_E.any() or layer.loads(layer.last).mean() < ENOUGH_IN_STEP * steps or steps < 4:
        return None
    swings_E = layer.last["swing"][0, place, :experts] / steps
    ill = np.flatnonzero(swings_E > OSCILLATING)
    if not len(ill):
        return None
    worst = int(swings_E.argmax())
    return Verdict(
        "oscillating bias",
        layer.figures.layer,
        tuple(int(expert) for expert in ill),
        f"the load of expert {worst} swung across the mean by more than a fair share at {swings_E[worst]:.0%} of the "
        f"last {steps} steps; biases lie between {bias_E.min():.3g} and {bias_E.max():.3g}",
        f"Lower moe.router.update.rate, tenfold to begin with, or use moe.router.update.rule: pid. {layer.balanced_by}",
    )


def _owned(layer: _Layer) -> Verdict | None:
    experts, meta = layer.figures.experts, layer.record.meta
    named = len(meta.domains) - 1
    tokens_C = layer.last["domain_tokens"][0, :named]
    if named < 2 or np.count_nonzero(tokens_C) < 2:
        return None
    counts_CE = layer.last["domain_counts"][0, layer.place, :, :experts]
    assigned_E = counts_CE.sum(axis=0)
    fair = assigned_E.mean()
    share_C = tokens_C / tokens_C.sum()
    owned = []
    for expert in np.flatnonzero((assigned_E >= ENOUGH) & (assigned_E >= fair / 4)):
        domain = int(counts_CE[:named, expert].argmax())
        part = counts_CE[domain, expert] / assigned_E[expert]
        if part >= OWNED and share_C[domain] <= COMMON:
            owned.append((int(expert), domain, float(part)))
    if not owned:
        return None
    shown = "; ".join(
        f"{part:.0%} of what expert {expert} gets is {meta.domains[domain]}, "
        f"which is {share_C[domain]:.0%} of the tokens"
        for expert, domain, part in owned[:4]
    )
    more = f"; and {len(owned) - 4} more" if len(owned) > 4 else ""
    return Verdict(
        "owned expert",
        layer.figures.layer,
        tuple(expert for expert, _, _ in owned),
        shown + more,
        "Balance each sequence: {loss: sequence, coefficient: 0.001} in moe.balance; where the domain fills whole "
        f"micro-batches, mix the text (data.source). {layer.balanced_by}",
    )


def _saturated(layer: _Layer) -> Verdict | None:
    figures = layer.figures
    # Both are NaN where a token's logits were not finite, which is another ill than saturation.
    if figures.experts < 2 or not (figures.confidence > SATURATED or figures.logit_size > LARGE_LOGITS):
        return None
    return Verdict(
        "router saturation",
        figures.layer,
        (),
        f"the largest router probability is {figures.confidence:.3f} on average, its lead {figures.margin:.3f}, and "
        f"the root mean square of the logits' logsumexp is {figures.logit_size:.1f}",
        "Add {loss: z, coefficient: 0.001} to moe.balance or raise its coefficient, or lower optim.router.lr_scale. "
        f"{layer.balanced_by}",
    )


_FINDERS: tuple[Callable[[_Layer], Verdict | None], ...] = (_collapse, _dying, _oscillating, _owned, _saturated)
