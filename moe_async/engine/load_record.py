"""Writes the record of a run's expert loads.

Shape letters: L MoE layers, E choices of the router.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_async.engine.hooks import Hook, StepRecord
from moe_async.moe import MoELayer
from moe_async.observe.paths import Paths
from moe_async.observe.recorder import LoadRecorder
from moe_async.observe.sampler import PathSampler
from moe_async.observe.store import LoadMeta, LoadStore
from moe_async.observe.windows import Array

if TYPE_CHECKING:
    from moe_async.engine.loop import Trainer
    from moe_async.engine.step import Engine


def open_store(folder: Path, meta: LoadMeta, step: int) -> tuple[LoadStore, Path | None]:
    """The record of a run that goes on at a step, and where an earlier one with other axes was put.

    Raises:
        LoadError: what the folder holds cannot be read.
    """
    aside = None
    if not LoadStore.fits(folder, meta):
        aside = next(
            path for number in range(1, 100_000) if not (path := folder.with_name(f"{folder.name}-{number}")).exists()
        )
        folder.rename(aside)
    store = LoadStore(folder, meta)
    store.forget_after(step)
    return store, aside


class LoadHook(Hook):
    """Records the loads of experts; rank 0 has one.

    Args:
        store: where they go.
        engine: whose layers are watched for expert paths.
    """

    def __init__(self, store: LoadStore, engine: Engine) -> None:
        self._meta = store.meta
        self._recorder = LoadRecorder(store)
        layers = [part for part in engine.module.modules() if isinstance(part, MoELayer)]
        self._sampler = PathSampler(layers, max(store.meta.top_k, default=0))
        self._routers = [layer.router for layer in layers]
        self._sampler.want()

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Take the step, where its figures were gathered."""
        load, step = record.report.load, record.report.step
        if load is None:
            return
        self._recorder.add(step, load, self._biases(), self._paths(trainer, step))
        if self._recorder.at_start:
            self._sampler.want()

    def on_save(self, trainer: Trainer) -> None:
        """Write what was recorded so far: a resumed run goes on from the checkpoint."""
        self._recorder.flush()
        self._sampler.want()

    def on_end(self, trainer: Trainer) -> None:
        """Write what is left."""
        self._recorder.flush()
        self._sampler.close()

    def _paths(self, trainer: Trainer, step: int) -> Paths | None:
        batch = trainer.batches[0]
        return self._sampler.paths(step, batch.tokens, batch.token_mask, batch.domains, len(self._meta.domains) - 1)

    def _biases(self) -> Array | None:
        states = [router.bias_state for router in self._routers]
        if all(state is None for state in states):
            return None
        bias_LE = np.zeros((len(states), self._meta.sizes.choices))
        for layer, state in enumerate(states):
            if state is not None:
                values = state.bias_E.detach().to("cpu", torch.float64).numpy()
                bias_LE[layer, : len(values)] = values
        return bias_LE
