"""The entry `moe.router`: a closed set of routers, each with its own keys.

The classes are also what `moe_async.moe.MoELayer` takes, so a layer of one's own is described like a recipe's.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag, ValidationInfo, field_validator

from moe_async.recipe.messages import alternatives, nearest_divisors, union_discriminator, union_tag
from moe_async.recipe.section import Section

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
WeightRule = Literal["normalised", "raw"]


class GroupsSection(Section):
    """Group- or node-limited selection: a token's experts come from the best few groups of consecutive experts."""

    number: int = Field(ge=2, description="Equal groups that the experts are cut into. Required.")
    keep: int = Field(ge=1, description="Groups that a token may take experts from. Required.")
    top: int = Field(
        default=2,
        ge=1,
        description="A group's score is the sum of this many of its highest scores: 2 is DeepSeek-V3's rule, 1 (the"
        " maximum) DeepSeek-V2's. Default: 2.",
    )

    @field_validator("keep")
    @classmethod
    def _keep_leaves_a_choice(cls, value: int, info: ValidationInfo) -> int:
        number = info.data.get("number", value)
        if value > number:
            raise ValueError(f"it must be from 1 to number, which is {number}. Use keep: {number} at most.")
        return value


class BiasUpdate(Section):
    """How the selection bias follows the load: once per optimizer step, from the counts of all ranks."""

    rule: Literal["sign", "proportional", "pid"] = Field(
        default="sign",
        description="sign: up by rate for an expert with less than its share, down for one with more, re-centred"
        " (DeepSeek-V3); proportional: rate times the relative error of the load (LongCat-Flash); pid: proportional"
        " plus the error's sum times integral and its change times derivative. Default: sign.",
    )
    rate: float = Field(default=1e-3, ge=0, description="Size of an update. Default: 0.001.")
    until: int | None = Field(
        default=None, ge=0, description="Step after which the bias stays as it is. Default: null, never."
    )
    experts_per_token: float | None = Field(
        default=None,
        gt=0,
        description="With zero experts: how many of a token's top_k shall be real experts on average. Default: null,"
        " as many as an even load over all of them gives.",
    )
    integral: float = Field(default=0.0, ge=0, description="pid: factor of the errors' sum. Default: 0.")
    derivative: float = Field(default=0.0, ge=0, description="pid: factor of the error's change. Default: 0.")

    @field_validator("integral", "derivative")
    @classmethod
    def _only_pid_has_them(cls, value: float, info: ValidationInfo) -> float:
        rule = info.data.get("rule", "pid")
        if value and rule != "pid":
            raise ValueError(f"the rule is {rule}, which does not use it. Use rule: pid, or leave it out.")
        return value


class RouterOptions(Section):
    """What every router has."""

    kind: str = Field(description="Which router. Default: topk.")
    jitter: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Training only: the router's input is multiplied by uniform noise between 1 - jitter and"
        " 1 + jitter. Default: 0.",
    )
    input_noise: float = Field(
        default=0.0,
        ge=0,
        description="Training only: standard deviation of normal noise that is added to the router's input."
        " Default: 0.",
    )
    apply: Literal["output", "input"] = Field(
        default="output",
        description="What the weights multiply: output, the experts' outputs; or input, the experts' inputs as in"
        " Llama 4. Default: output.",
    )
    compute: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type of logits and softmax. float32 is float32 or wider; bfloat16 exists only to show why not"
        " (recipes/experiments/selective-precision.yaml). Default: float32.",
    )
    freeze: bool = Field(default=False, description="Whether the router keeps its initial weights. Default: false.")


class WeightOptions(RouterOptions):
    """What routers have whose weights follow from scores."""

    weights: WeightRule | None = Field(
        default=None,
        description="normalised divides the chosen scores by their sum, raw keeps them. Default: null, which is"
        " normalised, and raw for top_k 1.",
    )
    scale: float = Field(default=1.0, gt=0, description="Factor on all weights; DeepSeek-V3 has 2.5. Default: 1.")


