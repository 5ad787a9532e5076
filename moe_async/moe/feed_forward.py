"""The feed-forward network that every token passes: a dense layer's, or the shared expert beside the routed ones.

Shape letters: D model width, F hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_async.ops.ffn import Activation, feed_forward, input_width, is_gated
from moe_async.ops.initialise import Init


class FeedForward(nn.Module):
    """``w_out @ act(w_in @ x)``, without biases.

    Args:
        dim: model width.
        hidden: hidden width.
        kind: see `moe_async.ops.ffn.activate`.
        init: of the matrices.
    """

    def __init__(self, dim: int, hidden: int, kind: Activation, init: Init) -> None:
        super().__init__()
        self.kind: Activation = kind
        self.init = init
        self.w_in = nn.Parameter(torch.empty(input_width(kind, hidden), dim))
        self.w_out = nn.Parameter(torch.empty(dim, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Output in the shape of ``x`` [..., D]: in the dtype of autocast where that is on, else in that of ``x``."""
        y = feed_forward(x.to(self.w_in.dtype), self.w_in, self.w_out, self.kind)
        return y if torch.is_autocast_enabled(x.device.type) else y.to(x.dtype)

    def row_blocks(self) -> dict[str, list[int]]:
        """Rows of the matrices that a parameter stacks: gate and up projection."""
        hidden = self.w_out.shape[1]
        return {"w_in": [hidden, hidden]} if is_gated(self.kind) else {}

    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw the initial weights from ``seed`` and the module's ``name``."""
        self.init.fill_(self.w_in, self.w_in.shape[1], seed, f"{name}.w_in")
        self.init.fill_(self.w_out, self.w_out.shape[1], seed, f"{name}.w_out", output=True)
