"""What one forward and backward pass takes.

Shape letters: B sequences, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_async.data import IGNORED_LABEL


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass takes on one rank; every MoE layer must see the same tokens.

    Attributes:
        tokens: int64 [B, S].
        labels: int64 [B, S], the next token; `IGNORED_LABEL` where nothing is to be predicted.
        token_mask: bool [B, S], False for padding, which no other token attends to, no expert sees and no loss or
            statistic counts; None without padding.
        domains: int64 [B], index of each sequence's label of text, for the record of loads; None without labels.
    """

    tokens: Tensor
    labels: Tensor
    token_mask: Tensor | None = None
    domains: Tensor | None = None

    def routed_tokens(self) -> int:
        """Tokens that routers see."""
        return self.tokens.numel() if self.token_mask is None else int(self.token_mask.sum())

    def targets(self) -> Tensor:
        """The labels that count, int64 [B, S]: those of masked tokens are ignored."""
        return self.labels if self.token_mask is None else self.labels.where(self.token_mask, IGNORED_LABEL)

    def problem(self) -> str:
        """What does not fit; empty when everything does."""
        for name, tensor, dtype in (
            ("tokens", self.tokens, torch.int64),
            ("labels", self.labels, torch.int64),
            ("token_mask", self.token_mask, torch.bool),
        ):
            if tensor is None and name != "token_mask":
                return f"{name} of a micro-batch is None; it must be {dtype} [sequences, positions]."
            if tensor is not None and (tensor.dtype != dtype or tensor.shape != self.tokens.shape or tensor.dim() != 2):
                return (
                    f"{name} of a micro-batch is {tensor.dtype} {tuple(tensor.shape)}; it must be {dtype} with the "
                    f"shape of tokens [sequences, positions], which is {tuple(self.tokens.shape)}."
                )
        return "" if self.domains is None else self._domains_problem()

    def _domains_problem(self) -> str:
        domains = self.domains
        assert domains is not None
        if domains.dtype == torch.int64 and domains.shape == self.tokens.shape[:1]:
            return ""
        return (
            f"domains of a micro-batch is {domains.dtype} {tuple(domains.shape)}; it must be torch.int64 with an entry "
            f"for each of the {len(self.tokens)} sequences."
        )

    def label_tokens(self) -> int:
        """Positions at which something is to be predicted."""
        return int((self.targets() != IGNORED_LABEL).sum())
