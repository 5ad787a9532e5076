"""What an optimizer step tells of itself.

Shape letters: L MoE layers, E experts in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_async.observe import StepFigures


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, summed over all micro-batches and ranks; the same on every rank.

    Attributes:
        step: optimizer steps done, this one included.
        lm_loss: mean negative log-likelihood over the step's label tokens, in nats; no balance term is in it.
        balance: each balance loss by name, over its scope (a token-weighted mean over sequences or micro-batches, or
            the step; with scope previous that of the step before), summed over layers, without its coefficient.
        learning_rate: of this step.
        grad_norm: global norm, before clipping, of the gradients that the step applied.
        applied: False when the step applied nothing, because a loss or gradient was not finite.
        label_tokens, routed_tokens: tokens of the step.
        counts_LE: int64, assignments to each expert of each MoE layer, before drop.
        zero_LE: int64, assignments to each zero expert; [L, 0] without any.
        dropped_LE: int64, assignments to each expert that were dropped because it was full.
        bad_tokens: of each MoE layer, tokens whose router logits were not finite.
        left_out: parts of the model whose gradients were not finite, of ``dense`` and ``expert``: both where nothing
            was applied. With a delay D one alone may be: ``expert`` where loss or gradient of this step was not
            finite, ``dense`` where those of the step D steps ago were not.
        load: figures of the experts' loads by the names of `moe_async.observe.windows.FIELDS`; None where the engine
            was not told to gather them (`Engine.observed`).
    """

    step: int
    lm_loss: float
    balance: dict[str, float]
    learning_rate: float
    grad_norm: float
    applied: bool
    label_tokens: int
    routed_tokens: int
    counts_LE: Tensor
    zero_LE: Tensor
    dropped_LE: Tensor
    bad_tokens: tuple[int, ...]
    left_out: tuple[str, ...] = ()
    load: StepFigures | None = None

    @property
    def dropped(self) -> int:
        """Assignments dropped, over all layers and experts."""
        return int(self.dropped_LE.sum())
