"""The experts that one rank holds, as stacked weights.

Shape letters: L experts on this rank, R rows, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_async.ops.ffn import Activation, expert_loop, input_width
from moe_async.ops.initialise import normal_by_name_


class Experts(nn.Module):
    """Feed-forward networks of one rank's experts.

    Parameters stay in float32 (or float64) and are cast for the computation.

    Args:
        dim: model width.
        hidden: width of each expert.
        expert_ids: global ids of the experts here, in stacking order.
        kind: ``swiglu`` or ``gelu``.
        compute_dtype: dtype of the matrix products and of the rows on the wire; None: the dtype of the weights.
        init_std: standard deviations of the initial first and second weights.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        expert_ids: Sequence[int],
        kind: Activation,
        compute_dtype: torch.dtype | None,
        init_std: tuple[float, float],
    ) -> None:
        super().__init__()
        self.expert_ids = tuple(expert_ids)
        self.kind: Activation = kind
        self.compute_dtype = compute_dtype
        self.init_std = init_std
        self.w_in = nn.Parameter(torch.empty(len(self.expert_ids), input_width(kind, hidden), dim))
        self.w_out = nn.Parameter(torch.empty(len(self.expert_ids), dim, hidden))

    @property
    def row_dtype(self) -> torch.dtype:
        """Dtype in which rows arrive and leave."""
        return self.compute_dtype or self.w_in.dtype

    def forward(self, rows_RD: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
        """Outputs [R, D] of rows that are sorted by expert; ``rows_per_expert`` are L numbers that sum to R."""
        with torch.autocast(rows_RD.device.type, enabled=False):
            w_in, w_out = self.w_in.to(self.row_dtype), self.w_out.to(self.row_dtype)
            return expert_loop(rows_RD, rows_per_expert, w_in, w_out, self.kind)

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
        for parameter, tensor, std in (("w_in", self.w_in, self.init_std[0]), ("w_out", self.w_out, self.init_std[1])):
            for index, expert in enumerate(self.expert_ids):
                normal_by_name_(tensor.data[index], std=std, seed=seed, name=f"{name}.{parameter}.{expert}")

    def extra_repr(self) -> str:
        """Shown in the module's printed form."""
        return f"{self.kind}, experts={list(self.expert_ids)}, w_in={tuple(self.w_in.shape)}, rows={self.row_dtype}"
