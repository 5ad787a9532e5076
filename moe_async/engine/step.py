"""The training step: `Engine.train_step`, and DeepSpeed-style forward, backward and step for people's own loops.

Shape letters: B sequences, S positions, V vocabulary, L MoE layers, E experts in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_async.comm import World
from moe_async.data import IGNORED_LABEL
from moe_async.engine.counting import count_step
from moe_async.engine.deepspeed_bridge import DeepSpeedBridge, StepOutcome
from moe_async.engine.schedule import learning_rate
from moe_async.errors import EngineError
from moe_async.ops.balance import RoutingSums, switch_loss_sum, z_loss_sum

if TYPE_CHECKING:
    from moe_async.recipe import BalanceTerm, OptimSection


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass takes on one rank; every MoE layer must see the same tokens.

    Attributes:
        tokens: int64 [B, S].
        labels: int64 [B, S], the next token; `IGNORED_LABEL` where nothing is to be predicted.
        token_mask: bool [B, S], False for padding, which no other token attends to, no expert sees and no loss or
            statistic counts; None without padding.
    """

    tokens: Tensor
    labels: Tensor
    token_mask: Tensor | None = None

    def routed_tokens(self) -> int:
        """Tokens that routers see."""
        return self.tokens.numel() if self.token_mask is None else int(self.token_mask.sum())

    def targets(self) -> Tensor:
        """The labels that count, int64 [B, S]: those of masked tokens are ignored."""
        return self.labels if self.token_mask is None else self.labels.where(self.token_mask, IGNORED_LABEL)

    def label_tokens(self) -> int:
        """Positions at which something is to be predicted."""
        return int((self.targets() != IGNORED_LABEL).sum())


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, summed over all micro-batches and ranks; the same on every rank.

    Attributes:
        step: optimizer steps done, this one included.
        lm_loss: mean negative log-likelihood over the step's label tokens, in nats; no balance term is in it.
        balance: each balance loss by name, over its scope (a token-weighted mean over micro-batches, or the step),
            summed over layers, without its coefficient.
        learning_rate: of this step.
        grad_norm: global gradient norm before clipping.
        applied: False when the step was skipped because a gradient was not finite.
        label_tokens, routed_tokens: tokens of the step.
        counts_LE: int64, assignments to each expert of each MoE layer, before drop.
        dropped: assignments dropped.
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
    dropped: int


class _StepSums:
    """Sums over the micro-batches of a step on this rank."""

    def __init__(self, terms: int, device: torch.device) -> None:
        self.losses = torch.zeros(1 + terms, dtype=torch.float64, device=device)
        self.counts: list[Tensor] = []
        self.tokens: list[Tensor] = []
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, losses: Sequence[Tensor], routing: Sequence[RoutingSums]) -> None:
        self.losses += torch.stack([loss.detach().double() for loss in losses])
        counts = [sums.counts_E for sums in routing]
        tokens = [sums.tokens for sums in routing]
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)] if self.counts else counts
        self.tokens = [a + b for a, b in zip(self.tokens, tokens, strict=True)] if self.tokens else tokens
        self.dropped = self.dropped + sum(sums.dropped for sums in routing)

    def reduce(self, world: World, routed_tokens: int) -> tuple[Tensor, Tensor, int]:
        """Losses, counts [L, E] and drops, over all ranks.

        Raises:
            EngineError: a layer routed other tokens than the micro-batches hold, so its balance loss had a wrong scale.
        """
        counts_LE = torch.stack(self.counts) if self.counts else self.dropped.new_zeros((0, 0))
        packed = torch.cat([counts_LE.reshape(-1), *(tokens.reshape(1) for tokens in self.tokens), self.dropped[None]])
        world.everyone.all_reduce(packed)
        world.everyone.all_reduce(self.losses)
        packed = packed.cpu()
        tokens = packed[counts_LE.numel() : -1].tolist()
        if any(seen != routed_tokens for seen in tokens):
            raise EngineError(
                f"the MoE layers routed {tokens} tokens in this step but its micro-batches hold {routed_tokens}; "
                "train_step needs every MoE layer to see every live token once. Use forward, backward and step with "
                "balance_loss for such a model."
            )
        return self.losses.cpu(), packed[: counts_LE.numel()].view(counts_LE.shape), int(packed[-1])


