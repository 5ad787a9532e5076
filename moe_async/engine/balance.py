"""The recipe's balance losses over the micro-batches of a step, and where the loads of a whole step come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_async.comm import World
from moe_async.engine.deepspeed_bridge import random_states, set_random_states
from moe_async.errors import EngineError
from moe_async.ops.balance import (
    Loss,
    communication_loss,
    device_loss,
    gshard_loss,
    importance_loss,
    load_loss,
    micro_batch_share,
    sequence_loss,
    sequence_share,
    step_share,
    switch_loss,
    z_loss,
)
from moe_async.ops.sums import REAL_SUMS, RoutingSums

if TYPE_CHECKING:
    from moe_async.engine.micro_batch import MicroBatch
    from moe_async.recipe import BalanceTerm, MoeSection


class BalanceLosses:
    """Balance losses as parts of the training objective.

    Args:
        moe: the recipe's ``moe`` section; None for a dense model, which has no such losses.
        device: where sums lie.
    """

    def __init__(self, moe: MoeSection | None, device: torch.device) -> None:
        self.terms: tuple[BalanceTerm, ...] = tuple(moe.balance) if moe else ()
        self.device = device
        self.previous: list[RoutingSums] | None = None
        self.zero_experts = moe.zero_experts if moe else 0
        self._functions = [_loss_function(term, moe) for term in self.terms] if moe else []
        # The z-loss is a mean over tokens, whatever they are grouped by.
        self._scopes = ["micro_batch" if term.loss == "z" else term.scope for term in self.terms]
        self._loads = moe.step_loads if moe else "auto"

    @property
    def needs_step(self) -> bool:
        """Whether a term needs the loads of the whole step before its first backward pass."""
        return "step" in self._scopes

    def keeps_graphs(self, accumulation: int) -> bool:
        """Whether the step's loads come from its own forward passes, all made before the first backward pass."""
        return self._loads == "keep" or (self._loads == "auto" and accumulation == 1)

    def shares(self, routing: Sequence[RoutingSums], step: Sequence[RoutingSums] | None) -> list[Tensor]:
        """Each loss of one micro-batch times its tokens, summed over layers, without its coefficient.

        Args:
            routing: the micro-batch's sums, by layer.
            step: the totals of the whole step, by layer, where a term needs them; None: the micro-batch alone.

        Raises:
            EngineError: a loss trains nothing in some layer. The model is the same on every rank, so all fail alike.
        """
        shares = []
        for term, scope, loss in zip(self.terms, self._scopes, self._functions, strict=True):
            layers = [self._share(scope, loss, sums, layer, step) for layer, sums in enumerate(routing)]
            idle = [str(layer) for layer, share in enumerate(layers) if not share.requires_grad]
            if torch.is_grad_enabled() and (idle or not layers):
                raise EngineError(_no_gradient(term.loss, idle))
            shares.append(sum(layers, start=torch.zeros((), device=self.device)))
        return shares

    def _share(
        self, scope: str, loss: Loss, sums: RoutingSums, layer: int, step: Sequence[RoutingSums] | None
    ) -> Tensor:
        if scope == "sequence":
            return sequence_share(loss, sums)
        loads = {"step": step, "previous": self.previous}.get(scope)
        return micro_batch_share(loss, sums) if loads is None else step_share(loss, sums, loads[layer])

    def mean(self, routing: Sequence[RoutingSums]) -> Tensor:
        """All losses of one micro-batch times their coefficients, means over its tokens, summed over layers.

        Raises:
            EngineError: a term is about the whole step, or the one before.
        """
        if {"step", "previous"} & set(self._scopes):
            raise EngineError(
                "moe.balance has a term of scope step or previous: its loads are those of all micro-batches of a step, "
                "which only train_step knows. Use train_step, or scope: micro_batch."
            )
        total = torch.zeros((), device=self.device)
        for sums in routing:
            tokens = sums.tokens.sum().clamp(min=1)
            for term, share in zip(self.terms, self.shares([sums], None), strict=True):
                total = total + term.coefficient * share / tokens
        return total

    def state_dict(self) -> dict[str, Any]:
        """The loads of the step before, where a term uses them, as JSON values."""
        wanted = self.previous is not None and "previous" in self._scopes
        return {"previous": [_as_lists(sums) for sums in self.previous or []] if wanted else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        saved = state["previous"]
        self.previous = None if saved is None else [_from_lists(sums, self.device) for sums in saved]


def _no_gradient(loss: str, layers: Sequence[str]) -> str:
    where = f" in MoE layer {', '.join(layers)} (counted from 0)" if layers else ""
    return (
        f"the balance loss {loss} has no gradient{where}, because the model returned no routing sums that depend on "
        "its weights. Return those of every MoELayer in ModelOutput.routing, or remove the term from moe.balance."
    )


def _loss_function(term: BalanceTerm, moe: MoeSection) -> Loss:
    groups = moe.device_groups or 0
    if term.loss == "device":
        return partial(device_loss, num_experts=moe.num_experts, device_groups=groups)
    if term.loss == "communication":
        limit = getattr(moe.router, "groups", None)
        reach = min(moe.top_k, groups + (moe.zero_experts > 0))
        if limit is not None and limit.number == groups:
            reach = min(reach, limit.keep)
        return partial(communication_loss, num_experts=moe.num_experts, device_groups=groups, reach=reach)
    return _PLAIN[term.loss]


_PLAIN: dict[str, Loss] = {
    "switch": switch_loss,
    "gshard": gshard_loss,
    "importance": importance_loss,
    "load": load_loss,
    "z": z_loss,
    "sequence": sequence_loss,
}


def step_totals(routings: Sequence[Sequence[RoutingSums]], world: World) -> list[RoutingSums]:
    """The sums of each layer over all micro-batches of a step and all ranks, without gradient; one all-reduce.

    Every rank calls it, with the routing of each of its micro-batches; blocks.
    """
    if not routings or not routings[0]:
        return []
    layers = [[sums.total() for sums in layer] for layer in zip(*routings, strict=True)]
    packed = torch.stack([torch.stack([sums.pack() for sums in layer]).sum(dim=0) for layer in layers])
    world.everyone.all_reduce(packed)
    return [layer[0].unpack(row) for layer, row in zip(layers, packed, strict=True)]


@torch.no_grad()
def count_step(forward: Callable[..., Any], micro_batches: Sequence[MicroBatch], world: World) -> list[RoutingSums]:
    """The totals of a step by a forward pass over its micro-batches that only counts.

    A balance loss depends on the rest of the step through sums, so a pass without gradients is enough for it to be
    exact. The random states are put back, so that the pass with gradients draws the same numbers and routes the same
    way. Every rank calls it with equally many micro-batches; blocks. Costs one forward pass, all-to-alls included.
    """
    states = random_states()
    routings = [forward(batch.tokens, batch.token_mask).routing for batch in micro_batches]
    set_random_states(states)
    return step_totals(routings, world)


def _as_lists(sums: RoutingSums) -> dict[str, Any]:
    return {name: value.tolist() for name, value in sums._asdict().items()}


def _from_lists(values: dict[str, Any], device: torch.device) -> RoutingSums:
    return RoutingSums(
        **{
            name: torch.tensor(values[name], dtype=torch.float64 if name in REAL_SUMS else torch.int64, device=device)
            for name in RoutingSums._fields
        }
    )
