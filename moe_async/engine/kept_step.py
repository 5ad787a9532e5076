"""What a step contributes where the optimizer is at the syncer: kept for the exchange, and applied nowhere here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_async.model.keys import by_key, selection_biases


class KeptStep:
    """Takes a step's gradients, and how far its load moves the selection biases, away from a learner's model.

    Between two steps a learner has the shared values that it took last, and nothing of its own.

    Args:
        model: on this rank.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._biases = selection_biases(model)
        self._gradients: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def hold(self) -> None:
        """Take the reduced and clipped gradients away, before any optimizer sees them and before biases move."""
        self._gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for parameter in self._parameters.values():
            parameter.grad = None
        self._before = {name: bias.clone() for name, bias in self._biases.items()}

    @torch.no_grad()
    def release(self) -> dict[str, Tensor]:
        """What the step contributes, by key (`moe_async.model.keys`); call it once after each step.

        Zero where there is no gradient, as after a step that was not finite. A selection bias contributes how far it
        was moved down, so that subtracting it moves the shared one as far; the bias itself is put back.
        """
        found = {
            name: self._gradients[name] if name in self._gradients else torch.zeros_like(parameter)
            for name, parameter in self._parameters.items()
        }
        self._gradients = {}
        for name, before in self._before.items():
            found[name] = before - self._biases[name]
            self._biases[name].copy_(before)
        return by_key(self._model, found)
