"""The feed-forward network that every token passes: a dense layer's, or the shared expert beside the routed ones.

Shape letters: D model width, F hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_async.ops.ffn import Activation, feed_forward, input_width
from moe_async.ops.initialise import normal_by_name_


class FeedForward(nn.Module):
    """``w_out @ act(w_in @ x)``, without biases.

    Args:
        dim: model width.
        hidden: hidden width.
        kind: ``swiglu`` or ``gelu``.
        init_std: standard deviations of the initial first and second weights.
    """

    def __init__(self, dim: int, hidden: int, kind: Activation, init_std: tuple[float, float]) -> None:
        super().__init__()
        self.kind: Activation = kind
        self.init_std = init_std
        self.w_in = nn.Parameter(torch.empty(input_width(kind, hidden), dim))
        self.w_out = nn.Parameter(torch.empty(dim, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Output in the shape of ``x`` [..., D]: in the dtype of autocast where that is on, else in that of ``x``."""
        y = feed_forward(x.to(self.w_in.dtype), self.w_in, self.w_out, self.kind)
        return y if torch.is_autocast_enabled(x.device.type) else y.to(x.dtype)

    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw the initial weights from ``seed`` and the module's ``name``."""
        normal_by_name_(self.w_in.data, std=self.init_std[0], seed=seed, name=f"{name}.w_in")
        normal_by_name_(self.w_out.data, std=self.init_std[1], seed=seed, name=f"{name}.w_out")
