"""The experts that a sample of tokens took through all layers.

Shape letters: N sampled tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NO_EXPERT = -1
"""Where a token took fewer than K experts."""


class Paths:
    """Expert paths of sampled tokens, in the order in which they were taken.

    Attributes:
        step: int64 [N].
        token: int64 [N], the token's id; -1 where it is not known.
        domain: int64 [N], index of the token's domain.
        experts: int64 [N, L, K], the experts it was sent to, `NO_EXPERT` in places that it did not take.
    """

    def __init__(self, step: npt.ArrayLike, token: npt.ArrayLike, domain: npt.ArrayLike, experts: npt.ArrayLike):
        self.step = np.asarray(step, dtype=np.int64)
        self.token = np.asarray(token, dtype=np.int64)
        self.domain = np.asarray(domain, dtype=np.int64)
        self.experts = np.asarray(experts, dtype=np.int64)

    @classmethod
    def empty(cls, layers: int, top_k: int) -> Paths:
        """No token at all."""
        return cls([], [], [], np.zeros((0, layers, top_k)))

    @classmethod
    def joined(cls, parts: Sequence[Paths]) -> Paths:
        """Those of several parts, one after another; at least one part."""
        columns = zip(*(part.arrays().values() for part in parts), strict=True)
        return cls(*(np.concatenate(values) for values in columns))

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Paths:
        """Put back what `arrays` gave."""
        return cls(**arrays)

    def __len__(self) -> int:
        """N."""
        return len(self.step)

    def arrays(self) -> dict[str, Array]:
        """All arrays by name."""
        return {"step": self.step, "token": self.token, "domain": self.domain, "experts": self.experts}

    def chosen(self, keep: npt.NDArray[np.bool_] | slice) -> Paths:
        """Some of the tokens."""
        return Paths(*(value[keep] for value in self.arrays().values()))

    def thinned(self) -> Paths:
        """Every second token."""
        return self.chosen(slice(None, None, 2))
