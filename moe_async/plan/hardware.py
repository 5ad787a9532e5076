"""Accelerators by name: memory, peak rates and links, as their makers state them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_async.errors import RecipeError

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Accelerator:
    """One accelerator, and how it is linked to others.

    Attributes:
        name: as it is asked for.
        title: of the product.
        memory: bytes.
        bf16: floating-point operations a second of dense bfloat16 matrix products.
        float32: the same in float32, without reduced precision.
        bandwidth: bytes a second of its memory.
        link: bytes a second to another one of its node, one way.
        network: bytes a second to another node, one way.
        node: accelerators in a node.
    """

    name: str
    title: str
    memory: int
    bf16: float
    float32: float
    bandwidth: float
    link: float
    network: float
    node: int = 8

    def peak(self, width: int) -> float:
        """Operations a second for numbers of so many bytes; float64 is taken as half of float32."""
        return {2: self.bf16, 4: self.float32, 8: self.float32 / 2}[width]


ACCELERATORS = {
    one.name: one
    for one in (
        Accelerator("a100", "NVIDIA A100 SXM 80 GB", 80 * 10**9, 312e12, 19.5e12, 2.04e12, 300e9, 25e9),
        Accelerator("h100", "NVIDIA H100 SXM 80 GB", 80 * 10**9, 989e12, 67e12, 3.35e12, 450e9, 50e9),
        Accelerator("h200", "NVIDIA H200 SXM 141 GB", 141 * 10**9, 989e12, 67e12, 4.8e12, 450e9, 50e9),
        Accelerator("b200", "NVIDIA B200 SXM 180 GB", 180 * 10**9, 2250e12, 75e12, 7.7e12, 900e9, 50e9),
        Accelerator("mi300x", "AMD MI300X 192 GB", 192 * 10**9, 1307e12, 163e12, 5.3e12, 448e9, 50e9),
    )
}
"""Peak rates without sparsity, from the makers' data sheets; the network is one 400 Gbit/s port for each accelerator
(200 Gbit/s for the A100), as in their reference systems."""


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name.

    Raises:
        RecipeError: it is not known.
    """
    found = ACCELERATORS.get(name.lower())
    if found is None:
        raise RecipeError(f"{name!r} is not a known accelerator; known are {', '.join(ACCELERATORS)}.")
    return found


def parse_bytes(text: str, zero: bool = False) -> int:
    """Bytes of an amount such as ``80GB`` (powers of ten) or ``80GiB`` (powers of two); nothing only where ``zero``.

    Raises:
        RecipeError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2] not in _UNITS or (float(match[1]) == 0 and not zero):
        raise RecipeError(f"{text!r} is not an amount of memory; write it like 80GB or 80GiB.")
    return round(float(match[1]) * _UNITS[match[2]])
