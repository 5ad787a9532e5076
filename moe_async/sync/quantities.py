"""Quantities as people write them, each with its unit: ``20ms``, ``1Gbit``, ``1/h``, ``5x``, ``10%``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from moe_async.errors import SyncError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES = {
    "bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8,
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9,
}  # fmt: skip
_PER = {"/s": 1.0, "/min": 1 / 60, "/h": 1 / 3600, "/d": 1 / 86400}


def parse_seconds(text: str) -> float:
    """Seconds in a duration such as ``20ms``, ``60s`` or ``1.5h``."""
    return _parse(text, _SECONDS, "a duration", "20ms, 60s or 1.5h")


def parse_bandwidth(text: str) -> float:
    """Bytes per second in a rate such as ``1Gbit`` or ``100MB`` (bits and bytes a second, in powers of ten)."""
    value = _parse(text, _BYTES, "a bandwidth", "1Gbit, 250Mbit or 100MB, each a second")
    if value == 0:
        raise SyncError(f"{text!r} is no bandwidth: nothing would ever arrive. Give more than 0.")
    return value


def parse_rate(text: str) -> float:
    """Events a second in a rate such as ``1/h`` or ``0.5/min``."""
    return _parse(text, _PER, "a rate", "1/h, 0.5/min or 2/d")


def parse_factor(text: str) -> float:
    """A factor such as ``5x``, more than 0."""
    value = _parse(text, {"x": 1.0}, "a factor", "5x or 0.6x")
    if value == 0:
        raise SyncError(f"{text!r} is a factor of 0; a step takes some time. Give more than 0x.")
    return value


def parse_share(text: str) -> float:
    """A share such as ``10%``, from 0 to 1."""
    value = _parse(text, {"%": 0.01}, "a share", "10% or 2.5%")
    if value > 1:
        raise SyncError(f"{text!r} is more than everything. Give 0% to 100%.")
    return value


def _parse(text: str, units: Mapping[str, float], what: str, examples: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(\D.*)", text.strip())
    if match is None or match[2] not in units:
        raise SyncError(
            f"{text!r} is not {what}: a number followed by one of {', '.join(units)}. Write it like {examples}."
        )
    return float(match[1]) * units[match[2]]