class SwitchRouter(RouterOptions):
    """Top-1 with the raw probability as weight (Switch Transformer, arXiv 2101.03961)."""

    kind: Literal["switch"] = Field(default="switch", description="Which router. Default: topk.")
    jitter: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Training only: the router's input is multiplied by uniform noise between 1 - jitter and"
        " 1 + jitter. Default: 0.01.",
    )


class TopKRouter(WeightOptions):
    """Softmax, then the highest top_k (Mixtral, OLMoE, Qwen3-MoE, gpt-oss, DeepSeek-V2)."""

    kind: Literal["topk"] = Field(default="topk", description="Which router. Default: topk.")
    softmax: Literal["before", "after"] = Field(
        default="before",
        description="before: over all experts, then the choice; after: over the chosen logits alone, which gives the"
        " same numbers as before with normalised weights. Default: before.",
    )
    bias: bool = Field(
        default=False, description="Whether the router's logits have a learned bias, as in gpt-oss. Default: false."
    )
    groups: GroupsSection | None = Field(default=None, description="Group-limited selection. Default: null, none.")

    @field_validator("softmax")
    @classmethod
    def _after_is_normalised(cls, value: str, info: ValidationInfo) -> str:
        if value == "after" and info.data.get("weights") == "raw":
            raise ValueError(
                "a softmax over the chosen logits always sums to 1, but weights is raw. Leave weights out, or use"
                " softmax: before."
            )
        return value


class NoisyTopKRouter(RouterOptions):
    """Top-k of logits with learned noise, softmax over those taken (Shazeer et al. 2017, arXiv 1701.06538)."""

    kind: Literal["noisy_topk"] = Field(default="noisy_topk", description="Which router. Default: topk.")


class GShardRouter(RouterOptions):
    """Top-2 whose second expert is taken at random in proportion to its weight (GShard, arXiv 2006.16668)."""

    kind: Literal["gshard"] = Field(default="gshard", description="Which router. Default: topk.")


class ExpertChoiceRouter(RouterOptions):
    """Each expert takes its best tokens (Zhou et al. 2022, arXiv 2202.09368). Not causal."""

    kind: Literal["expert_choice"] = Field(default="expert_choice", description="Which router. Default: topk.")
    sees_the_future: bool = Field(
        default=False,
        validate_default=True,
        description="Must be true: whether a token is taken depends on the tokens behind it, so a causal model trained"
        " this way has a held-out loss that generation cannot reach. Default: false.",
    )

    @field_validator("sees_the_future")
    @classmethod
    def _insists(cls, value: bool) -> bool:
        if not value:
            raise ValueError(_FUTURE)
        return value


_FUTURE = (
    "expert_choice lets an expert compare a token with later ones, which a causal model must not do: losses look better"
    " than generation will be. Use another router, or insist with sees_the_future: true."
)


class SigmoidBiasRouter(WeightOptions):
    """Scores of their own per expert; a bias that no gradient moves balances the selection (DeepSeek-V3)."""

    kind: Literal["sigmoid_bias"] = Field(default="sigmoid_bias", description="Which router. Default: topk.")
    score: Score = Field(
        default="sigmoid",
        description="Score of a logit z: sigmoid (DeepSeek-V3); sqrt_softplus, sqrt(log(1 + exp z)) (DeepSeek-V4); or"
        " softmax over all experts (LongCat-Flash). Default: sigmoid.",
    )
    groups: GroupsSection | None = Field(default=None, description="Group-limited selection. Default: null, none.")
    update: BiasUpdate | None = Field(
        default=BiasUpdate(),
        description="How the bias follows the load; null: it stays 0. Default: sign with rate 0.001.",
    )


class HashRouter(WeightOptions):
    """Experts by token id, from a fixed random table (Roller et al. 2021, arXiv 2106.04426)."""

    kind: Literal["hash"] = Field(default="hash", description="Which router. Default: topk.")
    score: Score = Field(default="softmax", description="Score of a logit, which gives the weights. Default: softmax.")


ROUTERS: dict[str, type[RouterOptions]] = {
    "switch": SwitchRouter,
    "topk": TopKRouter,
    "noisy_topk": NoisyTopKRouter,
    "gshard": GShardRouter,
    "expert_choice": ExpertChoiceRouter,
    "sigmoid_bias": SigmoidBiasRouter,
    "hash": HashRouter,
}


