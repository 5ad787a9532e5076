"""The router: one linear map to expert scores, always in float32 or wider.

Shape letters: T tokens, D model width, E experts in all, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_async.ops.initialise import normal_by_name_
from moe_async.ops.routing import Selection, WeightRule, softmax_top_k


class TopKRouter(nn.Module):
    """Softmax router that takes the K best experts of each token.

    Args:
        dim: model width.
        num_experts: experts in all.
        top_k: experts per token.
        weights: ``normalised`` or ``raw``, see `moe_async.ops.routing.softmax_top_k`.
        init_std: standard deviation of the initial weights.

    Casting the module to bfloat16 raises at the next forward: a router in bfloat16 picks other experts for several
    percent of the tokens (Fedus et al. 2021, arXiv 2101.03961, section 2.4).
    """

    def __init__(self, dim: int, num_experts: int, top_k: int, weights: WeightRule, init_std: float) -> None:
        super().__init__()
        self.top_k = top_k
        self.weights: WeightRule = weights
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_experts, dim))

    def forward(self, x_TD: Tensor, experts_TK: Tensor | None = None) -> tuple[Tensor, Selection]:
        """Router logits [T, E] and the selection; ``experts_TK`` replays a recorded choice."""
        dtype = torch.promote_types(self.weight.dtype, x_TD.dtype)
        if self.weight.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"the router's weight is {self.weight.dtype}; it must stay float32 or wider. Cast experts or dense "
                "layers alone (recipe entry `precision`), not the whole model."
            )
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = functional.linear(x_TD.to(dtype), self.weight.to(dtype))
        return logits_TE, softmax_top_k(logits_TE, self.top_k, self.weights, experts_TK)

    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw the initial weights from ``seed`` and the module's ``name``."""
        normal_by_name_(self.weight, std=self.init_std, seed=seed, name=f"{name}.weight")

    def extra_repr(self) -> str:
        """Shown in the module's printed form."""
        return f"experts={self.weight.shape[0]}, top_k={self.top_k}, weights={self.weights}"
