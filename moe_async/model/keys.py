"""What learners exchange of a model: its parameters and selection biases, expert by expert, under global names."""

from __future__ import annotations

from collections.abc import Iterator

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
    keys["router"] += [Key(name, bias.numel()) for name, bias in _biases(model)]
    return keys


def _biases(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The selection biases of a model, by buffer name."""
    for prefix, module in model.named_modules():
        if isinstance(module, Router) and (state := module.bias_state) is not None:
            for name, buffer in module.named_buffers(prefix=prefix):
                if buffer is state.bias_E:
                    yield name, buffer


def expert_modules(model: nn.Module) -> list[str]:
    """The prefix of the experts of each MoE layer in module order, as in `moe_async.sync.fragments.Key.expert`."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in expert_ids(model)))


@torch.no_grad()
def exchanged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Views of all exchanged tensors that this model holds, by key."""
    ids = expert_ids(model)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in ids:
            tensors.update((f"{name}.{e}", parameter.detach()[i]) for i, e in enumerate(ids[name]))
        else:
            tensors[name] = parameter.detach()
    return tensors | dict(_biases(model))