def _kind(value: object) -> str | None:
    kind = value.get("kind", "topk") if isinstance(value, dict) else getattr(value, "kind", None)
    return union_tag(kind) if isinstance(kind, str) and kind in ROUTERS else None


RouterSection = Annotated[
    Annotated[SwitchRouter, Tag(union_tag("switch"))]
    | Annotated[TopKRouter, Tag(union_tag("topk"))]
    | Annotated[NoisyTopKRouter, Tag(union_tag("noisy_topk"))]
    | Annotated[GShardRouter, Tag(union_tag("gshard"))]
    | Annotated[ExpertChoiceRouter, Tag(union_tag("expert_choice"))]
    | Annotated[SigmoidBiasRouter, Tag(union_tag("sigmoid_bias"))]
    | Annotated[HashRouter, Tag(union_tag("hash"))],
    union_discriminator(_kind, "kind", ROUTERS),
]


def router_problem(router: RouterOptions, num_experts: int, top_k: int, zero_experts: int) -> str:
    """What keeps a router from working with these sizes, with a repair; empty when nothing does.

    Args:
        router: one of the classes above.
        num_experts, top_k, zero_experts: sizes of the layer.
    """
    kind = router.kind
    given = f"moe.router.kind is {kind}"
    if kind == "switch" and top_k != 1:
        return f"{given} but moe.top_k is {top_k}; a Switch router takes one expert. Use top_k: 1, or kind: topk."
    if kind == "gshard" and top_k != 2:
        return f"{given} but moe.top_k is {top_k}; GShard takes two experts. Use top_k: 2, or kind: topk."
    if top_k == 1 and kind == "noisy_topk":
        return (
            f"{given} but moe.top_k is 1; its softmax over the one expert taken is always 1, so the router would"
            " learn nothing from the task. Use top_k: 2 or more, or kind: switch."
        )
    if top_k == 1 and (getattr(router, "weights", None) == "normalised" or getattr(router, "softmax", "") == "after"):
        return (
            "moe.top_k is 1 but the weights of moe.router are normalised; over one expert the weight is always"
            " 1, so the router would learn nothing from the task. Use weights: raw (and softmax: before), or more"
            " experts per token."
        )
    if zero_experts and kind not in ("switch", "topk", "sigmoid_bias"):
        return (
            f"moe.zero_experts is {zero_experts} but {given}; only switch, topk and sigmoid_bias choose among"
            " zero experts. Use zero_experts: 0, or another kind."
        )
    wanted = getattr(getattr(router, "update", None), "experts_per_token", None)
    if wanted is not None and (not zero_experts or wanted > top_k):
        return (
            f"moe.router.update.experts_per_token is {wanted:g} with moe.top_k {top_k} and {zero_experts} zero"
            " experts; it says how many of a token's top_k shall be real ones where there are zero experts. Use at most"
            " top_k and zero_experts, or leave it out."
        )
    groups = getattr(router, "groups", None)
    return "" if groups is None else _groups_problem(groups, num_experts, top_k, zero_experts)


def _groups_problem(groups: GroupsSection, num_experts: int, top_k: int, zero_experts: int) -> str:
    place = "moe.router.groups"
    if zero_experts:
        return (
            f"{place} is set but moe.zero_experts is {zero_experts}; zero experts are in no group. Remove one of"
            " the two."
        )
    if num_experts % groups.number:
        near = [size for size in nearest_divisors(num_experts, groups.number) if size > 1]
        repair = f"Use number: {alternatives(near)}." if near else "Remove the groups."
        return (
            f"{place}.number is {groups.number} but moe.num_experts is {num_experts}; the groups must be equal."
            f" {repair}"
        )
    size = num_experts // groups.number
    if groups.top > size:
        return f"{place}.top is {groups.top} but a group has {size} experts. Use top: {size} at most."
    if groups.keep * size < top_k:
        return (
            f"{place}.keep is {groups.keep}, which leaves {groups.keep * size} experts, but moe.top_k is {top_k}."
            f" Use keep: {-(-top_k // size)} at least, or top_k: {groups.keep * size} at most."
        )
    return ""
