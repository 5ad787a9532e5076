"""Initial values that depend on a parameter's name and not on where it lives.

One seed gives the same model at every expert-parallel size, number of ranks and learners: each tensor (and each expert
of a stacked tensor) draws from a generator of its own, seeded by its name and, for experts, its global id.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


def generator_by_name(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU whose numbers follow from ``seed`` and ``name``."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Init(NamedTuple):
    """How weight matrices begin: normal values around zero.

    Attributes:
        scale: the standard deviation is ``sqrt(scale / fan_in)``; Switch Transformer has 0.1 (Fedus et al. 2021, arXiv
            2101.03961, 2.4).
        std: the standard deviation itself instead, whatever the fan-in.
        truncate: values beyond this many standard deviations are drawn anew, which makes the spread smaller (0.88 of it
            for 2); None: never.
        output_scale: factor on matrices that write into the residual stream.
    """

    scale: float = 1.0
    std: float | None = None
    truncate: float | None = None
    output_scale: float = 1.0

    def fill_(self, tensor: Tensor, fan_in: int, seed: int, name: str, *, output: bool = False) -> None:
        """Fill a weight that sums over ``fan_in`` inputs; ``output``: it writes into the residual stream."""
        std = self.std if self.std is not None else math.sqrt(self.scale / fan_in)
        factor = self.output_scale if output else 1.0
        normal_by_name_(tensor.data, std=factor * std, seed=seed, name=name, truncate=self.truncate)


@torch.no_grad()
def normal_by_name_(tensor: Tensor, *, std: float, seed: int, name: str, truncate: float | None = None) -> None:
    """Fill ``tensor`` with normal values of standard deviation ``std``, determined by ``seed``, ``name`` and shape.

    The values are drawn in float32 on the CPU, so they are the same on every device and for every parameter dtype.
    Values beyond ``truncate`` standard deviations are drawn anew.
    """
    values = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    generator = generator_by_name(seed, name)
    if truncate is None:
        values.normal_(0.0, std, generator=generator)
    else:
        nn.init.trunc_normal_(values, 0.0, std, -truncate * std, truncate * std, generator=generator)
    tensor.copy_(values)
