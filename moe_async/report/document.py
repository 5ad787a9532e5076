"""What a report says of a run, as JSON-able values: the page only shows it.

Shape letters: P pieces of the run, L MoE layers, E experts, C domains, R ranks.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from moe_async.errors import LoadError
from moe_async.observe.figures import refuse_empty, segments, shares, summarise
from moe_async.observe.specialise import coactivation, mutual_information
from moe_async.observe.store import NO_DOMAIN, LoadRecord, read_load
from moe_async.observe.verdicts import verdicts
from moe_async.observe.windows import Array, Windows
from moe_async.ops.load import relative_loads
from moe_async.recipe import Recipe, load_recipe
from moe_async.report.history import balance_losses, rank_cost, read_metrics
from moe_async.report.staleness import staleness_of
from moe_async.report.structure import flows, structure

PIECES = 60
"""Pieces of a run that the slider has, at most."""
MOST_PAIRED = 64
"""Experts of a layer up to which all pairs are shown; of larger layers the strongest pairs are."""
STRONGEST = 40


def report_document(run: Path, profile: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything that is shown of a run.

    Args:
        run: its folder, with one learner or several; or a folder that `moe_async.record_load` wrote.
        profile: what ``expert_load profile --json`` printed of a checkpoint of it, for specialisation over all tokens.

    Raises:
        LoadError: there is no record of loads, or nothing in it; or the profile is of other layers.
    """
    learners = sorted(run.glob("learner-*/expert_load/meta.json"), key=lambda path: _number(path.parent.parent.name))
    folders = [path.parent.parent for path in learners] or [run]
    views = [_view(folder, profile) for folder in folders]
    return {
        "name": run.resolve().name,
        "learners": views,
        "staleness": staleness_of(run / "events.jsonl"),
        "no_domain": NO_DOMAIN,
    }


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def _view(folder: Path, profile: dict[str, Any] | None) -> dict[str, Any]:
    record = read_load(folder)
    refuse_empty(record)
    recipe = _recipe(folder)
    metrics = read_metrics(folder / "metrics.jsonl")
    pieces = segments(record.windows, PIECES)
    figures = summarise(record)
    document = {
        "name": folder.resolve().name,
        "summary": asdict(figures),
        "verdicts": [asdict(verdict) | {"line": str(verdict)} for verdict in verdicts(record)],
        "layers": list(record.meta.layers),
        "experts": list(record.meta.experts),
        "pieces": _pieces(record, pieces),
        "ranks": [list(experts) for experts in record.meta.rank_experts],
        "rank_loads": _rank_loads(record, pieces),
        "rank_cost": rank_cost(recipe, figures, metrics),
        "specialisation": _specialisation(record, profile),
        "structure": structure(recipe, record.meta),
        "flows": flows(record),
        "sampled_tokens": len(record.paths),
        "losses": balance_losses(metrics),
    }
    return document


def _recipe(folder: Path) -> Recipe | None:
    path = folder / "recipe.yaml"
    return load_recipe(path) if path.is_file() else None


def _pieces(record: LoadRecord, pieces: Windows) -> list[dict[str, Any]]:
    """Loads over the fair share of each layer, and what was dropped, by piece."""
    found = []
    for place in range(len(pieces)):
        counts_LE, dropped_LE = pieces["counts"][place], pieces["dropped"][place]
        loads = [relative_loads(counts_LE[layer, :experts]) for layer, experts in enumerate(record.meta.experts)]
        found.append(
            {
                "first": int(pieces["first_step"][place]),
                "last": int(pieces["last_step"][place]),
                "loads": [_rounded(row) for row in loads],
                "max_over_mean": [float(row.max(initial=0.0)) for row in loads],
                "violation": (pieces["violation"][place] / max(int(pieces["steps"][place]), 1)).tolist(),
                "drop_rate": (dropped_LE.sum(axis=-1) / np.maximum(counts_LE.sum(axis=-1), 1)).tolist(),
            }
        )
    return found


def _rank_loads(record: LoadRecord, pieces: Windows) -> dict[str, Any] | None:
    """Loads of ranks over their mean, by piece and layer; None where it is not known which rank holds what."""
    if len(record.meta.rank_experts) < 2 or not pieces["rank_load"].any():
        return None
    steps_P1 = np.maximum(pieces["steps"], 1)[:, None]
    return {
        "by_piece": [[_rounded(relative_loads(row)) for row in piece] for piece in pieces["rank_load"]],
        "step_imbalance": (pieces["rank_violation"] / steps_P1 + 1.0).tolist(),
    }


def _specialisation(record: LoadRecord, profile: dict[str, Any] | None) -> dict[str, Any]:
    """By layer, from a profile of a checkpoint where there is one, else from the training record."""
    if profile is not None:
        return _from_profile(record, profile)
    domains = record.meta.domains[:-1]
    total = record.windows.total()
    layers = []
    for place, experts in enumerate(record.meta.experts):
        counts_CE = total["domain_counts"][0, place, : len(domains), :experts]
        together = coactivation(record.paths.experts[:, place], experts) if record.meta.top_k[place] > 1 else None
        layers.append(
            {
                "layer": record.meta.layers[place],
                "domain_shares": [_rounded(row) for row in shares(counts_CE)],
                "information": {"bits": mutual_information(counts_CE)} if len(domains) > 1 else None,
                "preferred": None,
                **_pairs(together),
            }
        )
    return {"of": "training", "domains": list(domains), "tokens": len(record.paths), "layers": layers}


def _from_profile(record: LoadRecord, profile: dict[str, Any]) -> dict[str, Any]:
    try:
        found = profile["specialisation"]
        names = [layer["layer"] for layer in found]
        if names != list(record.meta.layers):
            raise LoadError(
                f"the profile is of the layers {', '.join(names)}, but the run has {', '.join(record.meta.layers)}; "
                "give one of a checkpoint of this run."
            )
        layers = [
            {
                "layer": layer["layer"],
                "domain_shares": [_rounded(np.asarray(row)) for row in layer["domain_shares"]],
                "information": layer["information"],
                "preferred": layer["preferred"],
                **_pairs(None if layer["coactivation"] is None else np.asarray(layer["coactivation"])),
            }
            for layer in found
        ]
        tokens = sum(profile["tokens"].values())
        return {"of": profile["checkpoint"], "domains": profile["domains"], "tokens": tokens, "layers": layers}
    except (KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f"the profile cannot be read ({error!r}); give what expert_load profile --json printed."
        ) from error


def _pairs(together_EE: Array | None) -> dict[str, Any]:
    """All pairs of few experts, the strongest of many."""
    if together_EE is None:
        return {"coactivation": None, "strongest": []}
    upper = np.triu(together_EE, 1)
    places = np.argsort(-upper, axis=None, kind="stable")[:STRONGEST]
    first, second = np.unravel_index(places, upper.shape)
    strongest = [
        [int(one), int(other), round(float(upper[one, other]), 3)]
        for one, other in zip(first, second, strict=True)
        if upper[one, other] > 0
    ]
    few = len(together_EE) <= MOST_PAIRED
    return {"coactivation": [_rounded(row) for row in together_EE] if few else None, "strongest": strongest}


def _rounded(row: Array) -> list[float]:
    """Three digits behind the point: what a colour can show, in a page that may have a million of them."""
    return [round(float(value), 3) for value in row]
