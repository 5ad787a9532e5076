"""Loads as characters, for terminals.

Shape letters: N rows, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_async.observe.windows import Array
from moe_async.ops.load import relative_loads

_LEVELS = "▁▂▃▄▅▆▇█"
_DEAD = "·"
_FULL = 2.0
LEGEND = (
    f"one character an expert: {_DEAD} no load, {_LEVELS[0]} almost none, {_LEVELS[3]}{_LEVELS[4]} about a fair share, "
    f"{_LEVELS[-1]} twice that or more"
)


def heatmap(labels: Sequence[str], counts: Sequence[Array], width: int = 100) -> list[str]:
    """A line for each row: its label, and the load of each expert over the fair share.

    Args:
        labels: of the rows.
        counts: of each row, [E]; rows may differ in E.
        width: characters of a line at most; at least one is left for loads. Where experts are more, neighbours share a
            character, which shows the busiest of them.
    """
    margin = _margin(labels)
    rows = []
    for label, counts_E in zip(labels, counts, strict=True):
        loads_E, size = relative_loads(counts_E), sharing(len(counts_E), labels, width)
        shown = [float(loads_E[start : start + size].max()) for start in range(0, len(loads_E), size)]
        rows.append(label.ljust(margin) + "".join(map(_shade, shown)))
    return rows


def sharing(experts: int, labels: Sequence[str], width: int) -> int:
    """How many neighbouring experts share a character of `heatmap`."""
    return max(-(-experts // max(width - _margin(labels), 1)), 1)


def _margin(labels: Sequence[str]) -> int:
    return max(map(len, labels), default=0) + 2


def _shade(load: float) -> str:
    if load == 0:
        return _DEAD
    return _LEVELS[min(int(load / _FULL * (len(_LEVELS) - 1) + 0.5), len(_LEVELS) - 1)]