class Engine:
    """A model in training. Made by `moe_async.initialize`; every rank has one.

    Args:
        bridge: the model under DeepSpeed.
        optim: learning rate and its schedule.
        balance: the balance losses.
        steps: optimizer steps of the whole run, for the schedule.
    """

    def __init__(
        self, bridge: DeepSpeedBridge, optim: OptimSection, balance: Sequence[BalanceTerm], steps: int
    ) -> None:
        self.bridge = bridge
        self.world = bridge.world
        self.steps = steps
        self.global_step = 0
        self._optim = optim
        self._balance = tuple(balance)
        self._inside_step = False

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        return self.bridge.module

    @property
    def accumulation(self) -> int:
        """Micro-batches that each rank contributes to a step."""
        return self.bridge.accumulation

    @property
    def learning_rate(self) -> float:
        """Rate of the next optimizer step."""
        return learning_rate(self._optim, self.global_step, self.steps)

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> StepReport:
        """One optimizer step over this rank's micro-batches. Every rank calls it; blocks.

        The language-model loss is the mean over *all* label tokens of the step, however it is cut into micro-batches
        and ranks. So is the z-loss, and the Switch loss with scope ``step``; with scope ``micro_batch`` it is the
        token-weighted mean of the micro-batches' own losses.

        Raises:
            EngineError: not `accumulation` micro-batches, no label token on any rank, or (after the update, on all
                ranks alike) a MoE layer that saw other tokens than the micro-batches hold.
        """
        self._check_step(micro_batches)
        totals = torch.tensor(
            [
                sum(batch.label_tokens() for batch in micro_batches),
                sum(batch.routed_tokens() for batch in micro_batches),
            ],
            device=self.world.device,
        )
        label_tokens, routed_tokens = self.world.everyone.all_reduce(totals).tolist()
        if label_tokens == 0:
            raise EngineError(
                "no micro-batch of this step has a label token on any rank, so there is nothing to learn; "
                f"give at least one label that is not {IGNORED_LABEL}."
            )
        fractions = None
        if self._needs_step_loads:
            fractions = count_step(self.bridge.forward, micro_batches, self.world)
        sums = _StepSums(len(self._balance), self.world.device)
        outcome = None
        for batch in micro_batches:
            output = self.bridge.forward(batch.tokens, batch.token_mask)
            losses = [
                next_token_loss_sum(output.logits, batch.targets()),
                *self._balance_sums(output.routing, fractions),
            ]
            self._check_gradients(losses[1:])
            sums.add(losses, output.routing)
            self.bridge.backward(self._objective(losses, label_tokens, max(routed_tokens, 1)))
            outcome = self._finish_micro_batch()
        assert outcome is not None
        return self._report(sums, outcome, label_tokens, routed_tokens)

    @property
    def _needs_step_loads(self) -> bool:
        return any(term.loss == "switch" and term.scope == "step" for term in self._balance)

    def _check_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        if len(micro_batches) != self.accumulation:
            raise EngineError(
                f"train_step got {len(micro_batches)} micro-batches but the recipe's train.accumulation is "
                f"{self.accumulation}; pass exactly that many (an empty one, with labels {IGNORED_LABEL}, where a "
                "rank has no data)."
            )
        if self._inside_step:
            raise EngineError(
                "train_step was called in the middle of a step. After backward, finish the step with step(); after an "
                "error inside train_step, start again from a checkpoint."
            )

    def _check_gradients(self, balance: Sequence[Tensor]) -> None:
        """Refuse balance losses that train nothing: the model is the same on every rank, so all fail alike."""
        idle = [term.loss for term, loss in zip(self._balance, balance, strict=True) if not loss.requires_grad]
        if idle:
            raise EngineError(
                f"the balance losses {', '.join(idle)} have no gradient, because the model returned no routing sums "
                "that depend on its weights. Return those of every MoELayer in ModelOutput.routing, or remove the "
                "terms from moe.balance."
            )

    def _objective(self, losses: Sequence[Tensor], label_tokens: int, routed_tokens: int) -> Tensor:
        objective = losses[0] / label_tokens
        for term, loss in zip(self._balance, losses[1:], strict=True):
            objective = objective + term.coefficient * loss.to(objective.dtype) / routed_tokens
        # The denominators are already those of the whole step; DeepSpeed divides by micro-batches and ranks again.
        return objective * (self.world.size * self.accumulation)

    def _balance_sums(self, routing: Sequence[RoutingSums], fractions: Sequence[Tensor] | None) -> list[Tensor]:
        """Each balance loss summed over tokens and layers; ``fractions``: the loads of the whole step, by layer."""
        zero = torch.zeros((), device=self.world.device)
        loads = [None] * len(routing) if fractions is None else fractions
        return [
            sum((balance_loss_sum(term, *layer) for layer in zip(routing, loads, strict=True)), start=zero)
            for term in self._balance
        ]

    def _finish_micro_batch(self) -> StepOutcome | None:
        self.bridge.set_learning_rate(self.learning_rate)
        outcome = self.bridge.step()
        self._inside_step = outcome is None
        if outcome is not None:
            self.global_step += 1
        return outcome

    def _report(self, sums: _StepSums, outcome: StepOutcome, label_tokens: int, routed_tokens: int) -> StepReport:
        losses, counts_LE, dropped = sums.reduce(self.world, routed_tokens)
        balance: dict[str, float] = {
            term.loss: loss.item() / max(routed_tokens, 1) for term, loss in zip(self._balance, losses[1:], strict=True)
        }
        return StepReport(
            step=self.global_step,
            lm_loss=losses[0].item() / label_tokens,
            balance=balance,
            learning_rate=learning_rate(self._optim, self.global_step - 1, self.steps),
            grad_norm=outcome.grad_norm,
            applied=outcome.applied,
            label_tokens=label_tokens,
            routed_tokens=routed_tokens,
            counts_LE=counts_LE,
            dropped=dropped,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; for a loop of one's own. Every rank of the expert group calls it equally often."""
        return self.bridge.forward(*args, **kwargs)

    __call__ = forward

    def balance_loss(self, routing: Sequence[RoutingSums]) -> Tensor:
        """The recipe's balance losses of one micro-batch times their coefficients, a mean over its tokens.

        For a loop of one's own: add it to the micro-batch's loss before `backward`.

        Raises:
            EngineError: a term has the scope ``step``, which needs all micro-batches before the first backward.
        """
        if self._needs_step_loads:
            raise EngineError(
                "moe.balance has a term of scope step: its loads are those of all micro-batches of a step, which must "
                "be known before the first backward. Use train_step, or scope: micro_batch."
            )
        zero = torch.zeros((), device=self.world.device)
        means = (
            term.coefficient * balance_loss_sum(term, sums) / sums.tokens.clamp(min=1)
            for term in self._balance
            for sums in routing
        )
        return sum(means, start=zero)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch's loss; averaged over the accumulation steps and over ranks."""
        self._inside_step = True
        self.bridge.backward(loss)

    def step(self) -> StepOutcome | None:
        """End a micro-batch; after the last one of a step update the weights. None before that. Blocks then."""
        return self._finish_micro_batch()


def balance_loss_sum(term: BalanceTerm, sums: RoutingSums, step_fractions_E: Tensor | None = None) -> Tensor:
    """One balance loss of one layer and micro-batch, summed over its tokens, without its coefficient."""
    if term.loss == "z":
        return z_loss_sum(sums)
    return switch_loss_sum(sums, step_fractions_E if term.scope == "step" else None)


def next_token_loss_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Negative log-likelihood of the labels in nats, summed over positions, in float32 or wider."""
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
    return functional.cross_entropy(
        logits_BSV.flatten(0, -2).to(dtype), labels_BS.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
