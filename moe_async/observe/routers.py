"""Finds the MoE layers of a model, of this package or of others, and tells what their routers did in a forward pass.

Each kind of layer is known by its own marks, so that no other package has to be installed.

Shape letters: T tokens of a forward pass, B sequences, K experts per token, E choices of the router, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moe_async.errors import LoadError
from moe_async.ops.routing import Selection
from moe_async.ops.sums import RoutingSums, routing_sums

Handle = torch.utils.hooks.RemovableHandle


class Seen(NamedTuple):
    """What a router did in one forward pass.

    Attributes:
        routing: sums, one row per sequence.
        selection_TK: int64, the experts that each token was sent to; negative where it was dropped.
    """

    routing: RoutingSums
    selection_TK: Tensor


class Watched(Protocol):
    """A MoE layer whose router can be watched.

    Attributes:
        name: where it stands in the model.
        zero_experts: choices behind the experts that compute nothing.
        top_k: experts per token; None: as many as the first selection has.
        whole_passes: whether sums can be given for a forward pass alone, not for each of its sequences.
    """

    name: str
    zero_experts: int
    top_k: int | None
    whole_passes: bool

    def attach(self, report: Callable[[Seen], None], wanted: Callable[[], int]) -> list[Handle]:
        """Watch forward passes.

        Args:
            report: takes what was seen.
            wanted: sequences of the pass at hand; 0: it is not to be watched.
        """
        ...

    def bias(self) -> Tensor | None:
        """The selection bias, [E]; None without one."""
        ...

    def held(self) -> tuple[int, ...] | None:
        """The experts that this rank holds; None where it is not known."""
        ...


def watched_layers(model: nn.Module) -> list[Watched]:
    """The MoE layers of a model in its order.

    Known are `moe_async.MoELayer`, ``deepspeed.moe.layer.MoE``, and the blocks of transformers (5.0 and newer) whose
    experts are called with each token's chosen experts.

    Raises:
        LoadError: there is none, or the router of one cannot be found.
    """
    found = list(_found(model))
    if not found:
        raise LoadError(
            f"{type(model).__name__} has no MoE layer that can be watched; known are moe_async.MoELayer, "
            "deepspeed.moe.layer.MoE and the blocks of transformers (5.0 and newer) whose experts take each token's "
            "chosen experts. Record other models' routers as JSON Lines instead (see docs/tools.md)."
        )
    return found


def _found(model: nn.Module) -> Iterator[Watched]:
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if _is(module, "moe_async.moe.layer.MoELayer"):
            yield OwnLayer(name, module)
        elif _is(module, "deepspeed.moe.sharded_moe.TopKGate"):
            yield DeepSpeedGate(name.removesuffix(".deepspeed_moe.gate"), module)
        elif (names := _experts_arguments(module)) is not None:
            parent = name.rpartition(".")[0]
            yield TransformersExperts(parent, module, _router_beside(parent, modules[parent]), names)


def _is(module: nn.Module, name: str) -> bool:
    """Whether a module is of a class, told by its name."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == name for kind in type(module).__mro__)


class OwnLayer:
    """A `moe_async.MoELayer`: it returns what is asked for."""

    whole_passes = False

    def __init__(self, name: str, layer: Any) -> None:
        self._layer = layer
        self.name = name or "layer"
        self.zero_experts: int = layer.zero_experts
        self.top_k: int | None = layer.router.top_k

    def attach(self, report: Callable[[Seen], None], wanted: Callable[[], int]) -> list[Handle]:
        """Watch its output."""

        def take(module: nn.Module, inputs: Any, output: Any) -> None:
            if wanted():
                report(Seen(output.routing, output.selection.detach().flatten(0, -2)))

        return [self._layer.register_forward_hook(take)]

    def bias(self) -> Tensor | None:
        """That of a sigmoid_bias router."""
        state = self._layer.router.bias_state
        return None if state is None else state.bias_E

    def held(self) -> tuple[int, ...] | None:
        """By global expert id."""
        return tuple(self._layer.experts.expert_ids)


