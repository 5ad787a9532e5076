"""Loads of experts over a window of steps, and their record on disk.

Shape letters: L MoE layers, E experts in all.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_async.ops.load import LoadBalance, load_balance


class LoadWindow:
    """Assignment counts summed over the last ``length`` steps."""

    def __init__(self, length: int) -> None:
        self._steps: deque[Tensor] = deque(maxlen=length)

    def add(self, counts_LE: Tensor) -> None:
        """Take one step's counts, int64 [L, E], summed over ranks."""
        self._steps.append(counts_LE)

    def counts(self) -> Tensor:
        """Counts of the window, int64 [L, E]; [0, 0] when it is empty."""
        return torch.stack(list(self._steps)).sum(0) if self._steps else torch.zeros((0, 0), dtype=torch.int64)

    def balance(self) -> list[LoadBalance]:
        """Balance of each layer over the window, in layer order."""
        return [load_balance(counts_E) for counts_E in self.counts()]

    def state_dict(self) -> list[list[list[int]]]:
        """The window as plain lists."""
        return [counts.tolist() for counts in self._steps]

    def load_state_dict(self, state: list[list[list[int]]]) -> None:
        """Continue a saved window."""
        self._steps.clear()
        self._steps.extend(torch.tensor(counts, dtype=torch.int64) for counts in state)


class LoadRecorder:
    """Writes expert loads as JSON Lines: ``{"step": 20, "layer": 0, "counts": [...]}`` per layer.

    ``counts`` are assignments before drop, summed over ranks and over the steps since the line before.
    """

    def __init__(self, path: Path, layers: tuple[int, ...]) -> None:
        self._path = path
        self._layers = layers
        self._pending: Tensor | None = None

    def add(self, counts_LE: Tensor) -> None:
        """Take one step's counts."""
        self._pending = counts_LE if self._pending is None else self._pending + counts_LE

    def write(self, step: int) -> None:
        """Append the sums up to ``step`` and start anew."""
        if self._pending is None:
            return
        with self._path.open("a") as file:
            for layer, counts_E in zip(self._layers, self._pending.tolist(), strict=True):
                line: dict[str, Any] = {"step": step, "layer": layer, "counts": counts_E}
                file.write(json.dumps(line) + "\n")
        self._pending = None
