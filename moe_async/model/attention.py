"""Causal grouped-query attention with rotary positions.

Shape letters: B sequences, S positions, D model width, H query heads, G key-value heads, C width of a head.
"""

from __future__ import annotations

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from moe_async.ops.initialise import Init

QkNorm = Literal["none", "head", "full"]


def rotary_tables(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, float32 [S, C / 2] each.

    Pair ``i`` of a head turns by ``position * theta^(-2 i / C)`` (Su et al. 2021, arXiv 2104.09864, eq. 15).
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x_BHSC: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair ``(x_i, x_{i + C/2})`` by its angle; the dtype of ``x`` is kept."""
    cos, sin = (table.to(x_BHSC.dtype) for table in tables)
    first, second = x_BHSC.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def causal_mask(token_mask_BS: Tensor) -> Tensor:
    """Who attends to whom: bool [B, 1, S, S], True at [b, 0, i, j] when token i may see token j.

    Live tokens up to the position itself, and always the position itself: a row without any would be not a number.
    """
    size = token_mask_BS.shape[1]
    ones = torch.ones(size, size, dtype=torch.bool, device=token_mask_BS.device)
    itself = torch.eye(size, dtype=torch.bool, device=token_mask_BS.device)
    return (ones.tril() & token_mask_BS[:, None, None, :]) | itself


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) over torch's scaled dot-product attention.

    Args:
        dim: model width.
        heads: query heads.
        kv_heads: key-value heads; divides ``heads``.
        head_dim: width of a head.
        init: of the matrices.
        qk_norm: ``none``; ``head``: RMS norm of each head's queries and keys (Qwen3); ``full``: of all heads' together
            (OLMoE).
        norm_eps: of those norms.
    """

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, init: Init, qk_norm: QkNorm, norm_eps: float
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.init, self.qk_norm = init, qk_norm
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)
        if qk_norm != "none":
            widths = (head_dim, head_dim) if qk_norm == "head" else (heads * head_dim, kv_heads * head_dim)
            self.q_norm, self.k_norm = (nn.RMSNorm(width, eps=norm_eps) for width in widths)

    def forward(self, x_BSD: Tensor, tables: tuple[Tensor, Tensor], visible: Tensor | None = None) -> Tensor:
        """Attend to the same and earlier positions of each sequence, or to what ``visible`` (`causal_mask`) says:
        [B, S, D]."""
        widths = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = self.qkv(x_BSD).split(widths, dim=-1)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (rearrange(part, "b s (h c) -> b h s c", c=self.head_dim) for part in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        attended = functional.scaled_dot_product_attention(
            rotate(q, tables),
            rotate(k, tables),
            v,
            attn_mask=visible,
            is_causal=visible is None,
            enable_gqa=self.kv_heads != self.heads,
        )
        merged: Tensor = self.out(rearrange(attended, "b h s c -> b s (h c)"))
        return merged

    def row_blocks(self) -> dict[str, list[int]]:
        """Rows of the matrices that a parameter stacks: queries, keys and values."""
        return {"qkv.weight": [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]}

    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw the initial weights from ``seed`` and the module's ``name``."""
        self.init.fill_(self.qkv.weight, self.qkv.in_features, seed, f"{name}.qkv.weight")
        self.init.fill_(self.out.weight, self.out.in_features, seed, f"{name}.out.weight", output=True)
