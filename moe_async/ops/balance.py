"""Losses that keep routing even: functions of routing sums, and their scopes.

Every loss is a function of `RoutingSums` whose value does not depend on how many tokens there are. It takes one row per
sequence as well as a total, and gives one value per row.

Symbols, over the tokens of one row: T tokens, E experts, K experts per token; ``f_i`` the share of assignments that
went to expert i (counts before drop, no gradient), ``P_i`` the mean of the *full* router distribution.

Shape letters: E choices of the router, G device groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_async.ops.sums import RoutingSums, device_group

Loss = Callable[[RoutingSums], Tensor]


def switch_loss(sums: RoutingSums) -> Tensor:
    """``E * sum_i f_i P_i``: 1 at perfect balance for every E and K, E/K when K experts take everything.

    Reference: Fedus, Zoph and Shazeer 2021, arXiv 2101.03961, eq. 4 to 6, with f divided by K. Usual coefficient 0.01.
    """
    return _agreement(load_fractions(sums.counts_E), sums)


def gshard_loss(sums: RoutingSums) -> Tensor:
    """The Switch loss with the share of *first* choices: ``E * sum_i f1_i P_i``.

    Reference: Lepikhin et al. 2020, arXiv 2006.16668, algorithm 1 (mean over experts there, times E^2 here). Usual
    coefficient 0.01.
    """
    return _agreement(load_fractions(sums.first_counts_E), sums)


def sequence_loss(sums: RoutingSums) -> Tensor:
    """The Switch loss with the share of assignments that scores alone, without selection bias and groups, would make.

    Reference: DeepSeek-AI 2024, arXiv 2412.19437, eq. 17 to 20, where it is over each sequence. Usual coefficient 1e-4.
    """
    return _agreement(load_fractions(sums.free_counts_E), sums)


def importance_loss(sums: RoutingSums) -> Tensor:
    """``CV^2`` of the experts' summed weights: population variance over squared mean; 0 at perfect balance.

    Reference: Shazeer et al. 2017, arXiv 1701.06538, eq. 6 and 7. Usual coefficient 0.01 to 0.1.
    """
    return squared_cv(sums.weight_sum_E)


def load_loss(sums: RoutingSums) -> Tensor:
    """``CV^2`` of the experts' summed chances to be chosen under the learned noise; 0 at perfect balance.

    Reference: Shazeer et al. 2017, arXiv 1701.06538, eq. 8 to 11. Usual coefficient 0.01 to 0.1.
    """
    return squared_cv(sums.chance_sum_E)


def z_loss(sums: RoutingSums) -> Tensor:
    """``mean_t logsumexp(z_t)^2``, which keeps router logits small.

    Reference: Zoph et al. 2022, arXiv 2202.08906, eq. 5. Usual coefficient 0.001.
    """
    return sums.z_sum / sums.tokens.clamp(min=1)


def device_loss(sums: RoutingSums, num_experts: int, device_groups: int) -> Tensor:
    """``sum_d F_d P_d`` over groups of experts: F the mean of ``E f_i`` in one, P the sum of ``P_i``; 1 when even.

    Reference: DeepSeek-AI 2024, arXiv 2405.04434, eq. 26 to 28. Zero experts are a group more. Usual coefficient 0.05.

    Args:
        sums: routing sums.
        num_experts: experts without zero experts.
        device_groups: equal groups of consecutive experts.
    """
    group_E, size_G = _group_sizes(sums, num_experts, device_groups)
    share_G = _by_group(sums.counts_E.shape[-1] * load_fractions(sums.counts_E), group_E, size_G) / size_G
    return _of_groups(share_G, sums, group_E, size_G)


def communication_loss(sums: RoutingSums, num_experts: int, device_groups: int, reach: int) -> Tensor:
    """``sum_d F_d P_d``: F is ``G/M`` times the share of tokens sent to the group, P the sum of ``P_i``.

    1 when every token reaches M groups and all groups equally often; less when tokens reach fewer.

    Reference: DeepSeek-AI 2024, arXiv 2405.04434, eq. 29 to 31. Usual coefficient 0.02.

    Args:
        sums: routing sums.
        num_experts: experts without zero experts.
        device_groups: equal groups of consecutive experts (zero experts are one group more).
        reach: M, the most groups that one token is sent to.
    """
    group_E, size_G = _group_sizes(sums, num_experts, device_groups)
    share_G = sums.sent_G.double() * (size_G.numel() / reach) / sums.tokens[..., None].clamp(min=1)
    return _of_groups(share_G, sums, group_E, size_G)


def load_fractions(counts_E: Tensor) -> Tensor:
    """``f_i = c_i / sum_j c_j``, float64 [..., E]; zeros when no token was routed."""
    return counts_E.double() / counts_E.sum(dim=-1, keepdim=True).clamp(min=1)


def squared_cv(values_E: Tensor) -> Tensor:
    """Population variance over squared mean of the last dimension; 0 where all values are 0."""
    mean = values_E.mean(dim=-1)
    variance = (values_E - mean[..., None]).square().mean(dim=-1)
    some = mean != 0
    return torch.where(some, variance / torch.where(some, mean, 1).square(), 0 * mean)


def _agreement(fractions_E: Tensor, sums: RoutingSums) -> Tensor:
    """``E * sum_i f_i P_i``."""
    product_E = fractions_E.to(sums.prob_sum_E.dtype) * sums.prob_sum_E
    return fractions_E.shape[-1] * product_E.sum(dim=-1) / sums.tokens.clamp(min=1)


def _group_sizes(sums: RoutingSums, num_experts: int, device_groups: int) -> tuple[Tensor, Tensor]:
    """The group of each choice, and the number of choices in each group."""
    group_E = device_group(
        torch.arange(sums.counts_E.shape[-1], device=sums.counts_E.device), num_experts, device_groups
    )
    return group_E, torch.bincount(group_E, minlength=device_groups)


def _by_group(values_E: Tensor, group_E: Tensor, size_G: Tensor) -> Tensor:
    shape = (*values_E.shape[:-1], size_G.numel())
    return values_E.new_zeros(shape).index_add(-1, group_E, values_E)


def _of_groups(share_G: Tensor, sums: RoutingSums, group_E: Tensor, size_G: Tensor) -> Tensor:
    prob_G = _by_group(sums.prob_sum_E, group_E, size_G) / sums.tokens[..., None].clamp(min=1)
    return (share_G.to(prob_G.dtype) * prob_G).sum(dim=-1)


def micro_batch_share(loss: Loss, sums: RoutingSums) -> Tensor:
    """The loss of a micro-batch times its tokens. Over the step's tokens it adds up to a token-weighted mean."""
    whole = sums.total()
    return whole.tokens * loss(whole)


