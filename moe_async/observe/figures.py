"""What a record says about each layer over some of its steps.

Shape letters: W windows, L MoE layers, E choices of the router (experts, then zero experts), R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_async.errors import LoadError
from moe_async.observe.recorder import FLUSH_WINDOWS
from moe_async.observe.store import LoadRecord
from moe_async.observe.windows import FIELDS, Array, Windows
from moe_async.ops.load import effective_experts, load_entropy, max_violation, relative_loads, variation

STARVED = 0.1
"""An expert with less than this part of a fair share is starved."""
_SEGMENTS = 10
"""Pieces of a stretch of steps between which drift is measured, at most."""


@dataclass(frozen=True)
class LayerFigures:
    """One layer over a stretch of steps. Loads are assignments before any drop; zero experts are not among the experts.

    Attributes:
        layer: its name.
        experts: how many it has.
        tokens: routed.
        max_over_mean: load of the busiest expert over the mean load; 1 is even.
        cv: coefficient of variation of the loads; 0 is even.
        violation: MaxVio of a step's loads over all ranks, mean over steps (Wang et al. 2024, arXiv 2408.15664).
        violation_peak: the largest of a step.
        micro_violation: MaxVio of a micro-batch on its rank, mean over micro-batches.
        micro_violation_peak: the largest of a micro-batch.
        entropy: of the loads in nats; ln(experts) is even.
        effective_experts: exp(entropy), equally loaded experts with the same entropy.
        dead: experts without any assignment.
        starved: experts with some, but less than `STARVED` of a fair share.
        drop_rate: share of the assignments that were dropped.
        zero_rate: share of the assignments that went to zero experts.
        router_entropy: of the router distribution in nats, mean over tokens.
        confidence: largest router probability, mean over tokens.
        margin: gap between the two largest router probabilities, mean over tokens.
        logit_size: root of the mean squared logsumexp of the router logits, whose square the z-loss keeps small.
        drift: half the sum of the changes of load shares from one piece of the stretch to the next, mean over up to ten
            pieces; 0 is steady, 1 is that all loads went to other experts. None with fewer than two windows.
        rank_imbalance: load of the busiest rank over the mean rank load, over the stretch; None where it is not known.
        step_imbalance: the same of each step, mean over steps: ranks wait for the busiest at every step.
        bad_tokens: tokens whose router logits were not finite.
    """

    layer: str
    experts: int
    tokens: int
    max_over_mean: float
    cv: float
    violation: float
    violation_peak: float
    micro_violation: float
    micro_violation_peak: float
    entropy: float
    effective_experts: float
    dead: tuple[int, ...]
    starved: tuple[int, ...]
    drop_rate: float
    zero_rate: float
    router_entropy: float
    confidence: float
    margin: float
    logit_size: float
    drift: float | None
    rank_imbalance: float | None
    step_imbalance: float | None
    bad_tokens: int


@dataclass(frozen=True)
class LoadSummary:
    """A record over a stretch of steps.

    Attributes:
        first_step: of the stretch.
        last_step: of the stretch.
        steps: recorded in it.
        recorded: first and last step of the whole record.
        layers: in the order of the model.
    """

    first_step: int
    last_step: int
    steps: int
    recorded: tuple[int, int]
    layers: tuple[LayerFigures, ...]

    def worst_first(self) -> list[LayerFigures]:
        """The layers, the one with the most uneven loads first."""
        return sorted(self.layers, key=lambda layer: -layer.max_over_mean)


def last_part(windows: Windows, part: float = 0.1) -> Windows:
    """The windows that begin in the last part of the steps; the last window in any case."""
    first, last = windows["first_step"], windows["last_step"]
    begin = last[-1] - part * (last[-1] - first[0] + 1)
    keep = first > begin
    keep[-1] = True
    return windows.chosen(keep)


def first_part(windows: Windows, part: float = 0.1) -> Windows:
    """The windows that end in the first part of the steps; the first window in any case."""
    first, last = windows["first_step"], windows["last_step"]
    keep = last < first[0] + part * (last[-1] - first[0] + 1)
    keep[0] = True
    return windows.chosen(keep)


def between(windows: Windows, first: int, last: int) -> Windows:
    """The windows that lie wholly within these steps.

    Raises:
        LoadError: there is none.
    """
    chosen = windows.chosen((windows["first_step"] >= first) & (windows["last_step"] <= last))
    if not len(chosen):
        longest = int((windows["last_step"] - windows["first_step"]).max(initial=0)) + 1
        raise LoadError(
            f"no window of the record lies within steps {first} to {last}; it holds steps "
            f"{windows['first_step'][0]} to {windows['last_step'][-1]} in windows of up to {longest} steps. Give "
            "steps that hold a whole window."
        )
    return chosen


def summarise(record: LoadRecord, windows: Windows | None = None) -> LoadSummary:
    """Figures of every layer.

    Args:
        record: as `read_load` gives it.
        windows: the stretch of steps, some of the record's windows; None: its last tenth, as in the table that training
            ends with.

    Raises:
        LoadError: the record has no layer or no step.
    """
    refuse_empty(record)
    stretch = last_part(record.windows) if windows is None else windows
    total = stretch.total()
    pieces = segments(stretch)
    return LoadSummary(
        first_step=int(total["first_step"][0]),
        last_step=int(total["last_step"][0]),
        steps=int(total["steps"][0]),
        recorded=(int(record.windows["first_step"][0]), int(record.windows["last_step"][-1])),
        layers=tuple(_layer(record, total, pieces, place) for place in range(len(record.meta.layers))),
    )


def refuse_empty(record: LoadRecord) -> None:
    """Raises LoadError when there is nothing to say about a record."""
    if not record.meta.layers:
        raise LoadError("the record is of a model without experts; there are no loads to show.")
    if not len(record.windows) or not record.windows["tokens"].any():
        raise LoadError(
            f"the record holds no step yet; a run writes every {FLUSH_WINDOWS} windows, at checkpoints and at its end. "
            "Try again then."
        )


def segments(windows: Windows, most: int = _SEGMENTS) -> Windows:
    """The windows put together to pieces of about equally many steps, at most ``most``."""
    steps = int(windows["steps"].sum())
    return windows.packed(max(-(-steps // most), int(windows["steps"].max(initial=1))))


def shares(counts: Array) -> Array:
    """Loads as parts of their sum, [..., E]; zeros where nothing was routed."""
    total = counts.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(counts, total, out=np.zeros(counts.shape), where=total > 0))


def _layer(record: LoadRecord, total: Windows, pieces: Windows, place: int) -> LayerFigures:
    experts = record.meta.experts[place]
    value = {name: total[name][0, place] for name, field in FIELDS.items() if field.shape.startswith("L")}
    counts_E, all_E = value["counts"][:experts], value["counts"]
    tokens, assigned, steps = (
        _at_least_one(value["tokens"]),
        _at_least_one(all_E.sum()),
        _at_least_one(total["steps"][0]),
    )
    relative_E = relative_loads(counts_E)
    dead_E = counts_E == 0
    ranks = len(record.meta.rank_experts) > 1 and value["rank_load"].any()
    return LayerFigures(
        layer=record.meta.layers[place],
        experts=experts,
        tokens=int(value["tokens"]),
        max_over_mean=float(relative_E.max(initial=0.0)),
        cv=float(variation(counts_E)),
        violation=float(value["violation"] / steps),
        violation_peak=float(value["violation_peak"]),
        micro_violation=float(value["micro_violation"] / _at_least_one(total["micro_batches"][0])),
        micro_violation_peak=float(value["micro_violation_peak"]),
        entropy=float(load_entropy(counts_E)),
        effective_experts=float(effective_experts(counts_E)),
        dead=_places(dead_E),
        starved=_places(~dead_E & (relative_E < STARVED)),
        drop_rate=float(value["dropped"].sum() / assigned),
        zero_rate=float(all_E[experts:].sum() / assigned),
        router_entropy=float(value["entropy"] / tokens),
        confidence=float(value["top"] / tokens),
        margin=float(value["margin"] / tokens),
        logit_size=float(np.sqrt(value["z"] / tokens)),
        drift=_drift(pieces["counts"][:, place, :experts]),
        rank_imbalance=float(max_violation(value["rank_load"]) + 1.0) if ranks else None,
        step_imbalance=float(value["rank_violation"] / steps + 1.0) if ranks else None,
        bad_tokens=int(value["bad_tokens"]),
    )


def _at_least_one(number: Any) -> float:
    return max(float(number), 1.0)


def _places(keep_E: Array) -> tuple[int, ...]:
    return tuple(int(expert) for expert in np.flatnonzero(keep_E))


def _drift(counts_WE: Array) -> float | None:
    if len(counts_WE) < 2:
        return None
    return float(np.abs(np.diff(shares(counts_WE), axis=0)).sum(axis=-1).mean() / 2)
