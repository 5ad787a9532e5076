"""What a layer tells of its routing: sums over tokens, one row per sequence.

Sums, never means: they add up over sequences, micro-batches, ranks and layers without weights.

Shape letters: B sequences, S positions, T tokens (B * S), E choices of the router (experts and zero experts), K experts
per token, G device groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_async.ops.routing import Selection


class RoutingSums(NamedTuple):
    """Sums over the tokens of one layer; masked tokens are not in them.

    A layer gives one row per sequence of its micro-batch on its rank ([B, E] or [B]); `total` adds the rows up, to [E]
    or a scalar. Losses and statistics take both.

    Attributes:
        counts_E: int64, assignments to each expert before any drop.
        first_counts_E: int64, first choices alone.
        free_counts_E: int64, assignments that scores alone, without selection bias and groups, would have made.
        dropped_E: int64, assignments dropped because the expert was full.
        prob_sum_E: sum of the full router distribution, with gradient.
        weight_sum_E: sum of the weights of assignments before any drop, with gradient (Shazeer's importance).
        chance_sum_E: sum of the chances to be chosen, with gradient; zeros without learned noise.
        sent_G: int64, tokens with at least one expert in each group, zero experts being one group more.
        z_sum: sum of ``logsumexp(logits)^2``, with gradient.
        entropy_sum: sum of the router distribution's entropy in nats, without gradient.
        top_sum: sum of the largest router probability, without gradient.
        margin_sum: sum of the gap between the two largest router probabilities, without gradient; the largest itself
            where there is one choice alone.
        tokens: int64, tokens routed.
        bad_tokens: int64, tokens whose router logits are not finite.
    """

    counts_E: Tensor
    first_counts_E: Tensor
    free_counts_E: Tensor
    dropped_E: Tensor
    prob_sum_E: Tensor
    weight_sum_E: Tensor
    chance_sum_E: Tensor
    sent_G: Tensor
    z_sum: Tensor
    entropy_sum: Tensor
    top_sum: Tensor
    margin_sum: Tensor
    tokens: Tensor
    bad_tokens: Tensor

    def total(self) -> RoutingSums:
        """The sums over all sequences."""
        return RoutingSums(*(value.sum(dim=0) for value in self))

    @property
    def dropped(self) -> Tensor:
        """Assignments dropped, over all experts."""
        return self.dropped_E.sum(dim=-1)

    def pack(self) -> Tensor:
        """All values of a total in one float64 vector without gradient, in which integers up to 2^53 are exact."""
        return torch.cat([value.detach().double().reshape(-1) for value in self])

    def unpack(self, packed: Tensor) -> RoutingSums:
        """A total of the same shapes and kinds from a vector that `pack` gave, real numbers in float64."""
        parts = packed.split([value.numel() for value in self])
        return RoutingSums(
            *(
                (part if value.is_floating_point() else part.round().to(value.dtype)).view_as(value)
                for value, part in zip(self, parts, strict=True)
            )
        )


REAL_SUMS = frozenset({"prob_sum_E", "weight_sum_E", "chance_sum_E", "z_sum", "entropy_sum", "top_sum", "margin_sum"})
"""The sums that are real numbers; the others count."""


def routing_sums(
    logits_TE: Tensor,
    selection: Selection,
    *,
    sequences: int = 1,
    live_T: Tensor | None = None,
    full_TK: Tensor | None = None,
    num_zero: int = 0,
    device_groups: int = 0,
) -> RoutingSums:
    """Sum what balance losses and the load profile need over the live tokens of each sequence.

    Args:
        logits_TE: router logits.
        selection: what was chosen, before any drop.
        sequences: B; the T tokens are those of equally long sequences, one after another.
        live_T: bool, False for tokens that count nowhere; None when all count.
        full_TK: bool, True for assignments dropped because the expert was full; None when nothing was.
        num_zero: zero experts among the E choices, which come last.
        device_groups: equal groups of consecutive experts; 0: none.
    """
    rows = _PerSequence(logits_TE.shape[0], logits_TE.shape[1], sequences, live_T)
    z_T = torch.logsumexp(logits_TE, dim=-1).square()
    probs_TE, taken_TK = selection.probs_TE, selection.taken_TK
    with torch.no_grad():
        entropy_T = -torch.xlogy(probs_TE, probs_TE).sum(dim=-1)
        top_T, margin_T = _confidence(probs_TE)
        counts = rows.by_expert(selection.experts_TK, taken_TK)
        free = counts if selection.free_TK is None else rows.by_expert(selection.free_TK, None)
        sent = _groups_reached(selection, logits_TE.shape[1], num_zero, device_groups)
    spread_TE = torch.zeros_like(probs_TE).scatter_add(-1, selection.experts_TK, _taken(selection))
    chance_TE = selection.chance_TE
    return RoutingSums(
        counts_E=counts,
        first_counts_E=rows.by_expert(selection.experts_TK[:, :1], None if taken_TK is None else taken_TK[:, :1]),
        free_counts_E=free,
        dropped_E=torch.zeros_like(counts) if full_TK is None else rows.by_expert(selection.experts_TK, full_TK),
        prob_sum_E=rows.add(probs_TE),
        weight_sum_E=rows.add(spread_TE),
        chance_sum_E=torch.zeros_like(counts, dtype=probs_TE.dtype) if chance_TE is None else rows.add(chance_TE),
        sent_G=rows.add(sent),
        z_sum=rows.add(z_T),
        entropy_sum=rows.add(entropy_T),
        top_sum=rows.add(top_T),
        margin_sum=rows.add(margin_T),
        tokens=rows.add(torch.ones_like(z_T, dtype=torch.int64)),
        bad_tokens=rows.add((~logits_TE.detach().isfinite()).any(dim=-1).long()),
    )


def _confidence(probs_TE: Tensor) -> tuple[Tensor, Tensor]:
    """The largest probability of each token, and by how much it leads."""
    top = probs_TE.topk(min(2, probs_TE.shape[-1]), dim=-1).values
    return top[:, 0], top[:, 0] - top[:, 1] if top.shape[-1] > 1 else top[:, 0]


def _taken(selection: Selection) -> Tensor:
    if selection.taken_TK is None:
        return selection.weights_TK
    return torch.where(selection.taken_TK, selection.weights_TK, 0)


def _groups_reached(selection: Selection, choices: int, num_zero: int, device_groups: int) -> Tensor:
    """Whether each token has an expert in each group, int64 [T, G]."""
    tokens = selection.experts_TK.shape[0]
    if not device_groups:
        return torch.zeros(tokens, 0, dtype=torch.int64, device=selection.experts_TK.device)
    groups_TK = device_group(selection.experts_TK, choices - num_zero, device_groups)
    reached = torch.zeros(tokens, device_groups + (num_zero > 0), dtype=torch.int64, device=groups_TK.device)
    taken = torch.ones_like(groups_TK) if selection.taken_TK is None else selection.taken_TK.long()
    return reached.scatter_reduce_(-1, groups_TK, taken, "amax")


def device_group(experts: Tensor, num_experts: int, device_groups: int) -> Tensor:
    """The device group of each expert id; zero experts, whose ids come after the others', are one group more."""
    return (experts // (num_experts // device_groups)).clamp(max=device_groups)


class _PerSequence(NamedTuple):
    """How values of tokens add up to one row per sequence."""

    tokens: int
    choices: int
    sequences: int
    live_T: Tensor | None

    def add(self, values: Tensor) -> Tensor:
        """Sum values [T, ...] over the live tokens of each sequence: [B, ...]."""
        if self.live_T is not None:
            # torch.where rather than a product: a masked token may hold anything, also infinities.
            live = self.live_T.view(-1, *(1 for _ in values.shape[1:]))
            values = torch.where(live, values, torch.zeros((), dtype=values.dtype, device=values.device))
        return values.view(self.sequences, self.tokens // max(self.sequences, 1), *values.shape[1:]).sum(dim=1)

    def by_expert(self, experts_TK: Tensor, taken_TK: Tensor | None) -> Tensor:
        """Live assignments to each expert by sequence: int64 [B, E]."""
        length = self.tokens // max(self.sequences, 1)
        sequence_T = torch.arange(self.tokens, device=experts_TK.device) // max(length, 1)
        place_TK = sequence_T[:, None] * self.choices + experts_TK
        one_TK = torch.ones_like(experts_TK) if taken_TK is None else taken_TK.long()
        if self.live_T is not None:
            one_TK = one_TK * self.live_T[:, None]
        # Added up by place: counting the kept ones would need to know on the host how many there are.
        counts = torch.zeros(self.sequences * self.choices, dtype=torch.int64, device=experts_TK.device)
        counts.scatter_add_(0, place_TK.reshape(-1), one_TK.reshape(-1))
        return counts.view(self.sequences, self.choices)