def sequence_share(loss: Loss, sums: RoutingSums) -> Tensor:
    """The losses of the sequences times their tokens, added up."""
    return (sums.tokens * loss(sums)).sum()


def step_share(loss: Loss, sums: RoutingSums, step: RoutingSums) -> Tensor:
    """This micro-batch's part of the loss of a whole step, times the step's tokens; a scalar.

    Summed over the step's micro-batches and ranks and divided by its tokens, the value is ``loss(step)`` and the
    gradient is *exactly* that of the loss of all tokens as one batch: the loss depends on the router through sums, so
    its gradient is ``sum_i dL/dS_i(step) * dS_i`` whatever micro-batch the ``dS_i`` come from. For the Switch loss this
    is the global f with the local P.

    Args:
        loss: a function of routing sums.
        sums: of this micro-batch.
        step: the total of the step. That of another step gives that one's value and loads.
    """
    local = sums.total()
    leaves = [
        value.detach().to(torch.float64).requires_grad_() if value.is_floating_point() else value for value in step
    ]
    with torch.enable_grad():
        value = loss(RoutingSums(*leaves))
    wanted = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
    slopes = torch.autograd.grad(value, [leaves[index] for index in wanted], allow_unused=True)
    share = sum(
        (
            (slope.to(local[index].dtype) * local[index]).sum()
            for index, slope in zip(wanted, slopes, strict=True)
            if slope is not None
        ),
        start=torch.zeros((), dtype=local.prob_sum_E.dtype, device=local.prob_sum_E.device),
    )
    return local.tokens * value.detach().to(share.dtype) + step.tokens * (share - share.detach())
