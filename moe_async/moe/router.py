"""The router: one linear map to expert scores, always in float32 or wider, and the rule that chooses by them.

Shape letters: T tokens, D model width, E choices (experts and zero experts), K experts per token, V token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_async.ops.bias import BiasState, load_errors, updated_bias
from moe_async.ops.initialise import Init, generator_by_name
from moe_async.ops.noise import Noise, jittered, with_normal_noise
from moe_async.ops.routing import (
    Groups,
    Recorded,
    Selection,
    WeightRule,
    expert_choice_routing,
    gshard_routing,
    hash_table,
    noisy_top_k_routing,
    top_k_routing,
)
from moe_async.recipe.routers import (
    ExpertChoiceRouter,
    GShardRouter,
    HashRouter,
    NoisyTopKRouter,
    RouterSection,
    SigmoidBiasRouter,
    SwitchRouter,
    TopKRouter,
)

_BIAS_BUFFERS = ("selection_bias", "error_sum", "last_error")


class Router(nn.Module):
    """Scores every expert for every token and chooses.

    Args:
        dim: model width.
        num_experts: experts.
        top_k: experts per token (on average, for expert choice).
        section: the kind of router and its options.
        zero_experts: further choices behind the experts, which compute nothing.
        vocab_size: token ids, for the hash router.
        init: of the weights.

    Attributes:
        weight: [E, D].
        bias: [E] of the logits, or None.

    Casting the module to bfloat16 raises at the next forward: a router in bfloat16 picks other experts for several
    percent of the tokens (Fedus et al. 2021, arXiv 2101.03961, section 2.4). The selection bias and what its controller
    remembers are float32 buffers that keep their type and value through casts.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        section: RouterSection,
        *,
        zero_experts: int = 0,
        vocab_size: int | None = None,
        init: Init,
    ) -> None:
        super().__init__()
        self.num_experts, self.zero_experts, self.top_k = num_experts, zero_experts, top_k
        self.section = section
        self.init = init
        choices = num_experts + zero_experts
        self.weight = nn.Parameter(torch.empty(choices, dim))
        biased = isinstance(section, TopKRouter) and section.bias
        self.bias = nn.Parameter(torch.empty(choices)) if biased else None
        if isinstance(section, NoisyTopKRouter):
            self.noise_weight = nn.Parameter(torch.empty(choices, dim))
        if isinstance(section, SigmoidBiasRouter):
            for name in _BIAS_BUFFERS:
                self.register_buffer(name, torch.zeros(choices, dtype=torch.float32))
        if isinstance(section, HashRouter):
            self.register_buffer("table", torch.empty(vocab_size or 0, top_k, dtype=torch.int64))
        if section.freeze:
            self.requires_grad_(False)

    @property
    def weights(self) -> WeightRule:
        """How the weights follow from the scores."""
        rule = getattr(self.section, "weights", None)
        return cast(WeightRule, rule or ("raw" if self.top_k == 1 else "normalised"))

    def forward(
        self,
        x_TD: Tensor,
        recorded: Recorded | None = None,
        *,
        live_T: Tensor | None = None,
        token_ids_T: Tensor | None = None,
        noise: Noise | None = None,
    ) -> tuple[Tensor, Selection]:
        """Router logits [T, E] and the selection.

        Args:
            x_TD: tokens.
            recorded: a choice to replay.
            live_T: bool, False for masked tokens; expert choice leaves them out.
            token_ids_T: int64, for the hash router.
            noise: random numbers in training; None in evaluation.
        """
        if self.weight.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"the router's weight is {self.weight.dtype}; it must stay float32 or wider. Cast experts or dense "
                "layers alone (recipe entry `precision`), not the whole model."
            )
        dtype = torch.promote_types(self.weight.dtype, x_TD.dtype)
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = self._disturbed(x_TD.to(dtype), noise)
            logits_TE = self.logits(x_TD)
            experts_TK = None if recorded is None else recorded.experts_TK
            selection = self._select(x_TD, logits_TE, live_T, token_ids_T, noise, experts_TK)
            if recorded is not None:
                selection = selection._replace(taken_TK=recorded.taken_TK)
            # Sums over tokens are at least float32, whatever the logits are computed in.
            return logits_TE.to(dtype), selection._replace(
                weights_TK=selection.weights_TK.to(dtype), probs_TE=selection.probs_TE.to(dtype)
            )

    def logits(self, x_TD: Tensor) -> Tensor:
        """Scores [T, E] before any noise on them, in the type in which they are computed."""
        dtype = torch.bfloat16 if self.section.compute == "bfloat16" else x_TD.dtype
        bias_E = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(x_TD.to(dtype), self.weight.to(dtype), bias_E)

    def _disturbed(self, x_TD: Tensor, noise: Noise | None) -> Tensor:
        if noise is None:
            return x_TD
        if self.section.jitter:
            x_TD = jittered(x_TD, self.section.jitter, noise)
        if self.section.input_noise:
            x_TD = with_normal_noise(x_TD, self.section.input_noise, noise)
        return x_TD

    def _select(
        self,
        x_TD: Tensor,
        logits_TE: Tensor,
        live_T: Tensor | None,
        token_ids_T: Tensor | None,
        noise: Noise | None,
        experts_TK: Tensor | None,
    ) -> Selection:
        section = self.section
        if isinstance(section, GShardRouter):
            return gshard_routing(logits_TE, noise, experts_TK)
        if isinstance(section, NoisyTopKRouter):
            raw_std_TE = functional.linear(x_TD, self.noise_weight.to(x_TD.dtype))
            return noisy_top_k_routing(logits_TE, raw_std_TE, self.top_k, noise, experts_TK)
        if isinstance(section, ExpertChoiceRouter):
            return expert_choice_routing(logits_TE, self.top_k, live_T, experts_TK)
        if isinstance(section, SwitchRouter):
            return top_k_routing(logits_TE, 1, weights="raw", experts_TK=experts_TK)
        if isinstance(section, HashRouter) and experts_TK is None:
            experts_TK = self._from_table(token_ids_T)
        groups = getattr(section, "groups", None)
        return top_k_routing(
            logits_TE,
            self.top_k,
            score=getattr(section, "score", "softmax"),
            weights=self.weights,
            scale=section.scale,
            bias_E=None if self.bias_state is None else self.bias_state.bias_E,
            groups=None if groups is None else Groups(groups.number, groups.keep, groups.top),
            experts_TK=experts_TK,
        )

    def _from_table(self, token_ids_T: Tensor | None) -> Tensor:
        if token_ids_T is None:
            raise ValueError("the hash router chooses by token id; call the layer with token_ids, x's leading shape.")
        table_VK = self.get_buffer("table")
        return table_VK[token_ids_T]

    @property
    def bias_state(self) -> BiasState | None:
        """The selection bias and what its controller remembers; None for a router without one."""
        if not isinstance(self.section, SigmoidBiasRouter):
            return None
        return BiasState(*(self.get_buffer(name) for name in _BIAS_BUFFERS))

    @torch.no_grad()
    def update_bias(self, counts_E: Tensor, step: int) -> None:
        """Move the selection bias by the load of one optimizer step; a router without one stays as it is.

        Args:
            counts_E: int64 [E], assignments before drop, summed over the step's micro-batches and all ranks.
            step: optimizer steps done, this one included.
        """
        state = self.bias_state
        update = self.section.update if isinstance(self.section, SigmoidBiasRouter) else None
        if state is None or update is None or (update.until is not None and step > update.until):
            return
        counts_E = counts_E.to(state.bias_E.device)
        errors_E = load_errors(counts_E, self.num_experts, update.experts_per_token, self.top_k)
        new = updated_bias(
            state, errors_E, self.num_experts, update.rule, update.rate, update.integral, update.derivative
        )
        for buffer, value in zip(state, new, strict=True):
            buffer.copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = {name: self._buffers[name] for name in _BIAS_BUFFERS if name in self._buffers}
        module = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            moved = self._buffers[name]
            assert before is not None and moved is not None
            # A cast would round what is added in small steps; only the device may change.
            fresh = before.is_meta or moved.is_meta
            self._buffers[name] = torch.zeros_like(moved, dtype=before.dtype) if fresh else before.to(moved.device)
        return module

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for name in _BIAS_BUFFERS:
            if (buffer := self._buffers.get(name)) is not None:
                # ``assign=True`` takes over the type of what it is given.
                self._buffers[name] = buffer.to(torch.float32)

    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw the initial weights from ``seed`` and the module's ``name``; biases and learned noise begin at zero."""
        self.init.fill_(self.weight, self.weight.shape[1], seed, f"{name}.weight")
        for parameter in (self.bias, getattr(self, "noise_weight", None)):
            if parameter is not None:
                nn.init.zeros_(parameter)
        for buffer in self.bias_state or ():
            buffer.zero_()
        if isinstance(self.section, HashRouter):
            table_VK = self.get_buffer("table")
            generator = generator_by_name(seed, f"{name}.table")
            table_VK.copy_(hash_table(table_VK.shape[0], self.num_experts, self.top_k, generator))

    def extra_repr(self) -> str:
        """Shown in the module's printed form."""
        zero = f"+{self.zero_experts} zero" if self.zero_experts else ""
        return f"{self.section.kind}, experts={self.num_experts}{zero}, top_k={self.top_k}, weights={self.weights}"
