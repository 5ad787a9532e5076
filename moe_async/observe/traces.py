"""Reads the router traces of other programs: JSON Lines, put together to a record like that of training.

Each line is an object of one of these forms:

* ``{"step": 3, "layer": 0, "experts": [[1, 5], [2, 7]]}``: the experts of each token of a forward pass, [T, K];
  negative where a token took fewer. Beside it may stand ``probs`` or ``logits`` of the router, [T, E], ``tokens``, the
  tokens' ids [T], and ``domain``, a label of the text or one for each token.
* ``{"step": 3, "layer": 0, "counts": [40, 2, 7, 15]}``: assignments to each expert before any drop. Beside it may stand
  ``dropped``, [E], ``tokens``, how many were routed (else: as many as assignments), and ``domain``, one label.
* ``{"routed_experts": [[[1, 5], [0, 3]], ...]}``: the experts of each token in each layer, [T, L, K], as inference
  engines give them for a request. Beside it may stand ``tokens`` [T] and ``domain``.

``step`` is the number of the line among those of its layer where it is left out, and every line may say
``num_experts``; else there are as many experts as the largest id says. A layer is a number or a name.

Shape letters: T tokens, L layers, K experts per token, E experts, C domains.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_async.errors import LoadError
from moe_async.observe.paths import NO_EXPERT, Paths
from moe_async.observe.recorder import HeldLoads, LoadRecorder
from moe_async.observe.store import NO_DOMAIN, LoadMeta, LoadRecord
from moe_async.observe.windows import FIELDS, Array
from moe_async.ops.load import max_violation

_UNKNOWN = ("prob", "entropy", "z", "top", "margin")
"""Figures that need the router's distribution; NaN where a trace does not hold it."""
_LARGEST = 2**53
_FORMS = "'experts' [T][K], 'counts' [E] or 'routed_experts' [T][L][K]"


@dataclass(frozen=True)
class _Pass:
    """What one line says of one layer."""

    where: str
    step: int
    layer: str
    experts_TK: Array | None
    counts_E: Array | None
    dropped_E: Array | None
    logits_TE: Array | None
    probs_TE: Array | None
    tokens_T: Array | None
    tokens: int | None
    domains: tuple[str, ...]
    num_experts: int


def read_traces(path: Path) -> LoadRecord:
    """The record that a file of router traces makes; a window for each step.

    Args:
        path: JSON Lines, see the module.

    Raises:
        LoadError: it cannot be read, or a line says something else.
    """
    passes = list(_passes(path))
    if not passes:
        raise LoadError(f"{path} has no line; each is a JSON object with {_FORMS}.")
    layers = tuple(dict.fromkeys(found.layer for found in passes))
    held = HeldLoads(_meta(passes, layers))
    recorder = LoadRecorder(held)
    by_step: dict[int, list[_Pass]] = {}
    for found in passes:
        by_step.setdefault(found.step, []).append(found)
    for step in sorted(by_step):
        figures, paths = _step(by_step[step], held.meta, step)
        recorder.add(step, figures, None, paths)
    recorder.flush()
    return held.record


def _passes(path: Path) -> Iterator[_Pass]:
    lines: Counter[str] = Counter()
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield from _of_line(_object(text, f"{path}, line {number}"), f"{path}, line {number}", lines)
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}.") from error


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise LoadError(f"{where} is not JSON ({error}).") from error
    if not isinstance(line, dict) or sum(key in line for key in ("experts", "counts", "routed_experts")) != 1:
        raise LoadError(f"{where} must be an object with one of {_FORMS}.")
    return line


def _of_line(line: dict[str, Any], where: str, lines: Counter[str]) -> Iterator[_Pass]:
    if "routed_experts" in line:
        experts_TLK = _array(line, "routed_experts", 3, where)
        for layer in range(experts_TLK.shape[1]):
            yield _of_layer({**line, "layer": layer}, experts_TLK[:, layer], where, lines)
    else:
        yield _of_layer(line, _array(line, "experts", 2, where) if "experts" in line else None, where, lines)


def _of_layer(line: dict[str, Any], experts_TK: Array | None, where: str, lines: Counter[str]) -> _Pass:
    name = line.get("layer", 0)
    if not isinstance(name, int | str) or isinstance(name, bool):
        raise LoadError(f"{where}: 'layer' is {name!r}; it must be a number or a name.")
    layer = f"layer {name}" if isinstance(name, int) else name
    lines[layer] += 1
    single = experts_TK is not None

    def given(key: str, dimensions: int, real: bool = False) -> Array | None:
        return _array(line, key, dimensions, where, real) if line.get(key) is not None else None

    found = _Pass(
        where=where,
        step=_whole(line.get("step", lines[layer]), "step", where),
        layer=layer,
        experts_TK=experts_TK,
        counts_E=None if single else given("counts", 1),
        dropped_E=None if single else given("dropped", 1),
        logits_TE=given("logits", 2, real=True) if single else None,
        probs_TE=given("probs", 2, real=True) if single else None,
        tokens_T=given("tokens", 1) if single else None,
        tokens=_whole(line["tokens"], "tokens", where) if not single and "tokens" in line else None,
        domains=_labels(line.get("domain"), len(experts_TK) if experts_TK is not None else 1, where),
        num_experts=_whole(line.get("num_experts", 0), "num_experts", where),
    )
    _check(found)
    return found


