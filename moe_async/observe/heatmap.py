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
    margin = max(map(len, labels), default=0) + 2
    room = max(width - margin, 1)
    return [
        label.ljust(margin) + "".join(map(_shade, _pooled(relative_loads(counts_E), room)))
        for label, counts_E in zip(labels, counts, strict=True)
    ]


def sharing(experts: int, labels: Sequence[str], width: int) -> int:
    """How many neighbouring experts share a character of `heatmap`."""
    room = max(width - max(map(len, labels), default=0) - 2, 1)
    return max(-(-experts // room), 1)


def _pooled(loads_E: Array, room: int) -> list[float]:
    size = max(-(-len(loads_E) // room), 1)
    return [float(loads_E[start : start + size].max()) for start in range(0, len(loads_E), size)]


def _shade(load: float) -> str:
    if load == 0:
        return _DEAD
    return _LEVELS[min(int(load / _FULL * (len(_LEVELS) - 1) + 0.5), len(_LEVELS) - 1)]
