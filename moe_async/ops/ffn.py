"""The networks of experts: stacked weights, rows sorted by expert.

Shape letters: L experts on this rank, R rows, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["swiglu", "gelu", "relu2"]


def input_width(kind: Activation, hidden: int) -> int:
    """Rows of the first weight matrix: SwiGLU stacks its gate above its up projection."""
    return 2 * hidden if kind == "swiglu" else hidden


def activate(kind: Activation, hidden: Tensor) -> Tensor:
    """Apply the activation to the first projection's output.

    ``swiglu``: the first half is the gate, ``silu(gate) * up`` (Shazeer 2020, arXiv 2002.05202, eq. 6);
    ``gelu``: the exact Gaussian error linear unit (Hendrycks and Gimpel 2016, arXiv 1606.08415);
    ``relu2``: ``max(x, 0)^2`` (So et al. 2021, arXiv 2109.08668).
    """
    if kind == "swiglu":
        gate, up = hidden.chunk(2, dim=-1)
        return functional.silu(gate) * up
    if kind == "relu2":
        return functional.relu(hidden).square()
    return functional.gelu(hidden)


def feed_forward(x: Tensor, w_in: Tensor, w_out: Tensor, kind: Activation) -> Tensor:
    """One feed-forward network: ``w_out @ act(w_in @ x)`` with ``w_in`` [F or 2F, D] and ``w_out`` [D, F]."""
    return functional.linear(activate(kind, functional.linear(x, w_in)), w_out)


def expert_loop(
    rows_RD: Tensor, rows_per_expert: Sequence[int], w_in_LFD: Tensor, w_out_LDF: Tensor, kind: Activation
) -> Tensor:
    """Run each expert over its own rows, one matrix product after another: [R, D].

    Experts without rows take part with an empty product, so that every expert's weights get a gradient (zeros) in
    every backward; a missing gradient on one replica alone would hang a partitioned optimizer.

    Args:
        rows_RD: rows sorted by expert.
        rows_per_expert: L numbers that sum to R.
        w_in_LFD: stacked first weights, [L, F, D] or [L, 2F, D] for SwiGLU.
        w_out_LDF: stacked second weights.
        kind: the activation.
    """
    # One unbind for all experts: indexing inside the loop would make a full-size zero gradient per expert.
    outputs = [
        feed_forward(rows, w_in, w_out, kind)
        for rows, w_in, w_out in zip(
            rows_RD.split(list(rows_per_expert)), w_in_LFD.unbind(0), w_out_LDF.unbind(0), strict=True
        )
    ]
    return torch.cat(outputs)