class DeepSpeedGate:
    """The gate of a ``deepspeed.moe.layer.MoE``.

    It tells the counts before drop, and which assignments were kept. Its distribution is the softmax of its logits
    without the noise of a noisy gate, computed once more because the gate does not return it.
    """

    whole_passes = True
    zero_experts = 0

    def __init__(self, name: str, gate: Any) -> None:
        self.name = name or "gate"
        self._gate = gate
        self.top_k: int | None = gate.k

    def attach(self, report: Callable[[Seen], None], wanted: Callable[[], int]) -> list[Handle]:
        """Watch what it takes and gives."""

        def take(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            if wanted():
                used = inputs[1] if len(inputs) > 1 else named.get("used_token")
                report(self._seen(inputs[0] if inputs else named["input"], used, output))

        return [self._gate.register_forward_hook(take, with_kwargs=True)]

    @torch.no_grad()
    def _seen(self, x_TD: Tensor, used: Tensor | None, output: tuple[Any, ...]) -> Seen:
        weight_ED = self._gate.wg.weight
        logits_TE = torch.nn.functional.linear(x_TD.detach().float(), weight_ED.float())
        # Its dispatch has one of two forms: the kept expert of each place, or a mask over places in experts' buffers.
        if len(output) == 4:
            kept_TE = output[2].any(dim=-1)
            experts_TK = kept_TE.float().topk(self._gate.k, dim=-1).indices
            kept_TK = kept_TE.gather(-1, experts_TK)
        else:
            experts_TK = output[3].t().long()
            kept_TK = experts_TK >= 0
        probs_TE = torch.softmax(logits_TE, dim=-1)
        chosen = Selection(experts_TK.clamp(min=0), torch.zeros_like(kept_TK, dtype=probs_TE.dtype), probs_TE, kept_TK)
        live_T = None if used is None else used.reshape(-1).bool()
        sums = routing_sums(logits_TE, chosen, live_T=live_T)
        counts_1E = output[-1].to(sums.counts_E).unsqueeze(0)
        sums = sums._replace(counts_E=counts_1E, dropped_E=counts_1E - sums.counts_E)
        return Seen(sums, torch.where(kept_TK, experts_TK, -1))

    def bias(self) -> Tensor | None:
        """It has none."""
        return None

    def held(self) -> tuple[int, ...] | None:
        """The gate does not know."""
        return None


class TransformersExperts:
    """The experts of a transformers block, which are called with each token's chosen experts, and their router.

    The distribution is the softmax of the router's logits, also where the model scores with a sigmoid. Padding is
    counted, because the model routes it.
    """

    whole_passes = False
    zero_experts = 0
    top_k: int | None = None

    def __init__(self, name: str, experts: nn.Module, router: nn.Module, chosen: str) -> None:
        self.name = name or "experts"
        self._experts, self._router, self._chosen = experts, router, chosen
        self._place = list(inspect.signature(type(experts).forward).parameters).index(chosen) - 1
        self._logits_TE: Tensor | None = None

    def attach(self, report: Callable[[Seen], None], wanted: Callable[[], int]) -> list[Handle]:
        """Watch the router's logits, then what the experts are called with."""

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if wanted():
                logits = output[0] if isinstance(output, tuple) else output
                self._logits_TE = logits.detach().flatten(0, -2)

        def take(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            sequences = wanted()
            if sequences:
                chosen = named[self._chosen] if self._chosen in named else inputs[self._place]
                report(self._seen(chosen.detach().flatten(0, -2).long(), sequences))

        return [
            self._router.register_forward_hook(keep),
            self._experts.register_forward_hook(take, with_kwargs=True),
        ]

    @torch.no_grad()
    def _seen(self, experts_TK: Tensor, sequences: int) -> Seen:
        logits_TE, self._logits_TE = self._logits_TE, None
        if logits_TE is None or len(logits_TE) != len(experts_TK):
            raise LoadError(
                f"{self.name}: the experts were called for {len(experts_TK)} tokens, but the router beside them gave "
                f"logits for {0 if logits_TE is None else len(logits_TE)}; this block cannot be watched."
            )
        logits_TE = logits_TE.float()
        if len(experts_TK) % sequences:
            raise LoadError(
                f"{self.name} saw {len(experts_TK)} tokens, which are not {sequences} equally long sequences; give a "
                "label for each sequence of the batch, or one label for all."
            )
        # Under transformers' own expert parallelism other ranks' experts have ids behind the last one.
        taken_TK = experts_TK < logits_TE.shape[-1]
        probs_TE = torch.softmax(logits_TE, dim=-1)
        here_TK = torch.where(taken_TK, experts_TK, 0)
        chosen = Selection(here_TK, torch.zeros_like(here_TK, dtype=probs_TE.dtype), probs_TE, taken_TK)
        sums = routing_sums(logits_TE, chosen, sequences=sequences)
        return Seen(sums, torch.where(taken_TK, experts_TK, -1))

    def bias(self) -> Tensor | None:
        """That of routers after DeepSeek-V3."""
        bias = getattr(self._router, "e_score_correction_bias", None)
        return bias if isinstance(bias, Tensor) else None

    def held(self) -> tuple[int, ...] | None:
        """All of them on every rank, as far as is known."""
        return None


_ARGUMENTS = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))
_ROUTER_NAMES = ("gate", "router")


def _experts_arguments(module: nn.Module) -> str | None:
    """The argument of a transformers experts module that holds the chosen experts; None for any other module."""
    try:
        arguments = inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):
        return None
    return next((chosen for chosen, weights in _ARGUMENTS if chosen in arguments and weights in arguments), None)


def _router_beside(name: str, block: nn.Module) -> nn.Module:
    for child in _ROUTER_NAMES:
        router = getattr(block, child, None)
        if isinstance(router, nn.Module):
            return router
    raise LoadError(
        f"{name}: no router was found beside the experts of {type(block).__name__} (looked for "
        f"{' and '.join(_ROUTER_NAMES)}); this block cannot be watched. Record its routing as JSON Lines instead (see "
        "docs/tools.md)."
    )
