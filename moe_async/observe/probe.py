"""Runs a text through a model and keeps what every router did with every token.

Shape letters: B sequences of the text, S positions, N routed tokens, L MoE layers, K experts per token, E choices of
the router (experts, then zero experts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_async.comm import Group
from moe_async.errors import LoadError
from moe_async.observe.paths import NO_EXPERT, Paths
from moe_async.observe.recorder import HeldLoads, LoadRecorder
from moe_async.observe.routers import Seen, watched_layers
from moe_async.observe.sampler import taken_first
from moe_async.observe.store import LoadMeta, LoadRecord
from moe_async.observe.tally import StepTally
from moe_async.observe.windows import Array, Windows

_SEED = 0


@dataclass(frozen=True)
class LabelledText:
    """Token sequences.

    Attributes:
        tokens_BS: int64.
        live_BS: bool, False where a place only pads.
        domains_B: int64, index of each sequence's domain.
    """

    tokens_BS: Tensor
    live_BS: Tensor
    domains_B: Tensor


@dataclass(frozen=True)
class Probe:
    """What the routers of a model did with a text.

    Attributes:
        record: one window over the whole text, a step of it being a forward pass; paths of all tokens in the order of
            the text. Nothing swings or drifts in it, because a model that is not trained is one model.
        counts_BLE: assignments before any drop of each sequence.
        domains_B: index of each sequence's domain.
    """

    record: LoadRecord
    counts_BLE: Array
    domains_B: Array


def probe(
    model: nn.Module,
    meta: LoadMeta,
    text: LabelledText,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Probe:
    """Run a text through a model, on one process that holds all experts.

    Sequences are put together to batches in a seeded random order, so that each batch has all domains as in training;
    experts with a capacity drop by batch.

    Args:
        model: called as ``model(tokens_BS, live_BS or None)``; evaluation mode is set for the time of the call.
        meta: what the axes are; its layers are those of `observe.routers.watched_layers` in their order.
        text: what to run.
        batch_size: sequences in a forward pass.
        progress: told how many sequences are done, of how many.

    Raises:
        LoadError: the model has other MoE layers than ``meta``, or there is no text.
    """
    if not len(text.tokens_BS):
        raise LoadError("there is no text to run the model on; give some that is longer than a token.")
    layers = watched_layers(model)
    if len(layers) != len(meta.layers):
        raise LoadError(f"the model has {len(layers)} MoE layers, but {len(meta.layers)} were expected.")
    seen: list[Seen] = []
    rows = 0
    hooks = [hook for layer in layers for hook in layer.attach(seen.append, lambda: rows)]
    order_B = torch.randperm(len(text.tokens_BS), generator=torch.Generator().manual_seed(_SEED))
    held = HeldLoads(meta)
    recorder = LoadRecorder(held)
    counts_BLE = np.zeros((len(order_B), len(layers), meta.sizes.choices), dtype=np.int64)
    paths: list[tuple[Array, Paths]] = []
    device = next(iter(model.parameters())).device
    was_training = model.training
    try:
        model.eval()
        for number, start in enumerate(range(0, len(order_B), batch_size), 1):
            chosen_B = order_B[start : start + batch_size]
            rows = len(chosen_B)
            seen.clear()
            live_BS = text.live_BS[chosen_B]
            with torch.no_grad():
                model(text.tokens_BS[chosen_B].to(device), None if live_BS.all() else live_BS.to(device))
            _refuse_partial(seen, len(layers))
            for place, one in enumerate(seen):
                loads = one.routing.counts_E.cpu().numpy()
                counts_BLE[chosen_B.numpy(), place, : loads.shape[-1]] = loads
            paths.append((_places(chosen_B, live_BS), _paths(text, chosen_B, seen, number)))
            recorder.add(number, _figures(meta, seen, text.domains_B[chosen_B]))
            if progress is not None:
                progress(start + rows, len(order_B))
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    recorder.flush()
    return Probe(_record(held, paths), counts_BLE, text.domains_B.numpy())


def _refuse_partial(seen: Sequence[Seen], layers: int) -> None:
    if len(seen) != layers:
        raise LoadError(f"{len(seen)} of the {layers} MoE layers were reached by a forward pass; all have to be.")


def _figures(meta: LoadMeta, seen: Sequence[Seen], domains_B: Tensor) -> dict[str, Array]:
    tally = StepTally(meta, seen[0].routing.counts_E.device)
    tally.add([one.routing for one in seen], domains_B)
    return tally.over_ranks(Group())


def _places(chosen_B: Tensor, live_BS: Tensor) -> Array:
    """Where the tokens of a batch stand in the text."""
    positions = live_BS.shape[-1]
    places: Array = (chosen_B[:, None] * positions + torch.arange(positions))[live_BS].numpy()
    return places


def _paths(text: LabelledText, chosen_B: Tensor, seen: Sequence[Seen], step: int) -> Paths:
    live_BS = text.live_BS[chosen_B]
    live_T = live_BS.reshape(-1).numpy()
    selections = [one.selection_TK.cpu().numpy()[live_T] for one in seen]
    # Where experts choose tokens, a token may take more than the router's mean.
    widest = max(int((selection >= 0).sum(axis=1).max(initial=1)) for selection in selections)
    experts = [taken_first(selection, widest) for selection in selections]
    tokens_N = text.tokens_BS[chosen_B][live_BS]
    domains_N = text.domains_B[chosen_B][:, None].expand_as(live_BS)[live_BS]
    return Paths(np.full(len(tokens_N), step), tokens_N, domains_N, np.stack(experts, axis=1))


def _record(held: HeldLoads, parts: Sequence[tuple[Array, Paths]]) -> LoadRecord:
    record = held.record
    whole: dict[str, Any] = dict(record.windows.total().items())
    whole["swing"] = np.zeros_like(whole["swing"])
    order_N = np.argsort(np.concatenate([places for places, _ in parts]), kind="stable")
    widest = max(part.experts.shape[-1] for _, part in parts)
    everything = Paths.joined([_widened(part, widest) for _, part in parts])
    return LoadRecord(record.meta, Windows(whole), Paths(*(value[order_N] for value in everything.arrays().values())))


def _widened(paths: Paths, places: int) -> Paths:
    missing = places - paths.experts.shape[-1]
    experts = np.pad(paths.experts, ((0, 0), (0, 0), (0, missing)), constant_values=NO_EXPERT)
    return Paths(paths.step, paths.token, paths.domain, experts)
