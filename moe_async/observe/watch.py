"""Records the loads of experts in anyone's own loop, through hooks on the model's forward passes.

Shape letters: L MoE layers, E choices of the router, K experts per token, T tokens of a forward pass, N sampled tokens,
B sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_async.comm import Group, running_group
from moe_async.errors import LoadError
from moe_async.observe.paths import Paths
from moe_async.observe.recorder import LoadRecorder
from moe_async.observe.routers import Handle, Seen, Watched, watched_layers
from moe_async.observe.sampler import SAMPLED_TOKENS, spread_places, taken_first
from moe_async.observe.store import NO_DOMAIN, LoadMeta, LoadStore, read_load
from moe_async.observe.tally import StepFigures, StepTally
from moe_async.observe.windows import Array
from moe_async.ops.sums import RoutingSums

_LOG = logging.getLogger(__name__)


def record_load(
    model: nn.Module,
    path: str | Path,
    *,
    every: int = 1,
    accumulation: int = 1,
    evaluation: bool = False,
    domains: Sequence[str] = (),
    step: int = 0,
    across_ranks: bool = True,
    sampled_tokens: int = SAMPLED_TOKENS,
) -> LoadWatch:
    """Record the loads of a model's experts while a ``with`` block runs::

        with moe_async.record_load(model, "loads"):
            for batch in batches:
                loss = model(batch).loss
                ...

    `tools/expert_load.py` and `moe_async.observe` read what is written. Known layers are those of
    `observe.routers.watched_layers`: of this package, of DeepSpeed and of transformers. Forward passes of ``model``
    itself are counted, those within it once, also when they are computed again for the backward pass. Sums are taken
    where the model computes; each recorded step waits for the device once.

    Args:
        model: what the loop calls; a wrapper such as a DeepSpeed engine, or the model within it.
        path: a folder for the record.
        every: steps from one that is recorded to the next.
        accumulation: forward passes of one step.
        evaluation: whether passes in evaluation mode are recorded too; else only those in training mode are.
        domains: labels of text that `LoadWatch.label` may give.
        step: steps that were done before; a loop that was resumed goes on behind them in the same folder.
        across_ranks: whether to sum over all ranks of a running process group, the first of which writes. Every rank
            then calls its model equally often. With False, each rank that records needs a folder of its own.
        sampled_tokens: of a forward pass of the first rank, whose experts are kept one by one.

    Raises:
        LoadError: the model has no layer that is known, the folder holds steps after ``step``, or a value is none.
    """
    for name, value in (("every", every), ("accumulation", accumulation)):
        if value < 1:
            raise LoadError(f"record_load was given {name}={value}; it must be 1 or more.")
    if NO_DOMAIN in domains or len(set(domains)) != len(domains):
        raise LoadError(f"domains are {tuple(domains)}; each must be there once, and {NO_DOMAIN!r} is taken.")
    group = running_group() if across_ranks else Group()
    return LoadWatch(model, Path(path), every, accumulation, evaluation, tuple(domains), step, group, sampled_tokens)


class LoadWatch:
    """What `record_load` gives: a context manager that records while its block runs."""

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        every: int,
        accumulation: int,
        evaluation: bool,
        domains: tuple[str, ...],
        step: int,
        group: Group,
        sampled_tokens: int,
    ) -> None:
        self._model, self._folder, self._group = model, folder, group
        self._every, self._accumulation, self._evaluation = every, accumulation, evaluation
        self._domains, self._sampled_tokens = domains, sampled_tokens
        self._layers: list[Watched] = []
        self._labels: tuple[int, ...] = (len(domains),)
        self._step, self._passes, self._turn = step, 0, 0
        self._inside = self._recording = False
        self._seen: dict[int, list[Seen]] = {}
        self._token_ids: Tensor | None = None
        self._device = torch.device("cpu")
        self._used: list[int] = []
        self._held: tuple[tuple[int, ...], ...] = ()
        self._meta: LoadMeta | None = None
        self._tally: StepTally | None = None
        self._paths: Paths | None = None
        self._recorder: LoadRecorder | None = None
        self._finished: tuple[int, StepFigures, Paths | None] | None = None
        self._hooks: list[Handle] = []
        self._skipped = False
        problem = ""
        try:
            self._layers = watched_layers(model)
        except LoadError as error:
            problem = str(error)
        if not problem and group.index == 0:
            problem = _earlier_record(folder, step)
        self._agree(problem)

    def label(self, domains: str | Sequence[str] | None) -> None:
        """Say of which domain the text of the next forward passes is, until told otherwise.

        Args:
            domains: one label for whole passes, or one for each sequence of a pass; None: no label.

        Raises:
            LoadError: a label was not declared, or a layer tells of whole passes alone.
        """
        if domains is None:
            self._labels = (len(self._domains),)
            return
        names = (domains,) if isinstance(domains, str) else tuple(domains)
        for name in names:
            if name not in self._domains:
                raise LoadError(f"{name!r} is not among the domains {self._domains}; give them all to record_load.")
        whole = [layer.name for layer in self._layers if layer.whole_passes]
        if len(set(names)) > 1 and whole:
            raise LoadError(
                f"the forward pass has sequences of {', '.join(sorted(set(names)))}, but {whole[0]} tells its counts "
                "for whole passes alone; give each pass text of one domain, or no label."
            )
        indices = tuple(self._domains.index(name) for name in names)
        self._labels = indices[:1] if whole else indices

    def __enter__(self) -> LoadWatch:
        """Attach to the model."""
        wanted = lambda: len(self._labels) if self._recording else 0  # noqa: E731
        for place, layer in enumerate(self._layers):
            self._hooks += layer.attach(partial(self._report, place), wanted)
        # Layers report within a pass of the whole model; what is computed again for the backward pass is outside one.
        self._hooks.append(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._hooks.append(self._model.register_forward_hook(self._end))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Detach, and write what is left; other ranks may be gone when the block failed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if kind is None and self._tally is not None:
            self._step += 1
            self._sum_over_ranks()
        self._hand_over()
        if self._recorder is not None:
            self._recorder.flush()
        if kind is None and self._meta is None:
            mode = "" if self._evaluation else " in training mode"
            raise LoadError(
                f"no forward pass of {type(self._model).__name__}{mode} was seen, so nothing was recorded; give "
                "record_load the module that the loop calls (evaluation=True records passes in evaluation mode; every="
                f"{self._every} leaves out the steps before that one)."
            )

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._inside = module.training or self._evaluation
        if not self._inside:
            return
        # Biases move after the last pass of a step, so a step is handed over when the next one begins.
        self._hand_over()
        self._recording = (self._step + 1) % self._every == 0
        self._seen = {}
        if self._recording:
            values = (*inputs, *named.values())
            ids = (value for value in values if isinstance(value, Tensor) and value.dtype == torch.int64)
            self._token_ids = next(ids, None)

    def _report(self, place: int, seen: Seen) -> None:
        self._seen.setdefault(place, []).append(seen)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._inside:
            return
        if self._recording:
            self._add_pass()
        self._inside = self._recording = False
        self._passes += 1
        if self._passes == self._accumulation:
            self._passes = 0
            self._step += 1
            self._sum_over_ranks()

    @torch.no_grad()
    def _add_pass(self) -> None:
        if self._meta is None:
            self._open_record()
        assert self._meta is not None
        if self._tally is None:
            # Also where this rank's pass is left out below: other ranks wait for its part of the sums.
            self._tally = StepTally(self._meta, self._device)
            self._turn += 1
        if not set(self._used) <= set(self._seen):
            if not self._skipped:
                missing = [self._layers[place].name for place in self._used if place not in self._seen]
                _LOG.warning("%s had no tokens in a forward pass, which is left out of the record", ", ".join(missing))
            self._skipped = True
            return
        seen = [self._seen[place] for place in self._used]
        routing = [_added([part.routing for part in parts], self._device) for parts in seen]
        if len(self._labels) == 1:
            routing = [RoutingSums(*(value.unsqueeze(0) for value in sums.total())) for sums in routing]
        rows = len(routing[0].counts_E)
        if rows != len(self._labels):
            raise LoadError(
                f"a forward pass had {rows} sequences but {len(self._labels)} labels; give one label for each, or one "
                "for all."
            )
        self._tally.add(routing, torch.tensor(self._labels))
        if self._recorder is not None and self._recorder.at_start and self._paths is None:
            self._paths = self._sample([parts[0].selection_TK for parts in seen])

    def _sample(self, selections: Sequence[Tensor]) -> Paths | None:
        """Experts of a few tokens of the pass; None when the layers did not see the same tokens."""
        assert self._meta is not None
        tokens, top_k = len(selections[0]), max(self._meta.top_k)
        if not tokens or any(len(selection) != tokens for selection in selections):
            return None
        place_N = spread_places(tokens, self._sampled_tokens, self._turn)
        experts = [
            taken_first(selection[place_N.to(selection.device)].cpu().numpy(), top_k) for selection in selections
        ]
        ids = self._token_ids
        known = ids is not None and ids.numel() == tokens
        token_N = ids.reshape(-1).cpu()[place_N] if ids is not None and known else torch.full_like(place_N, -1)
        domain_N = torch.tensor(self._labels)[place_N * len(self._labels) // tokens]
        return Paths(np.full(len(place_N), self._step + 1), token_N, domain_N, np.stack(experts, axis=1))

    def _open_record(self) -> None:
        """Fix the axes by the first recorded pass, alike on all ranks."""
        self._used = sorted(self._seen)
        layers = [self._layers[place] for place in self._used]
        reached = "" if layers else "the first recorded forward pass of a rank reached no MoE layer, so it has no axes."
        self._agree(reached)
        first = [self._seen[place][0] for place in self._used]
        self._device = first[0].routing.counts_E.device
        choices = [seen.routing.counts_E.shape[-1] for seen in first]
        zeros = {layer.zero_experts for layer in layers}
        held = self._group.gather_objects([layer.held() for layer in layers])
        meta = LoadMeta(
            layers=tuple(layer.name for layer in layers),
            experts=tuple(number - layer.zero_experts for number, layer in zip(choices, layers, strict=True)),
            top_k=tuple(layer.top_k or seen.selection_TK.shape[-1] for layer, seen in zip(layers, first, strict=True)),
            zero_experts=max(zeros),
            domains=(*self._domains, NO_DOMAIN),
        )
        shard = _shards(held, meta.experts) if self._group.size > 1 else ()
        self._held = shard
        meta = LoadMeta(**{**vars(meta), "rank_experts": shard})
        metas = self._group.gather_objects(meta)
        problem = "" if len(zeros) == 1 else "layers with different numbers of zero experts cannot be in one record."
        if any(other != metas[0] for other in metas):
            problem = (
                "ranks have different MoE layers (pipeline parallelism?), whose figures cannot be added up; give "
                "record_load across_ranks=False and a folder of its own on each rank."
            )
        if not problem and self._group.index == 0:
            try:
                self._recorder = LoadRecorder(LoadStore(self._folder, meta, every=1))
            except (LoadError, OSError) as error:
                problem = str(error)
        self._agree(problem)
        self._meta = meta

    def _agree(self, problem: str) -> None:
        """Fail on every rank with what is wrong on the first rank that has a problem. Every rank calls it."""
        problems = [text for text in self._group.gather_objects(problem) if text]
        if problems:
            raise LoadError(problems[0])

    def _sum_over_ranks(self) -> None:
        if self._tally is None:
            return
        figures = self._tally.over_ranks(self._group, self._group if self._held else None)
        self._finished = self._step, figures, self._paths
        self._tally = self._paths = None

    def _hand_over(self) -> None:
        finished, self._finished = self._finished, None
        if finished is not None and self._recorder is not None:
            step, figures, paths = finished
            self._recorder.add(step, figures, self._biases(), paths)

    def _biases(self) -> Array | None:
        assert self._meta is not None
        values = [self._layers[place].bias() for place in self._used]
        if all(value is None for value in values):
            return None
        bias_LE = np.zeros((len(values), self._meta.sizes.choices))
        for layer, value in enumerate(values):
            if value is not None:
                bias_LE[layer, : value.numel()] = value.detach().reshape(-1).to("cpu", torch.float64).numpy()
        return bias_LE


def _earlier_record(folder: Path, step: int) -> str:
    """What speaks against recording steps after ``step`` in a folder; empty when nothing does."""
    try:
        record = read_load(folder)
    except LoadError:
        # There is none; a damaged one is told of when it is opened.
        return ""
    last = int(record.windows["last_step"].max(initial=0))
    if last <= step:
        return ""
    return (
        f"{folder} holds a record of steps up to {last}, and this loop would record from step {step + 1} on; give "
        f"another folder, remove this one, or go on behind it with step={last}."
    )


def _added(parts: Sequence[RoutingSums], device: torch.device) -> RoutingSums:
    """Sums over the calls of a layer in one pass, where it has several; layers may lie on several devices."""
    return RoutingSums(*(torch.stack(values).sum(dim=0).to(device) for values in zip(*parts, strict=True)))


def _shards(held: Sequence[Sequence[tuple[int, ...] | None]], experts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The experts of each rank, where all ranks together hold every expert once; else nothing."""
    ranks = [set(layers) for layers in held]
    if any(len(layers) != 1 or None in layers for layers in ranks):
        return ()
    shares = tuple(share for layers in ranks for share in layers if share is not None)
    ids = sorted(expert for share in shares for expert in share)
    return shares if all(ids == list(range(number)) for number in experts) else ()
