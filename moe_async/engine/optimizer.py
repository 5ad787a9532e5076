"""The recipe's optimizer: its groups of parameters, its making, and the state it starts with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from moe_async.recipe import OptimSection


def parameter_groups(
    named: Mapping[str, nn.Parameter], classes: Mapping[str, str], weight_decay: float, expert_name: str
) -> list[dict[str, Any]]:
    """Optimizer groups: dense matrices, dense vectors (no weight decay), routers, experts; none of them empty.

    Vectors (norms) do not decay: a pull to zero of a gain is no regulariser.
    """
    chosen: dict[str, list[nn.Parameter]] = {"dense": [], "vectors": [], "router": [], "expert": []}
    for name, parameter in named.items():
        kind = classes[name]
        chosen["vectors" if kind == "dense" and parameter.ndim < 2 else kind].append(parameter)
    groups: list[dict[str, Any]] = []
    for kind, parameters in chosen.items():
        decay = 0.0 if kind == "vectors" else weight_decay
        group: dict[str, Any] = {"params": parameters, "name": kind, "weight_decay": decay}
        if kind == "expert":
            # DeepSpeed knows the groups of experts by this name and mark.
            group.update(name=expert_name, moe=True)
        if parameters:
            groups.append(group)
    return groups


def make_optimizer(optim: OptimSection, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The recipe's optimizer over ready groups. AdamW decays weights apart from the gradient, SGD within it."""
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


def prime_state(optimizer: torch.optim.Optimizer, optim: OptimSection) -> tuple[str, ...]:
    """Fill the state that the first step would create, with the same values; the keys of its full-size tensors.

    DeepSpeed links a parameter's slice to the optimizer's state once, so the state must exist before.
    """
    keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    if optim.kind == "sgd":
        keys = ("momentum_buffer",) if optim.momentum else ()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if optim.kind == "adamw":
                state["step"] = torch.tensor(0.0)
            for key in keys:
                state[key] = torch.zeros_like(parameter)
    return keys
