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
    left_out: list[str] = []
    if not learners:
        views = [_view(run, profile)]
    else:
        views, left_out = _views([path.parent.parent for path in learners], profile)
        left_out += [path.name for path in run.glob("learner-*") if not (path / "expert_load").is_dir()]
    return {
        "name": run.resolve().name,
        "learners": views,
        "left_out": sorted(left_out),
        "staleness": staleness_of(run / "events.jsonl"),
        "no_domain": NO_DOMAIN,
    }


def _views(folders: list[Path], profile: dict[str, Any] | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Of the learners whose record holds a step, and the names of the others."""
    found, empty = [], []
    for folder in folders:
        record = read_load(folder)
        if record.meta.layers and len(record.windows) == 0:
            empty.append(folder.name)
        else:
            found.append(_view(folder, profile))
    if not found:
        # Says when there will be a step.
        refuse_empty(read_load(folders[0]))
    return found, empty


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
        "choices": [_choices(record, place) for place in range(len(record.meta.layers))],
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
        loads = [_loads(counts_LE[layer], record, layer) for layer in range(len(record.meta.layers))]
        found.append(
            {
                "first": int(pieces["first_step"][place]),
                "last": int(pieces["last_step"][place]),
                "loads": [_rounded(row) for row in loads],
                "max_over_mean": [
                    float(row[:experts].max(initial=0.0))
                    for row, experts in zip(loads, record.meta.experts, strict=True)
                ],
                "violation": (pieces["violation"][place] / max(int(pieces["steps"][place]), 1)).tolist(),
                "drop_rate": (dropped_LE.sum(axis=-1) / np.maximum(counts_LE.sum(axis=-1), 1)).tolist(),
            }
        )
    return found


def _choices(record: LoadRecord, layer: int) -> int:
    """What the router of a layer chooses from: experts, then zero experts."""
    return record.meta.experts[layer] + record.meta.zero_experts


def _loads(counts_E: Array, record: LoadRecord, layer: int) -> Array:
    """Over the fair share of an expert; zero experts over the same share."""
    fair = counts_E[: record.meta.experts[layer]].mean()
    loads: Array = counts_E[: _choices(record, layer)] / fair if fair > 0 else np.zeros(_choices(record, layer))
    return loads


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
    for place in range(len(record.meta.layers)):
        choices = _choices(record, place)
        counts_CE = total["domain_counts"][0, place, : len(domains), :choices]
        pairs = coactivation(record.paths.experts[:, place], choices)
        layers.append(
            {
                "layer": record.meta.layers[place],
                "domain_shares": _table(shares(counts_CE)),
                "information": {"bits": mutual_information(counts_CE)} if len(domains) > 1 else None,
                "preferred": None,
                "one_expert": record.meta.top_k[place] == 1,
                "coactivation": _table(pairs.lift_EE) if choices <= MOST_PAIRED and pairs.together_EE.any() else None,
                "strongest": [asdict(pair) for pair in pairs.strongest(STRONGEST)],
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
        domains = list(profile["domains"])
        layers = []
        for place, layer in enumerate(found):
            choices = _choices(record, place)
            share_CE = np.asarray(layer["domain_shares"], dtype=np.float64).reshape(len(domains), -1)
            # An expert that no token took has nothing to tell, which JSON says as null.
            lift = layer["coactivation"]
            lift_EE = None if lift is None else np.asarray(lift, dtype=np.float64)
            if {share_CE.shape[1], choices if lift_EE is None else len(lift_EE), len(layer["preferred"])} != {choices}:
                raise LoadError(
                    f"the profile is of {share_CE.shape[1]} experts in {layer['layer']}, but the run has {choices}; "
                    "give one of a checkpoint of this run."
                )
            layers.append(
                {
                    "layer": layer["layer"],
                    "domain_shares": _table(share_CE),
                    "information": layer["information"],
                    "preferred": layer["preferred"],
                    "one_expert": lift_EE is None,
                    "coactivation": None if lift_EE is None or choices > MOST_PAIRED else _table(lift_EE),
                    "strongest": list(layer["strongest"])[:STRONGEST],
                }
            )
        tokens = sum(profile["tokens"].values())
        return {"of": str(profile["checkpoint"]), "domains": domains, "tokens": tokens, "layers": layers}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LoadError(
            f"the profile cannot be read ({error!r}); give what expert_load profile --json printed."
        ) from error


def _table(values: Array) -> list[list[float]]:
    return [_rounded(row) for row in values]


def _rounded(row: Array) -> list[float]:
    """Three digits behind the point: what a colour can show, in a page that may have a million of them."""
    return [round(float(value), 3) for value in row]
