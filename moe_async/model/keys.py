"""What learners exchange of a model: its parameters and selection biases, expert by expert, under global names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe_async.moe.classes import ParameterClass, classify, expert_ids
from moe_async.moe.router import Router
from moe_async.sync.fragments import Key


def exchange_keys(model: nn.Module, num_experts: int) -> dict[ParameterClass, list[Key]]:
    """The keys of each class, the same on every rank whichever experts it holds.

    A bias that balances routing travels as a parameter of class router; counts, moments and what a controller remembers
    stay with their learner. Frozen parameters are the same everywhere and do not travel.
    """
    ids = expert_ids(model)
    keys: dict[ParameterClass, list[Key]] = {"dense": [], "router": [], "expert": []}
    for name, kind in classify(model).items():
        parameter = model.get_parameter(name)
        if not parameter.requires_grad:
            continue
        if name in ids:
            module = name.rpartition(".")[0]
            size = parameter.numel() // len(ids[name])
            keys[kind] += [Key(f"{name}.{e}", size, f"{module}.{e}", e) for e in range(num_experts)]
        else:
            keys[kind].append(Key(name, parameter.numel()))
    keys["router"] += [Key(name, bias.numel()) for name, bias in selection_biases(model).items()]
    return keys


def selection_biases(model: nn.Module) -> dict[str, Tensor]:
    """The selection biases of a model themselves, by buffer name."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Router) and (state := module.bias_state) is not None:
            found.update((name, b) for name, b in module.named_buffers(prefix=prefix) if b is state.bias_E)
    return found


def expert_modules(model: nn.Module) -> list[str]:
    """The prefix of the experts of each MoE layer in module order, as in `moe_async.sync.fragments.Key.expert`."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in expert_ids(model)))


@torch.no_grad()
def exchanged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Views of all exchanged tensors that this model holds, by key."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return by_key(model, named | selection_biases(model))


def by_key(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name and in the shape of the parameters or biases that they belong to, cut into views by key."""
    ids = expert_ids(model)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in ids:
            found.update((f"{name}.{e}", tensor[i]) for i, e in enumerate(ids[name]))
        else:
            found[name] = tensor
    return found
