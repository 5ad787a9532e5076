"""Takes the experts of a few tokens out of a model's forward passes.

Shape letters: T tokens of a forward pass, N sampled tokens, L MoE layers, K experts per token, B sequences,
S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_async.observe.paths import NO_EXPERT, Array, Paths

SAMPLED_TOKENS = 16
_STRIDE = 7919


class PathSampler:
    """Watches MoE layers whose output has ``selection`` (as `moe_async.MoEOutput`), while the model trains.

    Args:
        layers: in the order of the model; each is to see the same tokens.
        top_k: experts per token that are kept.
        tokens: sampled tokens of a forward pass, spread over it.
    """

    def __init__(self, layers: Sequence[nn.Module], top_k: int, tokens: int = SAMPLED_TOKENS) -> None:
        self._top_k, self._tokens = top_k, tokens
        self._number = len(layers)
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}
        self._wanted = False
        self._turn = 0
        self._hooks = [layer.register_forward_hook(self._hook(place)) for place, layer in enumerate(layers)]

    def want(self) -> None:
        """Sample the next forward pass of each layer."""
        self._taken.clear()
        self._wanted = True
        self._turn += 1

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()

    def paths(
        self,
        step: int,
        tokens_BS: Tensor,
        mask_BS: Tensor | None = None,
        domains_B: Tensor | None = None,
        none: int = 0,
    ) -> Paths | None:
        """What was sampled, once every layer has been seen; None else.

        Args:
            step: its number.
            tokens_BS: the ids of the forward pass's tokens.
            mask_BS: False for tokens that were not routed.
            domains_B: index of each sequence's domain.
            none: index of no domain.
        """
        if not self._wanted or len(self._taken) < self._number or not self._number:
            return None
        self._wanted = False
        place_N = self._taken[0][0]
        if place_N.numel() == 0 or int(place_N.max()) >= tokens_BS.numel():
            return None
        experts = [taken_first(self._taken[layer][1].cpu().numpy(), self._top_k) for layer in range(self._number)]
        rows_N = place_N // tokens_BS.shape[-1]
        domains = torch.full((len(place_N),), none) if domains_B is None else domains_B.cpu()[rows_N]
        paths = Paths(
            np.full(len(place_N), step), tokens_BS.reshape(-1).cpu()[place_N], domains, np.stack(experts, axis=1)
        )
        return paths if mask_BS is None else paths.chosen(mask_BS.reshape(-1).cpu()[place_N].numpy())

    def _hook(self, layer: int) -> Any:
        def take(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self._wanted or layer in self._taken or not module.training:
                return
            selection_TK = output.selection.detach().reshape(-1, output.selection.shape[-1])
            place_N = spread_places(len(selection_TK), self._tokens, self._turn)
            self._taken[layer] = place_N, selection_TK[place_N.to(selection_TK.device)]

        return take


def spread_places(tokens: int, number: int, turn: int) -> Tensor:
    """Where sampled tokens stand among those of a forward pass, int64 [N]: spread evenly, from another place on at
    each turn; ``number`` of them at most."""
    number = min(number, tokens)
    return ((torch.arange(number) * tokens) // max(number, 1) + turn * _STRIDE) % max(tokens, 1)


def taken_first(selection_NK: Array, top_k: int) -> Array:
    """The experts that each token took, int64 [N, top_k]; `NO_EXPERT` behind them where it took fewer."""
    taken = np.where(selection_NK >= 0, selection_NK, NO_EXPERT)
    if taken.shape[1] > top_k:
        order = np.argsort(taken < 0, axis=1, kind="stable")
        taken = np.take_along_axis(taken, order, axis=1)[:, :top_k]
    missing = top_k - taken.shape[1]
    return np.pad(taken, ((0, 0), (0, missing)), constant_values=NO_EXPERT)
