"""Turns the steps of a run into windows, and hands them to the folder.

Shape letters: L MoE layers, E choices of the router.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from moe_async.observe.paths import Paths
from moe_async.observe.store import LoadMeta, LoadRecord
from moe_async.observe.tally import StepFigures
from moe_async.observe.windows import FIELDS, Array, Windows
from moe_async.ops.load import max_violation, relative_loads

FLUSH_WINDOWS = 64
"""Windows that a killed process loses at most, beside the one at hand."""
SWING = 1.0
"""An expert has swung when its load went from one side of the mean to the other, by more than a fair share."""


class WindowStore(Protocol):
    """Where windows go: `LoadStore` on disk, `HeldLoads` in memory."""

    meta: LoadMeta
    window_steps: int

    def append(self, windows: Windows, paths: Paths) -> None:
        """Add windows that come after those that are there, and the paths of their tokens."""
        ...

    def forget_after(self, step: int) -> None:
        """Drop the windows that reach beyond a step."""
        ...


class HeldLoads:
    """A record in memory, for what is analysed at once.

    Args:
        meta: what the axes are.
    """

    window_steps = 1

    def __init__(self, meta: LoadMeta) -> None:
        self.meta = meta
        self._windows = Windows.empty(meta.sizes)
        self._paths = Paths.empty(len(meta.layers), max(meta.top_k, default=0))

    def append(self, windows: Windows, paths: Paths) -> None:
        """Add windows that come after those that are there, and the paths of their tokens."""
        self._windows = Windows.joined([self._windows, windows])
        self._paths = Paths.joined([self._paths, paths])

    def forget_after(self, step: int) -> None:
        """Drop the windows that reach beyond a step."""
        self._windows = self._windows.chosen(self._windows["last_step"] <= step)
        self._paths = self._paths.chosen(self._paths.step <= step)

    @property
    def record(self) -> LoadRecord:
        """What is held."""
        return LoadRecord(self.meta, self._windows, self._paths)


class LoadRecorder:
    """Collects steps; one process alone does.

    Args:
        store: where they go.
    """

    def __init__(self, store: WindowStore) -> None:
        self._store = store
        self._pending: list[Windows] = []
        self._paths: list[Paths] = []
        self._open: list[Windows] = []
        self._open_steps = 0
        self._last_step = -1
        self._last_loads_LE: Array | None = None

    @property
    def at_start(self) -> bool:
        """Whether the next step is the first of a window; paths are sampled there."""
        return not self._open_steps

    def add(self, step: int, figures: StepFigures, bias_LE: Array | None = None, paths: Paths | None = None) -> None:
        """Take one step.

        Args:
            step: its number.
            figures: over all ranks.
            bias_LE: selection biases after the step; None without any.
            paths: of tokens of this step.
        """
        if step <= self._last_step:
            # A learner that begins anew may be put back in the run.
            self.flush()
            self._store.forget_after(step - 1)
        self._last_step = step
        self._open.append(self._window(step, figures, bias_LE))
        self._open_steps += 1
        if len(self._open) > 1:
            self._open = [Windows.joined(self._open).total()]
        if paths is not None and len(paths):
            self._paths.append(paths)
        if self._open_steps >= self._store.window_steps:
            self._close()
            if len(self._pending) >= FLUSH_WINDOWS:
                self._hand_over()

    def flush(self) -> None:
        """Write everything, the window at hand too."""
        self._close()
        self._hand_over()

    def _close(self) -> None:
        self._pending += self._open
        self._open, self._open_steps = [], 0

    def _hand_over(self) -> None:
        if self._pending:
            meta = self._store.meta
            none = Paths.empty(len(meta.layers), max(meta.top_k, default=0))
            self._store.append(Windows.joined(self._pending), Paths.joined([none, *self._paths]))
        self._pending, self._paths = [], []

    def _window(self, step: int, figures: StepFigures, bias_LE: Array | None) -> Windows:
        """One step as a window of its own, with the figures that follow from its loads."""
        counts_LE, sizes = figures["counts"], self._store.meta.sizes
        experts = self._store.meta.experts
        violation = [max_violation(counts[:number]) for counts, number in zip(counts_LE, experts, strict=True)]
        loads_LE = np.zeros_like(counts_LE)
        for layer, number in enumerate(experts):
            loads_LE[layer, :number] = relative_loads(counts_LE[layer, :number]) - 1.0
        values = {
            **figures,
            "first_step": step, "last_step": step, "steps": 1,
            "micro_batches": figures["micro_batches"][0],
            "peak": counts_LE,
            "bias": np.zeros_like(counts_LE) if bias_LE is None else bias_LE,
            "violation": violation, "violation_peak": violation,
            "swing": self._swings(loads_LE),
            "rank_violation": max_violation(figures["rank_load"]) if sizes.ranks else np.zeros(sizes.layers),
        }  # fmt: skip
        self._last_loads_LE = loads_LE
        return Windows({name: np.asarray(values[name])[None] for name in FIELDS})

    def _swings(self, loads_LE: Array) -> Array:
        last = self._last_loads_LE
        if last is None:
            return np.zeros_like(loads_LE)
        return np.asarray((loads_LE * last < 0) & (np.abs(loads_LE - last) > SWING))
