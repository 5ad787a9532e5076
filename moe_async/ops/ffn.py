"""The networks of experts: stacked weights, rows sorted by expert.

Shape letters: L experts on this rank, R rows, D model width, F expert width (2F for the first weights of gated kinds).
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["swiglu", "gelu", "relu2", "swiglu_clamped"]
Products = Literal["loop", "grouped"]

CLAMP, STEEPNESS = 7.0, 1.702
"""Limit and gate factor of ``swiglu_clamped``, as gpt-oss has them."""


class ExpertWeights(NamedTuple):
    """Stacked weights of the experts of one rank, in the dtype of the computation.

    Attributes:
        w_in_LFD: first matrices.
        w_out_LDF: second matrices.
        b_in_LF: first biases, or None.
        b_out_LD: second biases, or None.
    """

    w_in_LFD: Tensor
    w_out_LDF: Tensor
    b_in_LF: Tensor | None = None
    b_out_LD: Tensor | None = None


def is_gated(kind: Activation) -> bool:
    """Whether the first matrix stacks a gate above an up projection."""
    return kind in ("swiglu", "swiglu_clamped")


def input_width(kind: Activation, hidden: int) -> int:
    """Rows of the first weight matrix: gated kinds stack their gate above their up projection."""
    return 2 * hidden if is_gated(kind) else hidden


def activate(kind: Activation, hidden: Tensor) -> Tensor:
    """Apply the activation to the first projection's output.

    ``swiglu``: the first half is the gate, ``silu(gate) * up`` (Shazeer 2020, arXiv 2002.05202, eq. 6);
    ``gelu``: the exact Gaussian error linear unit (Hendrycks and Gimpel 2016, arXiv 1606.08415);
    ``relu2``: ``max(x, 0)^2`` (So et al. 2021, arXiv 2109.08668);
    ``swiglu_clamped``: ``g * sigmoid(1.702 g) * (u + 1)`` with ``g = min(gate, 7)`` and ``u = clamp(up, -7, 7)``
    (gpt-oss, arXiv 2508.10925).
    """
    if kind == "swiglu":
        gate, up = hidden.chunk(2, dim=-1)
        return functional.silu(gate) * up
    if kind == "swiglu_clamped":
        gate, up = hidden.chunk(2, dim=-1)
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return gate * torch.sigmoid(STEEPNESS * gate) * (up + 1)
    if kind == "relu2":
        return functional.relu(hidden).square()
    if kind == "gelu":
        return functional.gelu(hidden)
    raise ValueError(f"the kind of expert is {kind!r}; it must be swiglu, gelu, relu2 or swiglu_clamped.")


def feed_forward(x: Tensor, w_in: Tensor, w_out: Tensor, kind: Activation) -> Tensor:
    """One feed-forward network: ``w_out @ act(w_in @ x)`` with ``w_in`` [F or 2F, D] and ``w_out`` [D, F]."""
    return functional.linear(activate(kind, functional.linear(x, w_in)), w_out)


def hidden_values(projected: Tensor, bias: Tensor | None, mask: Tensor | None, kind: Activation) -> Tensor:
    """What lies between an expert's two matrix products."""
    hidden = activate(kind, projected if bias is None else projected + bias)
    return hidden if mask is None else hidden * mask


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function under ``torch.compile``, for any number of rows without compiling again.

    Row counts are known on the host before, so nothing inside breaks the graph. The first calls take seconds to a
    minute.

    Raises:
        RuntimeError: at the first call on a CPU, without a C++ compiler.
    """
    return torch.compile(function, dynamic=True)


def expert_loop(
    rows_RD: Tensor,
    rows_per_expert: Sequence[int],
    weights: ExpertWeights,
    kind: Activation,
    mask_RF: Tensor | None = None,
    compile: bool = False,
) -> Tensor:
    """Run each expert over its own rows, one matrix product after another: [R, D].

    Experts without rows take part with an empty product, so that every expert's weights get a gradient (zeros) in
    every backward; a missing gradient on one replica alone would hang a partitioned optimizer.

    Args:
        rows_RD: rows sorted by expert.
        rows_per_expert: L numbers that sum to R.
        weights: stacked weights.
        kind: the activation.
        mask_RF: factors on the hidden values (dropout), or None.
        compile: run what lies between the two products under ``torch.compile``.
    """
    sizes = _checked_sizes(rows_RD, rows_per_expert, weights)
    between = compiled(hidden_values) if compile else hidden_values
    nothing: Sequence[None] = [None] * len(sizes)
    # One unbind for all experts: indexing inside the loop would make a full-size zero gradient per expert.
    w_in, w_out = weights.w_in_LFD.unbind(0), weights.w_out_LDF.unbind(0)
    b_in = nothing if weights.b_in_LF is None else weights.b_in_LF.unbind(0)
    b_out = nothing if weights.b_out_LD is None else weights.b_out_LD.unbind(0)
    masks = nothing if mask_RF is None else mask_RF.split(sizes)
    outputs = []
    for index, rows in enumerate(rows_RD.split(sizes)):
        # The bias goes into the product: slices of it begin at different places, which compiled code tells apart.
        hidden = between(functional.linear(rows, w_in[index], b_in[index]), None, masks[index], kind)
        outputs.append(functional.linear(hidden, w_out[index], b_out[index]))
    return torch.cat(outputs)


def expert_grouped(
    rows_RD: Tensor,
    rows_per_expert: Sequence[int],
    weights: ExpertWeights,
    kind: Activation,
    mask_RF: Tensor | None = None,
    compile: bool = False,
) -> Tensor:
    """The same as `expert_loop` with two grouped matrix products (``torch.nn.functional.grouped_mm``).

    ``compile`` is about what lies between them.
    """
    if rows_RD.shape[0] == 0:
        return expert_loop(rows_RD, rows_per_expert, weights, kind, mask_RF)
    sizes = torch.tensor(_checked_sizes(rows_RD, rows_per_expert, weights), device=rows_RD.device)
    ends = sizes.cumsum(0).to(torch.int32)

    def by_row(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.repeat_interleave(sizes, dim=0, output_size=rows_RD.shape[0])

    between = compiled(hidden_values) if compile else hidden_values
    hidden = between(_grouped(rows_RD, weights.w_in_LFD, ends), by_row(weights.b_in_LF), mask_RF, kind)
    output, bias = _grouped(hidden, weights.w_out_LDF, ends), by_row(weights.b_out_LD)
    return output if bias is None else output + bias


def _checked_sizes(rows_RD: Tensor, rows_per_expert: Sequence[int], weights: ExpertWeights) -> list[int]:
    sizes, experts = list(rows_per_expert), weights.w_in_LFD.shape[0]
    if len(sizes) != experts or sum(sizes) != rows_RD.shape[0]:
        raise ValueError(
            f"the row counts {sizes} do not fit {rows_RD.shape[0]} rows for {experts} experts; give one count for each "
            "expert, also 0, and let them add up to the rows."
        )
    return sizes


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    output = functional.grouped_mm(rows.contiguous(), weights.transpose(-2, -1), offs=ends)
    if output.requires_grad:
        # The kernel's backward refuses the expanded gradient of a plain sum.
        output.register_hook(torch.Tensor.contiguous)
    return output


def grouped_problem(dtype: torch.dtype, *widths: int) -> str:
    """Why grouped products cannot be used for these widths; empty when they can."""
    if not hasattr(functional, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm (2.10 or newer has it)"
    if dtype not in (torch.bfloat16, torch.float32, torch.float16):
        return f"they compute in bfloat16, float16 or float32 and not in {dtype}"
    if odd := [width for width in widths if width * dtype.itemsize % 16]:
        return f"a row of {odd[0]} numbers of {dtype} is {odd[0] * dtype.itemsize} bytes and must be a multiple of 16"
    return ""


def compile_problem(device: torch.device) -> str:
    """Why ``torch.compile`` cannot work on this device; empty when it can."""
    if device.type != "cpu" or any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return ""
    return "torch.compile makes C++ code on CPUs and there is no C++ compiler (g++, clang++) on the path"


PRODUCTS: dict[Products, Callable[..., Tensor]] = {"loop": expert_loop, "grouped": expert_grouped}
"""The ways to run experts over their rows, all with the same numbers."""
