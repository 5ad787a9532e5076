"""What the engine needs of DeepSpeed, for one process without it: many small models can train side by side.

The numbers are those of `moe_async.engine.deepspeed_bridge.DeepSpeedBridge` at ZeRO 0 on one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from moe_async.comm import World
from moe_async.engine.gradients import ParameterSplit, StepOutcome, prepare_step
from moe_async.engine.kept_step import KeptStep
from moe_async.engine.muon import hidden_matrices
from moe_async.engine.optimizer import make_optimizer, parameter_groups, stateless
from moe_async.moe.classes import classify
from moe_async.topology import Topology

if TYPE_CHECKING:
    from moe_async.recipe import Recipe


class LocalBridge:
    """A model under its optimizer, or, with ``sends_gradients``, one that only computes gradients and clips them.

    Args:
        model: all of it, on the CPU.
        recipe: its ``optim`` and ``train.accumulation`` are used.
        sends_gradients: whether a step leaves the weights as they are.

    Attributes:
        kept: what a step contributes then; None where it is applied.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, sends_gradients: bool = False) -> None:
        self.module = model
        self.accumulation = recipe.train.accumulation
        self.world = World(Topology(num_experts=recipe.moe.num_experts if recipe.moe else 1))
        classes = classify(model)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._split = ParameterSplit(
            replicated=[p for name, p in named.items() if classes[name] != "expert"],
            sharded=[p for name, p in named.items() if classes[name] == "expert"],
        )
        self.kept = KeptStep(model) if sends_gradients else None
        optim = stateless(recipe.optim) if sends_gradients else recipe.optim
        muon = hidden_matrices(model, classes) if optim.kind == "muon" else {}
        self._optimizer = make_optimizer(optim, parameter_groups(named, classes, optim, "experts", muon))
        self._clip, self._done = optim.clip, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool) -> None:
        """Switch the model between training and evaluation."""
        self.module.train(mode)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` over the accumulation steps; the first one replaces those of the last step."""
        if self._done == 0:
            self._optimizer.zero_grad()
        (loss / self.accumulation).backward()

    def step(self) -> StepOutcome | None:
        """End a micro-batch; at the end of the step clip and update. None inside the step."""
        self._done = (self._done + 1) % self.accumulation
        if self._done:
            return None
        outcome = prepare_step(self._split, self.world, self._clip, None)
        if self.kept is not None:
            self.kept.hold()
        self._optimizer.step()
        return outcome

    def spoil(self, objective: Tensor) -> Tensor:
        """An objective whose gradients are not finite, so that nothing of this step is applied."""
        return objective + float("nan") * next(iter(self._split.replicated)).sum()

    def drain(self) -> list[StepOutcome]:
        """Nothing is ever delayed here."""
        return []

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate for the next step, in every group times the factor of its class."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
