"""Loads of experts over a window of steps.

Shape letters: L MoE layers, E experts in all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_async.ops.load import LoadBalance, load_balance


class LoadWindow:
    """Assignment counts summed over all steps after step ``after``."""

    def __init__(self, after: int) -> None:
        self.after = after
        self._counts: Tensor | None = None

    def add(self, step: int, counts_LE: Tensor) -> None:
        """Take the counts of one step, int64 [L, E], summed over ranks."""
        if step > self.after:
            self._counts = counts_LE if self._counts is None else self._counts + counts_LE

    def balance(self) -> list[LoadBalance]:
        """Balance of each layer over the window, in layer order; empty while the window is."""
        return [] if self._counts is None else [load_balance(counts_E) for counts_E in self._counts]

    def state_dict(self) -> dict[str, Any]:
        """The window as plain values."""
        return {"after": self.after, "counts": None if self._counts is None else self._counts.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a saved window; one that begins at another step starts empty."""
        same = state["after"] == self.after and state["counts"] is not None
        self._counts = torch.tensor(state["counts"], dtype=torch.int64) if same else None
