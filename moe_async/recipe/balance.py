"""The entry `moe.balance`: losses that keep routing even, and what they need of the entries before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from moe_async.recipe.section import Section

BalanceLoss = Literal["switch", "gshard", "importance", "load", "z", "sequence", "device", "communication"]
Scope = Literal["micro_batch", "sequence", "step", "previous"]


class BalanceTerm(Section):
    """One loss that keeps routing even."""

    loss: BalanceLoss = Field(
        description="switch: experts times the sum of token share and mean probability, 1 when even; gshard: the same"
        " with the share of first choices; importance: squared coefficient of variation of the summed weights; load:"
        " the same of the chance to be chosen (noisy_topk); z: mean squared log-sum-exp of the router logits;"
        " sequence: DeepSeek-V3's, shares by scores without the bias; device and communication: DeepSeek-V2's, over"
        " moe.device_groups. Required."
    )
    coefficient: float = Field(ge=0, description="Factor of the loss in the training objective. Required.")
    scope: Scope = Field(
        default=None,
        validate_default=True,
        description="Tokens that the loss is about: each sequence; each micro-batch of each rank; or step, all of an"
        " optimizer step, which is exactly the loss of one large batch (moe.step_loads says how). previous: as step,"
        " but with the loads of the step before. Narrower scopes count by their tokens; z is the same for all."
        " Default: micro_batch, and sequence for the loss of that name.",
    )

    @field_validator("scope", mode="before")
    @classmethod
    def _fill_scope(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            return "sequence" if info.data.get("loss") == "sequence" else "micro_batch"
        return value

    @field_validator("scope")
    @classmethod
    def _sequence_is_its_own_scope(cls, value: Scope, info: ValidationInfo) -> Scope:
        if info.data.get("loss") == "sequence" and value != "sequence":
            raise ValueError(
                "the loss sequence is over each sequence. Leave scope out, or use loss: switch for another scope."
            )
        return value


def loss_problems(losses: set[BalanceLoss], moe: Mapping[str, Any]) -> list[str]:
    """What keeps balance losses from working with the entries before them."""
    problems = []
    grouped = sorted(losses & {"device", "communication"})
    if grouped and moe.get("device_groups", 0) is None:
        problems.append(
            f"moe.balance has the loss {grouped[0]} but moe.device_groups is null; the loss is over groups of experts."
            " Set moe.device_groups, as a rule to the expert-parallel size."
        )
    router, experts, top_k = moe.get("router"), moe.get("num_experts"), moe.get("top_k")
    if router is None or experts is None or top_k is None:
        return problems
    if router.kind == "expert_choice" and (constant := sorted(losses - {"importance", "z"})):
        problems.append(
            f"moe.balance has the loss {constant[0]} but moe.router.kind is expert_choice, where every expert takes"
            " equally many tokens, so that the loss is constant. Remove it."
        )
    if "load" in losses and router.kind != "noisy_topk":
        problems.append(
            f"moe.balance has the loss load but moe.router.kind is {router.kind}; that loss is the chance to be chosen"
            " under the learned noise. Use router: {kind: noisy_topk}, or loss: importance."
        )
    if "load" in losses and top_k == experts:
        problems.append(
            f"moe.balance has the loss load but moe.top_k is {top_k}, all of the experts, so that every chance is 1."
            " Use a smaller top_k, or remove the loss."
        )
    return problems
