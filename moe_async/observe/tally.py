"""Adds up what the routers did in one step: over micro-batches where they computed, then over ranks.

Shape letters: L MoE layers, B sequences, E choices of the router, R ranks, C domains, X figures of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_async.comm import Group
from moe_async.observe.store import LoadMeta
from moe_async.observe.windows import Array
from moe_async.ops.sums import RoutingSums

_SUMS = {
    "tokens": "tokens", "entropy": "entropy_sum", "z": "z_sum", "top": "top_sum", "margin": "margin_sum",
    "bad_tokens": "bad_tokens", "counts": "counts_E", "dropped": "dropped_E", "prob": "prob_sum_E",
}  # fmt: skip
StepFigures = dict[str, Array]
"""Figures of one step by the names of `observe.windows.FIELDS`, without those that follow from them."""


class StepTally:
    """What one rank has seen of one step so far, kept where its routers compute.

    Args:
        meta: what the axes are.
        device: of the routing sums.
    """

    def __init__(self, meta: LoadMeta, device: torch.device | None = None) -> None:
        self._meta, self._device = meta, device or torch.device("cpu")
        sizes = meta.sizes
        wide, domains = (sizes.choices,), (sizes.domains,)
        self._shapes: dict[str, tuple[int, ...]] = {
            **{name: wide if source.endswith("_E") else () for name, source in _SUMS.items()},
            "micro_violation": (),
            "domain_tokens": domains,
            "domain_counts": domains + wide,
        }
        width = sum(math.prod(shape) for shape in self._shapes.values())
        self._sums_LX = torch.zeros(sizes.layers, width, dtype=torch.float64, device=self._device)
        self._worst_L = torch.zeros(sizes.layers, dtype=torch.float64, device=self._device)
        self._micro_batches = 0

    @torch.no_grad()
    def add(self, routing: Sequence[RoutingSums], domains_B: Tensor | None = None) -> None:
        """Take the sums of one micro-batch on this rank; the device is not waited for.

        Args:
            routing: of each layer, one row per sequence.
            domains_B: int64, index of each sequence's domain; None: no label.
        """
        self._micro_batches += 1
        if not routing:
            return
        rows = routing[0].counts_E.shape[0]
        none = self._meta.sizes.domains - 1
        domains = torch.full((rows,), none) if domains_B is None else domains_B
        labels_CB = torch.nn.functional.one_hot(domains.to(self._device), none + 1).double().t()
        layers = [
            self._of_layer(sums, labels_CB, experts) for sums, experts in zip(routing, self._meta.experts, strict=True)
        ]
        self._sums_LX += torch.stack([row for row, _ in layers])
        self._worst_L = torch.maximum(self._worst_L, torch.stack([violation for _, violation in layers]))

    def _of_layer(self, sums: RoutingSums, labels_CB: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """All figures of a micro-batch in one row, and its MaxVio."""
        wide, counts_BE = self._meta.sizes.choices, sums.counts_E.double()
        total = {name: getattr(sums, source).detach().sum(dim=0).double() for name, source in _SUMS.items()}
        loads_E = total["counts"][:experts]
        mean = loads_E.mean()
        violation = torch.where(mean > 0, loads_E.max() / mean.clamp(min=1e-300) - 1.0, 0.0)
        figures = {
            **total,
            "micro_violation": violation,
            "domain_tokens": labels_CB @ sums.tokens.double(),
            "domain_counts": labels_CB @ counts_BE,
        }
        missing = wide - counts_BE.shape[-1]
        if missing:
            for name in ("counts", "dropped", "prob", "domain_counts"):
                figures[name] = torch.nn.functional.pad(figures[name], (0, missing))
        return torch.cat([figures[name].reshape(-1) for name in self._shapes]), violation

    def over_ranks(self, everyone: Group, expert: Group | None = None) -> StepFigures:
        """The figures of the step over all ranks. Every rank calls it; blocks.

        Args:
            everyone: all ranks.
            expert: those that hold every expert once together with this one; None where it is not known which expert
                is where.
        """
        sizes, rank = self._meta.sizes, everyone.index
        load_LR = torch.zeros(sizes.layers, sizes.ranks, dtype=torch.float64, device=self._device)
        if expert is not None and sizes.ranks:
            executed_LE = expert.all_reduce(self._part("counts") - self._part("dropped"))
            load_LR[:, rank] = executed_LE[:, list(self._meta.rank_experts[rank])].sum(dim=-1)
        # A maximum travels as each rank's own value, so that one sum is enough.
        worst_LR = torch.zeros(sizes.layers, everyone.size, dtype=torch.float64, device=self._device)
        worst_LR[:, rank] = self._worst_L
        number = torch.tensor([self._micro_batches], dtype=torch.float64, device=self._device)
        parts = [self._sums_LX, load_LR, worst_LR, number]
        packed = everyone.all_reduce(torch.cat([part.reshape(-1) for part in parts])).cpu()
        sums_LX, load_LR, worst_LR, number = (
            values.view(part.shape)
            for values, part in zip(packed.split([part.numel() for part in parts]), parts, strict=True)
        )
        self._sums_LX = sums_LX
        figures = {name: self._part(name).numpy() for name in self._shapes}
        # All layers see the same tokens.
        figures["domain_tokens"] = figures["domain_tokens"][0] if sizes.layers else figures["domain_tokens"].sum(0)
        return {
            **figures,
            "rank_load": load_LR.numpy(),
            "micro_violation_peak": worst_LR.amax(dim=-1).numpy(),
            "micro_batches": number.numpy(),
        }

    def _part(self, name: str) -> Tensor:
        """A figure of all layers, [L, ...]."""
        start = 0
        for other, shape in self._shapes.items():
            if other == name:
                return self._sums_LX[:, start : start + math.prod(shape)].reshape(-1, *shape)
            start += math.prod(shape)
        raise KeyError(name)
