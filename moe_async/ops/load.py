"""How evenly experts are loaded.

Shape letter: E experts in all. Functions take the loads in the last dimension, and any dimensions before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LoadBalance:
    """Balance of one layer over some window of tokens.

    Attributes:
        max_over_mean: largest load over the mean load; 1 is perfect balance.
        cv: coefficient of variation of the loads, population standard deviation over mean; 0 is perfect.
        dead: experts that got no token at all.
    """

    max_over_mean: float
    cv: float
    dead: int


def load_balance(counts_E: Tensor) -> LoadBalance:
    """Balance of the assignment counts of one layer; zeros, and all experts dead, when nothing was routed.

    Args:
        counts_E: int64, assignments to each expert, summed over the window and over all ranks.
    """
    counts = counts_E.double().cpu().numpy()
    relative_E = relative_loads(counts)
    return LoadBalance(
        max_over_mean=float(relative_E.max(initial=0.0)),
        cv=float(variation(counts)),
        dead=int((counts == 0).sum()),
    )


def relative_loads(counts: npt.ArrayLike) -> Array:
    """Loads over their mean, [..., E]: 1 is an expert's fair share; zeros where nothing was routed."""
    loads = np.asarray(counts, dtype=np.float64)
    mean = loads.mean(axis=-1, keepdims=True) if loads.shape[-1] else loads
    return np.divide(loads, mean, out=np.zeros_like(loads), where=mean > 0)


def variation(counts: npt.ArrayLike) -> Array:
    """Coefficient of variation of the loads, [...]: population standard deviation over mean."""
    return np.asarray(relative_loads(counts).std(axis=-1))


def max_violation(counts: npt.ArrayLike) -> Array:
    """MaxVio, [...]: largest load over the mean load, less one (Wang et al. 2024, arXiv 2408.15664, equation 4)."""
    relative = relative_loads(counts)
    return np.asarray(np.where(relative.any(axis=-1), relative.max(axis=-1, initial=0.0) - 1.0, 0.0))


def load_entropy(counts: npt.ArrayLike) -> Array:
    """Entropy of the loads as a distribution over experts, in nats, [...]: ``ln E`` at perfect balance."""
    loads = np.asarray(counts, dtype=np.float64)
    total = loads.sum(axis=-1, keepdims=True)
    share = np.divide(loads, total, out=np.zeros_like(loads), where=total > 0)
    return np.asarray(-(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=-1))


def effective_experts(counts: npt.ArrayLike) -> Array:
    """How many equally loaded experts have the same entropy, ``exp(entropy)``, [...]; 0 where nothing was routed."""
    return np.asarray(np.where(np.asarray(counts).any(axis=-1), np.exp(load_entropy(counts)), 0.0))
