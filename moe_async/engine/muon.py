"""Muon for hidden matrices, one matrix at a time, and AdamW for all other parameters.

The orthogonalised update is that of `torch.optim.Muon`; this optimizer cuts stacked parameters into their matrices:
each expert on its own, gates and up projections, queries, keys and values apart. So the update of an expert does not
depend on which experts are stacked beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_async.moe.classes import ParameterClass

BUFFER = "momentum_buffer"


class Muon(torch.optim.Optimizer):
    """Muon over matrices and AdamW over the rest, as one optimizer.

    Muon (Jordan et al. 2024) moves a matrix by the orthogonal factor of its momentum; the step is scaled as by Liu et
    al. 2025 (arXiv 2502.16982, eq. 4), ``0.2 * sqrt(max(rows, columns))``, so that one learning rate suits both.

    Args:
        groups: parameter groups; those with ``blocks`` (a list of row counts per parameter, or None for a parameter
            that is one matrix) are moved by Muon.
        lr: learning rate, also of groups without their own.
        momentum: of Muon.
        betas, eps: of AdamW.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, momentum: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(list(groups), {"lr": lr, "weight_decay": 0.0})
        self._inner: list[torch.optim.Optimizer] = []
        self._matrices: list[list[tuple[nn.Parameter, list[nn.Parameter]]]] = []
        for group in self.param_groups:
            cuts = group.get("blocks")
            if cuts is None:
                self._matrices.append([])
                self._inner.append(torch.optim.AdamW(group["params"], lr=lr, betas=betas, eps=eps))
                continue
            pairs = [
                (parameter, [nn.Parameter(matrix) for matrix in matrices_of(parameter.data, rows)])
                for parameter, rows in zip(group["params"], cuts, strict=True)
            ]
            self._matrices.append(pairs)
            matrices = [matrix for _, parts in pairs for matrix in parts]
            self._inner.append(torch.optim.Muon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"))

    def prime(self) -> None:
        """Make the state that the first step would make."""
        for pairs, inner in zip(self._matrices, self._inner, strict=True):
            for parameter, parts in pairs:
                buffer = torch.zeros_like(parameter)
                self.state[parameter][BUFFER] = buffer
                rows = [part.shape[0] for part in parts]
                for part, view in zip(parts, matrices_of(buffer, rows), strict=True):
                    inner.state[part][BUFFER] = view
            if not pairs:
                for parameter in inner.param_groups[0]["params"]:
                    state = self.state[parameter]
                    state.update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )
                    inner.state[parameter] = state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group, pairs, inner in zip(self.param_groups, self._matrices, self._inner, strict=True):
            for own in inner.param_groups:
                own["lr"], own["weight_decay"] = group["lr"], group["weight_decay"]
            for parameter, parts in pairs:
                rows = [part.shape[0] for part in parts]
                gradients: Sequence[Tensor | None] = [None] * len(parts)
                if parameter.grad is not None:
                    gradients = matrices_of(parameter.grad.contiguous(), rows)
                matrices = matrices_of(parameter.data, rows)
                for part, matrix, gradient in zip(parts, matrices, gradients, strict=True):
                    # Anew in each step: what a parameter holds may have been replaced.
                    part.data, part.grad = matrix, gradient
            inner.step()


def matrices_of(tensor: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
    """Views of the matrices in a parameter, [rows, columns] each.

    Args:
        tensor: one matrix or a stack of them.
        rows: of the blocks of each matrix of the stack; repeated over the stack; None: each is one block.
    """
    # A view or an error: a copy of a parameter that is not contiguous would be updated in its place.
    flat = tensor.view(-1, tensor.shape[-1])
    sizes = list(rows) if rows is not None else [tensor.shape[-2]]
    return list(flat.split(sizes * (flat.shape[0] // sum(sizes))))


def hidden_matrices(model: nn.Module, classes: Mapping[str, ParameterClass]) -> dict[str, list[int] | None]:
    """The parameters that Muon moves, and how they are cut: expert and dense matrices, but neither embeddings nor the
    output layer, which follow tokens one by one, nor routers."""
    blocks: dict[str, list[int]] = {}
    chosen: dict[str, list[int] | None] = {}
    vocabulary = _vocabulary_weights(model)
    for prefix, module in model.named_modules():
        if hasattr(module, "row_blocks"):
            blocks.update({f"{prefix}.{name}".lstrip("."): rows for name, rows in module.row_blocks().items()})
    for name, parameter in model.named_parameters():
        of_matrices = parameter.ndim == (3 if classes[name] == "expert" else 2)
        if of_matrices and classes[name] != "router" and id(parameter) not in vocabulary and min(parameter.shape) > 1:
            chosen[name] = blocks.get(name)
    return chosen


def _vocabulary_weights(model: nn.Module) -> set[int]:
    """Ids of the embeddings' weights, and of linear maps onto a vocabulary."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = {embedding.num_embeddings for embedding in embeddings}
    # The linear maps inside a module that says how its matrices are stacked are hidden ones, whatever their size.
    inner = {id(part) for module in model.modules() if hasattr(module, "row_blocks") for part in module.modules()}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and id(module) not in inner]
    outputs = [linear for linear in linears if linear.out_features in sizes]
    return {id(module.weight) for module in (*embeddings, *outputs)}
