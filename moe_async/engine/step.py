"""The training step: `Engine.train_step`, and DeepSpeed-style forward, backward and step for people's own loops.

Shape letters: B sequences, S positions, V vocabulary, L MoE layers, E experts in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_async.data import IGNORED_LABEL
from moe_async.engine.balance import BalanceLosses, count_step, step_totals
from moe_async.engine.deepspeed_bridge import DeepSpeedBridge
from moe_async.engine.gradients import StepOutcome
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.report import StepReport
from moe_async.engine.schedule import learning_rate
from moe_async.errors import EngineError
from moe_async.moe import MoELayer
from moe_async.observe import LoadMeta, StepTally
from moe_async.ops.sums import RoutingSums

if TYPE_CHECKING:
    from moe_async.recipe import OptimSection


class Engine:
    """A model in training. Made by `moe_async.initialize`; every rank has one.

    Args:
        bridge: the model under DeepSpeed.
        optim: learning rate and its schedule.
        balance: the balance losses.
        steps: optimizer steps of the whole run, for the schedule.

    Attributes:
        global_step: optimizer steps done.
        observed: axes of the figures of loads that a step gathers; None: it gathers none. The same on every rank.
        ahead: steps by which the run, and with it the schedule, is further than this learner; 0 for one on its own.
    """

    def __init__(self, bridge: DeepSpeedBridge, optim: OptimSection, balance: BalanceLosses, steps: int) -> None:
        self.bridge = bridge
        self.world = bridge.world
        self.steps = steps
        self.global_step = 0
        self.observed: LoadMeta | None = None
        self.ahead = 0.0
        self._optim = optim
        self.balance = balance
        self._inside_step = False
        self._routers = [part.router for part in bridge.module.modules() if isinstance(part, MoELayer)]

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
        return learning_rate(self._optim, self.global_step + self.ahead, self.steps)

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> StepReport:
        """One optimizer step over this rank's micro-batches. Every rank calls it; blocks.

        The language-model loss is the mean over *all* label tokens of the step, however it is cut into micro-batches
        and ranks. So is the z-loss, and every balance loss with scope ``step``; with a narrower scope it is the
        token-weighted mean of the micro-batches' or sequences' own losses.

        Raises:
            EngineError: on all ranks alike: not `accumulation` micro-batches, tensors that do not fit one another, no
                label token on any rank, or (after the update) a MoE layer that saw other tokens than the micro-batches
                hold.
        """
        label_tokens, routed_tokens = self._count_tokens(micro_batches)
        if label_tokens == 0:
            raise EngineError(
                "no micro-batch of this step has a label token on any rank, so there is nothing to learn; "
                f"give at least one label that is not {IGNORED_LABEL}."
            )
        outputs, step = self._before_backward(micro_batches)
        losses = torch.zeros(1 + len(self.balance.terms), dtype=torch.float64, device=self.world.device)
        routings: list[list[RoutingSums]] = []
        outcome = None
        tally = None if self.observed is None else StepTally(self.observed, self.world.device)
        for index, batch in enumerate(micro_batches):
            output = outputs.pop(0) if outputs else self.bridge.forward(batch.tokens, batch.token_mask)
            parts = [
                next_token_loss_sum(output.logits, batch.targets()),
                *self.balance.shares(output.routing, step),
            ]
            losses += torch.stack([part.detach().double() for part in parts])
            routings.append([RoutingSums(*(value.detach() for value in sums)) for sums in output.routing])
            if tally is not None:
                tally.add(routings[-1], batch.domains)
            objective = self._objective(parts, label_tokens, max(routed_tokens, 1))
            if index == len(micro_batches) - 1:
                self.world.everyone.all_reduce(losses)
                if not losses.isfinite().all():
                    # Gradients can be finite where a loss is not.
                    objective = self.bridge.spoil(objective)
            self.bridge.backward(objective)
            outcome = self._finish_micro_batch()
        assert outcome is not None
        report = self._report(losses, routings, outcome, label_tokens, routed_tokens)
        if tally is None:
            return report
        return replace(report, load=tally.over_ranks(self.world.everyone, self.world.expert))

    def _before_backward(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[Any], list[RoutingSums] | None]:
        """Forward passes made already, and the totals of the step, where a balance loss needs them."""
        if not self.balance.needs_step:
            return [], None
        if not self.balance.keeps_graphs(self.accumulation):
            return [], count_step(self.bridge.forward, micro_batches, self.world)
        outputs = [self.bridge.forward(batch.tokens, batch.token_mask) for batch in micro_batches]
        return outputs, step_totals([output.routing for output in outputs], self.world)

    def _count_tokens(self, micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
        """Label tokens and routed tokens of the step over all ranks, which all fail where one has a wrong batch."""
        problem = self._problem_of(micro_batches)
        counts = [0, 0, 1]
        if not problem:
            counts = [
                sum(batch.label_tokens() for batch in micro_batches),
                sum(batch.routed_tokens() for batch in micro_batches),
                0,
            ]
        totals = torch.tensor(counts, device=self.world.device)
        label_tokens, routed_tokens, wrong = self.world.everyone.all_reduce(totals).tolist()
        if wrong:
            raise EngineError(problem or "another rank was given a wrong step; its error says what is wrong.")
        return label_tokens, routed_tokens

    def _problem_of(self, micro_batches: Sequence[MicroBatch]) -> str:
        if len(micro_batches) != self.accumulation:
            return (
                f"train_step got {len(micro_batches)} micro-batches but the recipe's train.accumulation is "
                f"{self.accumulation}; pass exactly that many (an empty one, with labels {IGNORED_LABEL}, where a "
                "rank has no data)."
            )
        if self._inside_step:
            return (
                "train_step was called in the middle of a step. After backward, finish the step with step(); after an "
                "error inside train_step, start again from a checkpoint."
            )
        return next((problem for batch in micro_batches if (problem := batch.problem())), "")

    def _objective(self, losses: Sequence[Tensor], label_tokens: int, routed_tokens: int) -> Tensor:
        objective = losses[0] / label_tokens
        for term, loss in zip(self.balance.terms, losses[1:], strict=True):
            objective = objective + term.coefficient * loss.to(objective.dtype) / routed_tokens
        # The denominators are already those of the whole step; DeepSpeed divides by micro-batches and ranks again.
        return objective * (self.world.size * self.accumulation)

    def micro_batch_objective(self, output: Any, batch: MicroBatch) -> Tensor:
        """The training objective of one micro-batch alone, without regard to the rest of its step."""
        labels, routed = max(batch.label_tokens(), 1), max(batch.routed_tokens(), 1)
        total = next_token_loss_sum(output.logits, batch.targets()) / labels
        for term, share in zip(self.balance.terms, self.balance.shares(output.routing, None), strict=True):
            total = total + term.coefficient * share.to(total.dtype) / routed
        return total

    def _finish_micro_batch(self) -> StepOutcome | None:
        self.bridge.set_learning_rate(self.learning_rate)
        outcome = self.bridge.step()
        self._inside_step = outcome is None
        if outcome is not None:
            self.global_step += 1
        return outcome

    def _report(
        self,
        losses: Tensor,
        routings: Sequence[Sequence[RoutingSums]],
        outcome: StepOutcome,
        label_tokens: int,
        routed_tokens: int,
    ) -> StepReport:
        """Sum up over ranks, and let what follows the load follow it.

        Raises:
            EngineError: a layer routed other tokens than the micro-batches hold, so its balance loss had a wrong scale.
        """
        layers = step_totals(routings, self.world)
        tokens = [int(sums.tokens) for sums in layers]
        if any(seen != routed_tokens for seen in tokens):
            raise EngineError(
                f"the MoE layers routed {tokens} tokens in this step but its micro-batches hold {routed_tokens}; "
                "train_step needs every MoE layer to see every live token once. Use forward, backward and step with "
                "balance_loss for such a model."
            )
        empty = torch.zeros(0, 0, dtype=torch.int64)
        counts_LE = torch.stack([sums.counts_E for sums in layers]).cpu() if layers else empty
        # Counts follow their own step: with a delay its experts are applied now, its dense gradients later.
        if "expert" not in outcome.left_out and losses.isfinite().all():
            self.balance.previous = layers
            self.update_bias(counts_LE)
        experts = counts_LE.shape[-1] - self.balance.zero_experts
        balance: dict[str, float] = {
            term.loss: loss.item() / max(routed_tokens, 1)
            for term, loss in zip(self.balance.terms, losses[1:], strict=True)
        }
        return StepReport(
            step=self.global_step,
            lm_loss=losses[0].item() / label_tokens,
            balance=balance,
            learning_rate=learning_rate(self._optim, self.global_step - 1 + self.ahead, self.steps),
            grad_norm=outcome.grad_norm,
            applied=outcome.applied,
            label_tokens=label_tokens,
            routed_tokens=routed_tokens,
            counts_LE=counts_LE[:, :experts],
            zero_LE=counts_LE[:, experts:],
            dropped_LE=torch.stack([sums.dropped_E for sums in layers]).cpu()[:, :experts] if layers else empty,
            bad_tokens=tuple(int(sums.bad_tokens) for sums in layers),
            left_out=outcome.left_out,
        )

    def update_bias(self, counts_LE: Tensor) -> None:
        """Move the selection biases of bias-balanced routers by the load of one optimizer step.

        `train_step` does it by itself. In a loop of one's own, call it on every rank after each optimizer step.

        Args:
            counts_LE: int64, assignments to each expert (and zero expert behind them) of each MoE layer in module
                order, summed over the step's micro-batches and over all ranks.
        """
        biased = [router for router in self._routers if router.bias_state is not None]
        if not biased:
            return
        if len(counts_LE) != len(self._routers):
            raise EngineError(
                f"there are counts of {len(counts_LE)} layers but the model has {len(self._routers)} MoE layers, whose "
                "selection biases follow the counts; return the routing of every MoELayer in ModelOutput.routing, in "
                "module order."
            )
        for router, counts_E in zip(self._routers, counts_LE, strict=True):
            router.update_bias(counts_E, self.global_step)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; for a loop of one's own. Every rank of the expert group calls it equally often."""
        return self.bridge.forward(*args, **kwargs)

    __call__ = forward

    def balance_loss(self, routing: Sequence[RoutingSums]) -> Tensor:
        """The recipe's balance losses of one micro-batch times their coefficients, a mean over its tokens.

        For a loop of one's own: add it to the micro-batch's loss before `backward`.

        Raises:
            EngineError: a term has the scope ``step`` or ``previous``, which only `train_step` knows.
        """
        return self.balance.mean(routing)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch's loss; averaged over the accumulation steps and over ranks."""
        self._inside_step = True
        self.bridge.backward(loss)

    def step(self) -> StepOutcome | None:
        """End a micro-batch; after the last one of a step update the weights. None before that. Blocks then."""
        return self._finish_micro_batch()

    def drain(self) -> list[StepOutcome]:
        """Apply the dense gradients that a delay (``sync.inside``) has in flight; call it once, after the last step.

        Each is an optimizer step of its own, oldest first, without the experts, at the last step's learning rate; none
        counts as a step of the run. Without a delay nothing happens. Every rank calls it; blocks.

        Raises:
            EngineError: a step was begun and not finished.
        """
        if self._inside_step:
            raise EngineError("drain was called in the middle of a step; finish the step with step() before.")
        place = min(self.global_step + self.ahead, self.steps) - 1
        self.bridge.set_learning_rate(learning_rate(self._optim, place, self.steps))
        return self.bridge.drain()


def next_token_loss_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Negative log-likelihood of the labels in nats, summed over positions, in float32 or wider."""
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
    return functional.cross_entropy(
        logits_BSV.flatten(0, -2).to(dtype), labels_BS.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
