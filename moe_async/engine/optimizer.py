"""The recipe's optimizer: its groups of parameters, its making, and the state it starts with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_async.moe.classes import ParameterClass

if TYPE_CHECKING:
    from moe_async.recipe import OptimSection


def parameter_groups(
    named: Mapping[str, nn.Parameter], classes: Mapping[str, ParameterClass], optim: OptimSection, expert_name: str
) -> list[dict[str, Any]]:
    """Optimizer groups: dense matrices, dense vectors, routers, experts; none of them empty.

    Vectors (norms) do not decay: a pull to zero of a gain is no regulariser. Each group has its class's factor on the
    learning rate as ``lr_scale``.

    Args:
        named: trainable parameters by name.
        classes: the class of each.
        optim: the recipe's ``optim`` section.
        expert_name: by which DeepSpeed knows the groups of experts.
    """
    settings = {"dense": optim.dense, "router": optim.router, "expert": optim.expert}
    keys: tuple[tuple[ParameterClass, bool], ...] = (
        ("dense", True),
        ("dense", False),
        ("router", True),
        ("expert", True),
    )
    chosen: dict[tuple[ParameterClass, bool], list[nn.Parameter]] = {key: [] for key in keys}
    for name, parameter in named.items():
        chosen[classes[name], classes[name] != "dense" or parameter.ndim > 1].append(parameter)
    groups: list[dict[str, Any]] = []
    for (kind, decays), parameters in chosen.items():
        own = settings[kind]
        decay = optim.weight_decay if own.weight_decay is None else own.weight_decay
        group: dict[str, Any] = {
            "params": parameters,
            "name": kind if decays else "vectors",
            "weight_decay": decay if decays else 0.0,
            "lr_scale": own.lr_scale,
        }
        if kind == "expert":
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
