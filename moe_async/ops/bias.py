"""How a selection bias follows the load: no loss, no gradient.

Shape letters: E choices of the router (experts, then zero experts).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

BiasRule = Literal["sign", "proportional", "pid"]


class BiasState(NamedTuple):
    """A router's selection bias and what its controller remembers, float32 [E] each.

    Attributes:
        bias_E: added to the scores for the choice alone.
        error_sum_E: sum of the errors so far.
        last_error_E: error of the update before.
    """

    bias_E: Tensor
    error_sum_E: Tensor
    last_error_E: Tensor


def load_errors(counts_E: Tensor, num_experts: int, experts_per_token: float | None, top_k: int) -> Tensor:
    """How far each expert's load lies below its target, relative to the target: float64 [E]; 0 for zero experts, and
    for all when nothing was routed.

    ``e_i = 1 - f_i / f*`` with ``f_i`` the share of assignments and ``f* = K_e / (K * N)``, N being the experts and
    ``K_e`` the number of a token's K places that shall go to them; None: ``f* = 1 / E``, an even load of all choices.
    """
    inverse = counts_E.numel() if experts_per_token is None else top_k * num_experts / experts_per_token
    routed = counts_E.sum()
    # The product first: an even load has an error of exactly zero then, of which the sign is zero too.
    errors_E = 1 - counts_E.double() * inverse / routed.clamp(min=1)
    errors_E[num_experts:] = 0
    return torch.where(routed > 0, errors_E, 0)


def updated_bias(
    state: BiasState,
    errors_E: Tensor,
    num_experts: int,
    rule: BiasRule,
    rate: float,
    integral: float,
    derivative: float,
) -> BiasState:
    """One update from the load errors of a whole step; zero experts keep the bias 0.

    ``sign``: ``b += rate * (u - mean(u))`` with ``u = sign(e)`` (Wang et al. 2024, arXiv 2408.15664, algorithm 1, and
    DeepSeek-V3; re-centred so that the biases do not drift together, but not where zero experts choose, whose share the
    common height decides); ``proportional``: ``b += rate * e``
    (LongCat-Flash, arXiv 2509.01322, eq. 3, with the error relative to its target); ``pid``:
    ``b += rate * (e + integral * sum(e) + derivative * (e - e_before))``.
    """
    error_sum_E = state.error_sum_E.double() + errors_E
    if rule == "sign":
        change_E = torch.sign(errors_E)
        if errors_E.numel() == num_experts:
            change_E = change_E - change_E.mean()
    elif rule == "proportional":
        change_E = errors_E
    else:
        change_E = errors_E + integral * error_sum_E + derivative * (errors_E - state.last_error_E.double())
    dtype = state.bias_E.dtype
    return BiasState((state.bias_E.double() + rate * change_E).to(dtype), error_sum_E.to(dtype), errors_E.to(dtype))
