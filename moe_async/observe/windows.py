"""Loads of experts by window of steps: which figures there are, and how those of neighbouring windows become one.

A window is one step or several that follow one another. Every figure is a sum, a maximum or the last value, so that
windows can be put together at any time without another look at the steps: a long run keeps few, long windows.

Shape letters: W windows, L MoE layers, E choices of the router (experts, then zero experts), R ranks, C domains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Merge = Literal["sum", "max", "min", "last"]


class Field(NamedTuple):
    """A figure of a window.

    Attributes:
        shape: letters of its dimensions after W.
        merge: how two windows' values become one.
        real: whether it is a real number; else it counts.
        says: what it is.
    """

    shape: str
    merge: Merge
    real: bool
    says: str


FIELDS: dict[str, Field] = {
    "first_step": Field("", "min", False, "first step of the window"),
    "last_step": Field("", "max", False, "last step of the window"),
    "steps": Field("", "sum", False, "recorded steps in the window"),
    "micro_batches": Field("", "sum", False, "micro-batches of all ranks"),
    "tokens": Field("L", "sum", False, "routed tokens"),
    "counts": Field("LE", "sum", False, "assignments before drop"),
    "peak": Field("LE", "max", False, "most assignments before drop in one step"),
    "dropped": Field("LE", "sum", False, "assignments dropped because the expert was full"),
    "prob": Field("LE", "sum", True, "router probability, summed over tokens"),
    "bias": Field("LE", "last", True, "selection bias after the last step; zeros without one"),
    "entropy": Field("L", "sum", True, "entropy of the router distribution in nats, summed over tokens"),
    "z": Field("L", "sum", True, "squared logsumexp of the router logits, summed over tokens"),
    "top": Field("L", "sum", True, "largest router probability, summed over tokens"),
    "margin": Field("L", "sum", True, "gap between the two largest router probabilities, summed over tokens"),
    "bad_tokens": Field("L", "sum", False, "tokens whose router logits were not finite"),
    "violation": Field("L", "sum", True, "MaxVio of each step's loads, summed over steps"),
    "violation_peak": Field("L", "max", True, "largest MaxVio of a step"),
    "micro_violation": Field("L", "sum", True, "MaxVio of each micro-batch on its rank, summed over micro-batches"),
    "micro_violation_peak": Field("L", "max", True, "largest MaxVio of a micro-batch"),
    "swing": Field("LE", "sum", False, "steps at which the load went from far above the mean to far below it or back"),
    "rank_load": Field("LR", "sum", False, "assignments that each rank's experts computed, after drop"),
    "rank_violation": Field("L", "sum", True, "MaxVio over the ranks of each step, summed over steps"),
    "domain_tokens": Field("C", "sum", False, "tokens of each domain; that of no domain comes last"),
    "domain_counts": Field("LCE", "sum", False, "assignments before drop by the domain of the token"),
}
"""All figures, in the order in which they are stored."""

_MERGES = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Sizes:
    """How many of each letter there are.

    Attributes:
        layers: MoE layers.
        choices: of the widest layer: experts and zero experts.
        ranks: whose loads are known; 0 when they are not.
        domains: labels of text, the one of none included.
    """

    layers: int
    choices: int
    ranks: int = 0
    domains: int = 1

    def shape(self, field: Field) -> tuple[int, ...]:
        """Dimensions of a figure of one window."""
        sizes = {"L": self.layers, "E": self.choices, "R": self.ranks, "C": self.domains}
        return tuple(sizes[letter] for letter in field.shape)

    def window_bytes(self) -> int:
        """Bytes of one window on disk."""
        return sum(4 * int(np.prod(self.shape(field))) for field in FIELDS.values())


def dtype_of(field: Field) -> npt.DTypeLike:
    """The type in which a figure is added up in memory."""
    return np.float64 if field.real else np.int64


class Windows:
    """Figures of windows in the order of their steps, each an array [W, ...].

    Args:
        values: an array for each entry of `FIELDS`, alike in W.
    """

    def __init__(self, values: Mapping[str, npt.ArrayLike]) -> None:
        self._values: dict[str, Array] = {
            name: np.asarray(values[name], dtype=dtype_of(field)) for name, field in FIELDS.items()
        }

    @classmethod
    def empty(cls, sizes: Sizes) -> Windows:
        """No window at all."""
        return cls({name: np.zeros((0, *sizes.shape(field))) for name, field in FIELDS.items()})

    @classmethod
    def joined(cls, parts: Sequence[Windows]) -> Windows:
        """The windows of several parts, one after another; at least one part."""
        return cls({name: np.concatenate([part[name] for part in parts]) for name in FIELDS})

    def __getitem__(self, name: str) -> Array:
        """The figure of that name, [W, ...]."""
        return self._values[name]

    def __len__(self) -> int:
        """W."""
        return len(self._values["steps"])

    def items(self) -> Mapping[str, Array]:
        """All figures by name."""
        return self._values

    def chosen(self, keep: npt.NDArray[np.bool_] | slice) -> Windows:
        """Some of the windows."""
        return Windows({name: value[keep] for name, value in self._values.items()})

    def merged(self, size: int) -> Windows:
        """Windows that hold ``size`` of these each, counted from the first; the last may hold fewer."""
        return self._grouped(np.arange(0, len(self), size))

    def packed(self, steps: int) -> Windows:
        """Neighbours put together as far as the whole has no more than ``steps`` steps."""
        starts: list[int] = []
        held = 0
        for place, number in enumerate(self._values["steps"].tolist()):
            if not starts or held + number > steps:
                starts.append(place)
                held = 0
            held += number
        return self._grouped(np.array(starts, dtype=np.int64))

    def _grouped(self, starts: npt.NDArray[np.int64]) -> Windows:
        """Windows of which each begins at one of the places and ends before the next."""
        if not len(starts):
            return self
        merged = {}
        for name, field in FIELDS.items():
            value = self._values[name]
            if field.merge == "last":
                merged[name] = value[np.append(starts[1:], len(self)) - 1]
            else:
                merged[name] = _MERGES[field.merge].reduceat(value, starts, axis=0)
        return Windows(merged)

    def total(self) -> Windows:
        """All windows as one; needs at least one."""
        return self.merged(max(len(self), 1))
