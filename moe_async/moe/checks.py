"""What a MoE layer refuses: sizes that do not fit, tensors of the wrong shape, values that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_async.comm import Group
from moe_async.errors import TopologyError
from moe_async.recipe.moe import MoeSection
from moe_async.topology import Topology


def check_sizes(section: MoeSection, vocab_size: int | None, topology: Topology) -> None:
    """Refuse a layer that does not fit its topology, or a hash router without a vocabulary."""
    if topology.num_experts != section.num_experts:
        raise TopologyError(
            f"the layer has {section.num_experts} experts but the topology was made for {topology.num_experts}; "
            f"use Topology(..., num_experts={section.num_experts})."
        )
    if section.router.kind == "hash" and not vocab_size:
        raise TopologyError("the hash router has an expert for every token id; say how many with vocab_size.")


def check_mask(token_mask: Tensor, x: Tensor) -> None:
    """Refuse a mask that is not bool or has not the leading shape of ``x``."""
    if token_mask.dtype != torch.bool or token_mask.shape != x.shape[:-1]:
        raise ValueError(
            f"token_mask is {token_mask.dtype} {tuple(token_mask.shape)}; it must be torch.bool with the leading "
            f"shape of x, {tuple(x.shape[:-1])} (True: the token counts)."
        )


def check_leading_shape(x: Tensor, **tensors: Tensor | None) -> None:
    """Refuse tensors by name that are not int64 or have not the leading shape of ``x``."""
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.dtype != torch.int64 or tensor.shape != x.shape[:-1]):
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} over the tokens; it must be torch.int64 with the "
                f"leading shape of x, {tuple(x.shape[:-1])}."
            )


def check_selection(selection: Tensor, x: Tensor, section: MoeSection) -> None:
    """Refuse a recorded routing that is not int64 [..., K] over the tokens of ``x``."""
    wide = selection.dim() > 0 and (selection.shape[-1] == section.top_k or section.router.kind == "expert_choice")
    if selection.dtype != torch.int64 or not wide or selection.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"selection is {selection.dtype} {tuple(selection.shape)}; it must be torch.int64 with the leading shape "
            f"of x, {tuple(x.shape[:-1])}, and {section.top_k} places behind."
        )


def refuse_non_finite(x: Tensor, group: Group) -> None:
    """Refuse tokens with values that are not finite: on all ranks of the group alike. Every rank calls it; blocks."""
    bad = (~x.detach().isfinite()).any(dim=-1)
    worst = group.all_reduce(bad.any().long(), "max")
    if not worst:
        return
    where = bad.nonzero()[:1].tolist()
    found = (
        f"{int(bad.sum())} of {bad.numel()} tokens of x hold values that are not finite, the first at {where[0]}"
        if where
        else "another rank of the expert group has tokens with values that are not finite"
    )
    raise ValueError(
        f"{found}; every value must be a finite number. Look for the operation before this layer that made them (a "
        "learning rate that is too high, a division by zero), or mask those tokens with token_mask."
    )
