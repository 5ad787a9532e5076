"""Parameter classes: which parameters are dense, which belong to routers, which to experts.

Each class has its own reduction, optimizer group and, between learners, its own synchronisation. The class follows from
the module that owns a parameter: attributes on parameters do not survive ``to_empty``, ``deepcopy`` or
``load_state_dict(assign=True)``.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from moe_async.moe.experts import Experts
from moe_async.moe.router import Router

ParameterClass = Literal["dense", "router", "expert"]


def classify(model: nn.Module) -> dict[str, ParameterClass]:
    """The class of every parameter of ``model``, by name, in the order of ``named_parameters``.

    Works on any model that contains `MoELayer`; tied parameters appear once, under their first name.
    """
    owners: dict[int, ParameterClass] = {}
    for module in model.modules():
        if isinstance(module, Experts):
            owners.update((id(parameter), "expert") for parameter in module.parameters())
        elif isinstance(module, Router):
            owners.update((id(parameter), "router") for parameter in module.parameters())
    return {name: owners.get(id(parameter), "dense") for name, parameter in model.named_parameters()}


def expert_ids(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """For each expert parameter of ``model``, by name: the global expert ids stacked along its first dimension."""
    ids: dict[str, tuple[int, ...]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Experts):
            for name, _ in module.named_parameters(prefix=prefix):
                ids[name] = module.expert_ids
    return ids
