"""The experts that one rank holds, as stacked weights.

Shape letters: L experts on this rank, P sources of rows, R rows, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from moe_async.errors import TopologyError
from moe_async.ops.ffn import (
    PRODUCTS,
    Activation,
    ExpertWeights,
    Products,
    compile_problem,
    grouped_problem,
    input_width,
    is_gated,
)
from moe_async.ops.initialise import Init
from moe_async.ops.noise import Noise, dropout_mask


class Experts(nn.Module):
    """Feed-forward networks of one rank's experts.

    Parameters stay in float32 (or float64) and are cast for the computation.

    Args:
        dim: model width.
        hidden: width of each expert.
        expert_ids: global ids of the experts here, in stacking order.
        kind: see `moe_async.ops.ffn.activate`.
        compute_dtype: dtype of the matrix products; None: the dtype of the weights.
        init: of the matrices.
        bias: whether both matrices have a bias, which begins at zero.
        dropout: share of hidden values that are zeroed in training.
        products: how the matrix products are made; ``auto``: grouped on accelerators that can, else one by one.
        compile: whether the computation runs under ``torch.compile``.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        expert_ids: Sequence[int],
        kind: Activation,
        compute_dtype: torch.dtype | None,
        init: Init,
        *,
        bias: bool = False,
        dropout: float = 0.0,
        products: Literal["auto", "loop", "grouped"] = "auto",
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.expert_ids = tuple(expert_ids)
        self.kind: Activation = kind
        self.compute_dtype = compute_dtype
        self.init = init
        self.dropout = dropout
        self.products = products
        self.compile_experts = compile
        if products == "grouped" and (problem := grouped_problem(compute_dtype or torch.float32, dim, hidden)):
            raise TopologyError(f"grouped matrix products do not work here: {problem}. Use products: auto or loop.")
        self.hidden = hidden
        local, width = len(self.expert_ids), input_width(kind, hidden)
        self.w_in = nn.Parameter(torch.empty(local, width, dim))
        self.w_out = nn.Parameter(torch.empty(local, dim, hidden))
        self.b_in = nn.Parameter(torch.empty(local, width)) if bias else None
        self.b_out = nn.Parameter(torch.empty(local, dim)) if bias else None

    @property
    def row_dtype(self) -> torch.dtype:
        """Dtype of the computation."""
        return self.compute_dtype or self.w_in.dtype

    def forward(
        self,
        rows_RD: Tensor,
        rows_PL: Sequence[Sequence[int]],
        noise: Noise | None = None,
        sources: Sequence[int] = (0,),
    ) -> Tensor:
        """Outputs [R, D] of rows that are sorted by expert and, for each expert, by source; in the rows' dtype.

        Args:
            rows_RD: rows.
            rows_PL: how many come from each of P sources for each of L experts; they sum to R.
            noise: random numbers for dropout in training; None in evaluation.
            sources: the rank that each source is.
        """
        with torch.autocast(rows_RD.device.type, enabled=False):
            mask_RF = self._dropout_mask(rows_RD, rows_PL, noise, sources)
            rows_per_expert = [sum(column) for column in zip(*rows_PL, strict=True)]
            if self.compile_experts and (problem := compile_problem(rows_RD.device)):
                raise TopologyError(f"moe.compile is on but {problem}. Install one, or use compile: false.")
            run = PRODUCTS[self._products(rows_RD.device)]
            weights = ExpertWeights(
                self._cast(self.w_in), self._cast(self.w_out), self._cast_bias(self.b_in), self._cast_bias(self.b_out)
            )
            done: Tensor = run(
                rows_RD.to(self.row_dtype), rows_per_expert, weights, self.kind, mask_RF, self.compile_experts
            )
            return done.to(rows_RD.dtype)

    def _cast(self, weight: Tensor) -> Tensor:
        return weight.to(self.row_dtype)

    def _cast_bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(self.row_dtype)

    def _products(self, device: torch.device) -> Products:
        if self.products == "loop" or (self.products == "auto" and device.type == "cpu"):
            return "loop"
        problem = grouped_problem(self.row_dtype, self.w_in.shape[-1], self.hidden)
        if problem and self.products == "grouped":
            raise TopologyError(f"grouped matrix products do not work here: {problem}. Use products: auto or loop.")
        return "loop" if problem else "grouped"

    def _dropout_mask(
        self, rows_RD: Tensor, rows_PL: Sequence[Sequence[int]], noise: Noise | None, sources: Sequence[int]
    ) -> Tensor | None:
        """Factors [R, F] on the hidden values: the same for a token's row wherever its expert lives."""
        if noise is None or not self.dropout:
            return None
        like = rows_RD.new_empty((), dtype=self.row_dtype)
        return torch.cat(
            [
                dropout_mask(
                    replace(noise, rank=source), self.dropout, (rows_PL[place][local], self.hidden), expert, like
                )
                for local, expert in enumerate(self.expert_ids)
                for place, source in enumerate(sources)
            ]
        )

    def row_blocks(self) -> dict[str, list[int]]:
        """Rows of the matrices that a parameter stacks for one expert: gate and up projection."""
        return {"w_in": [self.hidden, self.hidden]} if is_gated(self.kind) else {}

    def get_extra_state(self) -> Tensor:
        """The global expert ids, so that a state dict knows which experts it holds."""
        return torch.tensor(self.expert_ids, dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse the state dict of another rank's experts: its tensors have the same names and shapes."""
        if state.tolist() != list(self.expert_ids):
            raise ValueError(
                f"this state dict holds the experts {state.tolist()} but the layer holds {list(self.expert_ids)}; load "
                "the state dict of the same rank, or a checkpoint, which has one key per expert."
            )

    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw each expert's initial weights from ``seed``, the module's ``name`` and the expert's global id."""
        for index, expert in enumerate(self.expert_ids):
            self.init.fill_(self.w_in[index], self.w_in.shape[-1], seed, f"{name}.w_in.{expert}")
            self.init.fill_(self.w_out[index], self.hidden, seed, f"{name}.w_out.{expert}", output=True)
        for bias in (self.b_in, self.b_out):
            if bias is not None:
                nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        """Shown in the module's printed form."""
        return f"{self.kind}, experts={list(self.expert_ids)}, w_in={tuple(self.w_in.shape)}, rows={self.row_dtype}"
