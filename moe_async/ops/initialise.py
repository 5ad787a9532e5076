"""Initial values that depend on a parameter's name and not on where it lives.

One seed gives the same model at every expert-parallel size, number of ranks and learners: each tensor (and each expert
of a stacked tensor) draws from a generator of its own, seeded by its name and, for experts, its global id.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


@torch.no_grad()
def normal_by_name_(tensor: Tensor, *, std: float, seed: int, name: str) -> None:
    """Fill ``tensor`` with normal values of standard deviation ``std``, determined by ``seed``, ``name`` and shape.

    The values are drawn in float32 on the CPU, so they are the same on every device and for every parameter dtype.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(tensor.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
    tensor.copy_(values)
