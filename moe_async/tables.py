"""How tools print: tables for people, JSON for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any


def json_text(document: Any, indent: int | None = 1) -> str:
    """A document as standard JSON, which has no NaN nor infinity: null stands in their place."""
    return json.dumps(finite(document), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """A document with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    return [
        row[0].ljust(widths[0]) + "".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
