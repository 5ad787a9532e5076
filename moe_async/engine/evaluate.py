"""Held-out loss in bits per byte, overall and by domain.

Shape letters: B sequences, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_async.comm import World
from moe_async.data import IGNORED_LABEL, Batch, Corpus, bits_per_byte
from moe_async.model import ModelOutput


@dataclass(frozen=True)
class Evaluation:
    """Loss on the held-out split; no balance term is in it.

    Attributes:
        bits_per_byte: over all domains.
        by_domain: the same, domain by domain.
    """

    bits_per_byte: float
    by_domain: dict[str, float]


@torch.no_grad()
def evaluate(
    forward: Callable[[Tensor, Tensor | None], ModelOutput], batches: Sequence[Batch], corpus: Corpus, world: World
) -> Evaluation:
    """Bits per byte of the held-out text under the model. Every rank calls it with equally many batches; blocks.

    The model must be in evaluation mode. The negative log-likelihood of every held-out token but the first of each
    domain, end-of-document ids included, is divided by the bytes of held-out text.

    Args:
        forward: the model, ``(tokens, token_mask) -> ModelOutput``.
        batches: this rank's share (`moe_async.data.heldout_batches`).
        corpus: the text they come from.
        world: this rank's view of the launch.
    """
    nats = torch.zeros(len(corpus.domains), dtype=torch.float64, device=world.device)
    for batch in batches:
        tokens, labels = batch.tokens.to(world.device), batch.labels.to(world.device)
        live = labels != IGNORED_LABEL
        logits = forward(tokens, None if live.all() else live).logits
        nats.index_add_(0, batch.domains.to(world.device), _sequence_losses(logits, labels))
    totals = world.everyone.all_reduce(nats).tolist()
    by_domain = {
        domain: bits_per_byte(total, size)
        for domain, total, size in zip(corpus.domains, totals, corpus.heldout_bytes, strict=True)
    }
    return Evaluation(bits_per_byte(sum(totals), sum(corpus.heldout_bytes)), by_domain)


def _sequence_losses(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Negative log-likelihood of each sequence in nats, float64 [B]."""
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
    losses = functional.cross_entropy(
        logits_BSV.flatten(0, 1).to(dtype), labels_BS.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return losses.view_as(labels_BS).double().sum(dim=1)
