"""The optimizer that a recipe names, over parameter groups that DeepSpeed accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_async.engine.muon import Muon
from moe_async.moe.classes import ParameterClass

if TYPE_CHECKING:
    from moe_async.recipe import OptimSection


def parameter_groups(
    named: Mapping[str, nn.Parameter],
    classes: Mapping[str, ParameterClass],
    optim: OptimSection,
    expert_name: str,
    muon: Mapping[str, list[int] | None],
) -> list[dict[str, Any]]:
    """Optimizer groups by class, matrices apart from vectors and from what Muon moves; none of them empty.

    Each group has its class's factor on the learning rate as ``lr_scale``.

    Args:
        named: trainable parameters by name.
        classes: the class of each.
        optim: the recipe's ``optim`` section.
        expert_name: by which DeepSpeed knows the groups of experts.
        muon: what Muon moves, and how it is cut (`moe_async.engine.muon.hidden_matrices`); empty for other optimizers.
    """
    chosen: dict[tuple[ParameterClass, str], list[str]] = {}
    for name, parameter in named.items():
        kind = classes[name]
        form = "muon" if name in muon else "vectors" if _is_vector(parameter, kind) else "matrices"
        chosen.setdefault((kind, form), []).append(name)
    groups: list[dict[str, Any]] = []
    for (kind, form), names in sorted(chosen.items()):
        lr_scale, weight_decay = treatment(optim, kind, named[names[0]])
        group: dict[str, Any] = {
            "params": [named[name] for name in names],
            "name": f"{kind} {form}",
            "weight_decay": weight_decay,
            "lr_scale": lr_scale,
        }
        if form == "muon":
            group["blocks"] = [muon[name] for name in names]
        if kind == "expert":
            group.update(name=expert_name, moe=True)
        groups.append(group)
    return groups


def treatment(optim: OptimSection, kind: ParameterClass, parameter: nn.Parameter) -> tuple[float, float]:
    """The factor on the learning rate of a parameter, and its weight decay.

    Vectors (norms and biases) do not decay: a pull to zero of a gain is no regulariser.
    """
    own = {"dense": optim.dense, "router": optim.router, "expert": optim.expert}[kind]
    decay = optim.weight_decay if own.weight_decay is None else own.weight_decay
    return own.lr_scale, 0.0 if _is_vector(parameter, kind) else decay


def _is_vector(parameter: nn.Parameter, kind: ParameterClass) -> bool:
    # Experts are stacked along the first dimension.
    return parameter.ndim <= (2 if kind == "expert" else 1)


def make_optimizer(optim: OptimSection, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The recipe's optimizer over ready groups. AdamW and Muon decay weights apart from the gradient, SGD within it."""
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    if optim.kind == "muon":
        return Muon(groups, optim.lr, optim.momentum, optim.betas, optim.eps)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


def stateless(optim: OptimSection) -> OptimSection:
    """An optimizer without any state, for a learner whose optimizer is at the syncer: it never gets a gradient."""
    return optim.model_copy(update={"kind": "sgd", "momentum": 0.0})


def prime_state(optimizer: torch.optim.Optimizer, optim: OptimSection) -> tuple[str, ...]:
    """Fill the state that the first step would create, with the same values; the keys of its full-size tensors.

    DeepSpeed links a parameter's slice to the optimizer's state once, so the state must exist before.
    """
    if isinstance(optimizer, Muon):
        optimizer.prime()
        return ("exp_avg", "exp_avg_sq", "momentum_buffer")
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