def _array(line: dict[str, Any], key: str, dimensions: int, where: str, real: bool = False) -> Array:
    try:
        value = np.array(line[key])
    except ValueError:
        value = np.array(None)
    kinds = "iuf" if real else "iu"
    if value.size == 0 and dimensions == 1:
        value = value.astype(np.int64)
    if value.ndim != dimensions or value.dtype.kind not in kinds:
        raise LoadError(
            f"{where}: {key!r} must be an array of {dimensions} dimensions with {'' if real else 'whole '}numbers, and "
            "equally long rows."
        )
    return value


def _whole(value: Any, key: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
        raise LoadError(f"{where}: {key!r} is {value!r}; it must be a whole number, 0 or more and below 2^53.")
    return value


def _labels(value: Any, tokens: int, where: str) -> tuple[str, ...]:
    """The label of each token; of a line with counts, the one of all."""
    if value is None:
        return (NO_DOMAIN,) * tokens
    if isinstance(value, str):
        return (value,) * tokens
    if isinstance(value, list) and len(value) == tokens and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise LoadError(f"{where}: 'domain' must be one label, or a list of one for each of {tokens} tokens.")


def _check(found: _Pass) -> None:
    tokens = None if found.experts_TK is None else len(found.experts_TK)
    for key, value in (("logits", found.logits_TE), ("probs", found.probs_TE), ("tokens", found.tokens_T)):
        if value is not None and len(value) != tokens:
            raise LoadError(f"{found.where}: {key!r} is of {len(value)} tokens, the experts are of {tokens}.")
    highest = -1 if found.experts_TK is None else int(found.experts_TK.max(initial=-1))
    given = {"logits": found.logits_TE, "probs": found.probs_TE}
    widths = {key: value.shape[1] for key, value in given.items() if value is not None}
    if found.counts_E is not None:
        widths["counts"] = len(found.counts_E)
    for key, width in widths.items():
        if found.num_experts and width > found.num_experts:
            raise LoadError(f"{found.where}: {key!r} is of {width} experts, but 'num_experts' is {found.num_experts}.")
    for width in (*widths.values(), *([found.num_experts] if found.num_experts else [])):
        if highest >= width:
            raise LoadError(f"{found.where}: expert {highest} was chosen, but there are {width} experts.")
    if found.counts_E is not None:
        dropped = found.dropped_E
        if (found.counts_E < 0).any() or (
            dropped is not None
            and (dropped.shape != found.counts_E.shape or (dropped > found.counts_E).any() or (dropped < 0).any())
        ):
            raise LoadError(
                f"{found.where}: each of 'counts' must be 0 or more, and 'dropped' 0 or more and at most as many."
            )


def _meta(passes: Sequence[_Pass], layers: tuple[str, ...]) -> LoadMeta:
    experts, top_k = dict.fromkeys(layers, 1), dict.fromkeys(layers, 1)
    for found in passes:
        widths = [found.num_experts]
        widths += [value.shape[-1] for value in (found.counts_E, found.logits_TE, found.probs_TE) if value is not None]
        if found.experts_TK is not None:
            widths.append(int(found.experts_TK.max(initial=0)) + 1)
            top_k[found.layer] = max(top_k[found.layer], found.experts_TK.shape[1])
        experts[found.layer] = max(experts[found.layer], *widths)
    labels = dict.fromkeys(label for found in passes for label in found.domains)
    domains = (*(label for label in labels if label != NO_DOMAIN), NO_DOMAIN)
    return LoadMeta(layers, tuple(experts.values()), tuple(top_k.values()), domains=domains)


def _step(passes: Sequence[_Pass], meta: LoadMeta, step: int) -> tuple[dict[str, Array], Paths | None]:
    """Figures of one step, and the paths of its tokens where every layer has equally many."""
    figures = {name: np.zeros(meta.sizes.shape(field)) for name, field in FIELDS.items()}
    for found in passes:
        # All layers see the same tokens: those of one layer are the step's.
        _add(figures, found, meta, count_tokens=found.layer == passes[0].layer)
    passes_of = Counter(found.layer for found in passes)
    figures["micro_batches"] = np.array([max(passes_of.values())], dtype=np.float64)
    return figures, _paths(passes, meta, step)


def _add(figures: dict[str, Array], found: _Pass, meta: LoadMeta, *, count_tokens: bool) -> None:
    place = meta.layers.index(found.layer)
    width = meta.sizes.choices
    domains_T = np.array([meta.domains.index(label) for label in found.domains], dtype=np.int64)
    counts_CE = np.zeros((len(meta.domains), width))
    if found.experts_TK is not None:
        kept = found.experts_TK >= 0
        np.add.at(counts_CE, (np.broadcast_to(domains_T[:, None], kept.shape)[kept], found.experts_TK[kept]), 1)
        tokens_T = np.ones(len(found.experts_TK))
    else:
        assert found.counts_E is not None
        counts_CE[domains_T[0], : len(found.counts_E)] = found.counts_E
        tokens_T = np.array([found.counts_E.sum() if found.tokens is None else found.tokens], dtype=np.float64)
        if found.dropped_E is not None:
            figures["dropped"][place, : len(found.dropped_E)] += found.dropped_E
    counts_E = counts_CE.sum(axis=0)
    figures["tokens"][place] += tokens_T.sum()
    if count_tokens:
        np.add.at(figures["domain_tokens"], domains_T, tokens_T)
    figures["counts"][place] += counts_E
    figures["domain_counts"][place] += counts_CE
    violation = float(max_violation(counts_E[: meta.experts[place]]))
    figures["micro_violation"][place] += violation
    figures["micro_violation_peak"][place] = max(figures["micro_violation_peak"][place], violation)
    figures["bad_tokens"][place] += _bad_tokens(found)
    for name, value in _distribution(found, width).items():
        figures[name][place] += value


def _bad_tokens(found: _Pass) -> int:
    """Tokens whose logits or probabilities are not finite."""
    given_TE = found.probs_TE if found.logits_TE is None else found.logits_TE
    return 0 if given_TE is None else int((~np.isfinite(given_TE)).any(axis=-1).sum())


def _distribution(found: _Pass, width: int) -> dict[str, Array]:
    """Sums over the router's distribution; NaN where it is not known. ``prob`` is of ``width`` experts."""
    unknown = {name: np.array(np.nan) for name in _UNKNOWN} | {"prob": np.full(width, np.nan)}
    logits_TE, probs_TE = found.logits_TE, found.probs_TE
    if logits_TE is not None:
        largest_T1 = logits_TE.max(axis=-1, keepdims=True)
        sums_T1 = np.exp(logits_TE - largest_T1).sum(axis=-1, keepdims=True)
        unknown["z"] = np.asarray(((np.log(sums_T1) + largest_T1) ** 2).sum())
        if probs_TE is None:
            probs_TE = np.exp(logits_TE - largest_T1) / sums_T1
    if probs_TE is None:
        return unknown
    ordered_TE = np.sort(np.pad(probs_TE, ((0, 0), (1, 0))), axis=-1)
    known = {
        "prob": np.pad(probs_TE.sum(axis=0), (0, width - probs_TE.shape[1])),
        "entropy": np.asarray(-(probs_TE * np.log(np.where(probs_TE > 0, probs_TE, 1.0))).sum()),
        "top": np.asarray(ordered_TE[:, -1].sum()),
        "margin": np.asarray((ordered_TE[:, -1] - ordered_TE[:, -2]).sum()),
    }
    return unknown | known


def _paths(passes: Sequence[_Pass], meta: LoadMeta, step: int) -> Paths | None:
    by_layer: dict[str, list[_Pass]] = {name: [] for name in meta.layers}
    for found in passes:
        by_layer[found.layer].append(found)
    rounds = len(by_layer[meta.layers[0]])
    parts = []
    for turn in range(rounds):
        row = [found[turn] for found in by_layer.values() if len(found) == rounds]
        if len(row) < len(meta.layers) or any(found.experts_TK is None for found in row):
            return None
        tokens = len(row[0].domains)
        if any(len(found.domains) != tokens for found in row):
            return None
        experts_NLK = np.full((tokens, len(row), max(meta.top_k)), NO_EXPERT)
        for place, found in enumerate(row):
            assert found.experts_TK is not None
            experts_NLK[:, place, : found.experts_TK.shape[1]] = np.where(
                found.experts_TK < 0, NO_EXPERT, found.experts_TK
            )
        ids = next((found.tokens_T for found in row if found.tokens_T is not None), np.full(tokens, -1))
        domains = [meta.domains.index(label) for label in row[0].domains]
        parts.append(Paths(np.full(tokens, step), ids, domains, experts_NLK))
    return Paths.joined(parts) if parts else None
