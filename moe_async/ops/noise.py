"""Random numbers that belong to a token's place and not to the process that draws them.

A layer draws one key for each forward pass in training, from torch's default generator on the CPU; everything random in
that pass follows from the key, the rank that the token comes from, and what it is for. So the same tokens get the same
noise at every expert-parallel size, and a pass that is repeated with the random state put back (recomputation,
counting) repeats it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Noise:
    """The source of one forward pass's random numbers.

    Attributes:
        key: of the pass, the same on every rank whose random state is the same.
        rank: of the learner, from which the tokens come.
    """

    key: int
    rank: int = 0

    @classmethod
    def draw(cls, rank: int) -> Noise:
        """A new key from torch's default generator on the CPU."""
        return cls(int(torch.randint(2**62, (), device="cpu").item()), rank)

    def generator(self, purpose: str, device: torch.device) -> torch.Generator:
        """A generator for one purpose."""
        digest = hashlib.sha256(f"{self.key}/{self.rank}/{purpose}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def uniform(self, purpose: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Float32 numbers from 0 (included) to 1 (excluded)."""
        return torch.rand(shape, generator=self.generator(purpose, device), device=device)

    def normal(self, purpose: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Float32 standard normal numbers."""
        return torch.randn(shape, generator=self.generator(purpose, device), device=device)


def jittered(x: Tensor, epsilon: float, noise: Noise) -> Tensor:
    """``x * u`` with u uniform from ``1 - epsilon`` to ``1 + epsilon`` (Fedus et al. 2021, arXiv 2101.03961, 2.4)."""
    drawn = noise.uniform("jitter", tuple(x.shape), x.device).to(x.dtype)
    return x * (1 - epsilon + 2 * epsilon * drawn)


def with_normal_noise(x: Tensor, std: float, noise: Noise) -> Tensor:
    """``x + std * n`` with n standard normal."""
    return x + std * noise.normal("input", tuple(x.shape), x.device).to(x.dtype)


def dropout_mask(noise: Noise, rate: float, shape: tuple[int, int], expert: int, like: Tensor) -> Tensor:
    """Factors 0 or ``1 / (1 - rate)`` for one expert's hidden values of the tokens from ``noise.rank``."""
    kept = noise.uniform(f"expert {expert}", shape, like.device) >= rate
    return kept.to(like.dtype) / (1 - rate)
