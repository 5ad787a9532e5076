"""How evenly experts are loaded.

Shape letter: E experts in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
    counts = counts_E.double()
    mean = counts.mean().item()
    if mean == 0:
        return LoadBalance(max_over_mean=0.0, cv=0.0, dead=int(counts_E.numel()))
    return LoadBalance(
        max_over_mean=counts.max().item() / mean,
        cv=counts.std(correction=0).item() / mean,
        dead=int((counts_E == 0).sum().item()),
    )
