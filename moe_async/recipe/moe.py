"""The section `moe`: which layers hold experts, how tokens reach them, and what keeps routing even.

Each key states its meaning, unit and default. Rules inside one section live here; rules that compare sections live
in `schema`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, ValidationInfo, field_validator

from moe_async.errors import RecipeError
from moe_async.recipe.balance import BalanceTerm, loss_problems
from moe_async.recipe.messages import alternatives, describe_errors, nearest_divisors, refuse_all, statement, union_tag
from moe_async.recipe.routers import RouterSection, TopKRouter, router_problem
from moe_async.recipe.section import Section


class EveryLayers(Section):
    """MoE layers at a fixed distance: offset, offset + every, offset + 2 every, ..."""

    every: int = Field(ge=1, description="Distance between MoE layers; 2 makes each second layer MoE. Required.")
    offset: int = Field(default=0, ge=0, description="Index of the first MoE layer, from 0. Default: 0.")


def _layers_form(value: object) -> str | None:
    """Tells which of the three forms of `moe.layers` a value has."""
    if value == "all":
        return union_tag("word")
    if isinstance(value, list):
        return union_tag("list")
    return union_tag("mapping") if isinstance(value, (dict, EveryLayers)) else None


MoeLayers = Annotated[
    Annotated[Literal["all"], Tag(union_tag("word"))]
    | Annotated[list[Annotated[int, Field(ge=0)]], Tag(union_tag("list"))]
    | Annotated[EveryLayers, Tag(union_tag("mapping"))],
    Discriminator(
        _layers_form,
        custom_error_type="layers_form",
        custom_error_message="it must be all, a list of layer indices, or a mapping such as {every: 2, offset: 1}",
    ),
]


class CapacitySection(Section):
    """A limit to the tokens that an expert takes from one rank's micro-batch: capacity = factor * top_k * T / experts.

    T is the largest number of tokens of any rank in training, so that all ranks agree; the rank's own in evaluation.
    """

    factor: float | None = Field(
        description="Capacity in training, as a multiple of an even load, above 0; null: no limit. Required."
    )
    eval_factor: float | None = Field(
        default=None, gt=0, description="The same in evaluation. Default: null, no limit, so nothing is dropped there."
    )
    policy: Literal["position", "probability", "random", "batch_prioritised"] = Field(
        default="position",
        description="Which assignments stay when an expert has too many. position: first choices before second ones,"
        " earlier tokens first (GShard); probability: the most probable; random: any; batch_prioritised: first choices"
        " before second ones, tokens with the highest best probability first (V-MoE). Default: position.",
    )
    normalise: Literal["before", "after"] = Field(
        default="before",
        description="before: a token that lost an expert keeps the others' weights as they are (GShard); after: they"
        " grow to the sum that they had together. Default: before.",
    )
    minimum: int = Field(default=1, ge=1, description="Capacity at least. Default: 1.")

    @field_validator("factor")
    @classmethod
    def _factor_is_positive(cls, value: float | None) -> float | None:
        if value is not None and value <= 0:
            raise ValueError("it must be greater than 0. Use 1.25, or null for no limit.")
        return value


class MoeSection(Section):
    """Which layers hold experts, how many, and how tokens reach them."""

    layers: MoeLayers = Field(
        default="all",
        description="Which transformer layers are MoE: all, a list of indices from 0, or a mapping with"
        " every and offset. Default: all.",
    )
    num_experts: int = Field(ge=1, description="Number of routed experts in each MoE layer. Required.")
    zero_experts: int = Field(
        default=0,
        ge=0,
        description="Further choices of the router that cost nothing: a token that takes one gets itself back, times"
        " the weight (LongCat-Flash). Default: 0.",
    )
    top_k: int = Field(ge=1, description="Experts that each token goes to, from 1 to num_experts. Required.")
    router: RouterSection = Field(
        default=TopKRouter(),
        description="How tokens choose experts, by its kind. Default: topk with normalised weights.",
    )
    expert_dim: int = Field(gt=0, description="Hidden width of one expert, in features. Required.")
    expert: Literal["swiglu", "gelu", "relu2", "swiglu_clamped"] = Field(
        default="swiglu",
        description="Kind of the experts: swiglu, gelu, relu2 (squared ReLU), or swiglu_clamped (gpt-oss: limits of 7"
        " and a steeper gate). Default: swiglu.",
    )
    expert_bias: bool = Field(
        default=False, description="Whether both matrices of an expert have a bias, as in gpt-oss. Default: false."
    )
    expert_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Training only: dropout inside the experts. Default: 0."
    )
    shared_dim: int = Field(
        default=0,
        ge=0,
        description="Hidden width of the shared expert that sees every token, in features; 0 means none. Default: 0.",
    )
    shared_gate: bool = Field(
        default=False,
        description="Whether a learned gate, a sigmoid of the token, multiplies the shared expert. Default: false.",
    )
    capacity: CapacitySection | None = Field(
        default=None, description="Limit of tokens per expert. Default: null, nothing is ever dropped."
    )
    device_groups: int | None = Field(
        default=None,
        ge=2,
        description="Equal groups of consecutive experts that the losses device and communication balance; as a rule"
        " the expert-parallel size. Default: null, none.",
    )
    balance: list[BalanceTerm] = Field(default=[], description="Balance losses, each at most once. Default: none.")
    step_loads: Literal["auto", "count", "keep"] = Field(
        default="auto",
        description="How scope step knows the loads of a step before its first backward pass. count: one more forward"
        " pass without gradients; keep: the activations of all its micro-batches are kept until then; auto: keep with"
        " one micro-batch, where it costs nothing, else count. Default: auto.",
    )
    dispatcher: Literal["auto", "local", "all_to_all", "all_gather"] = Field(
        default="auto",
        description="How tokens travel to experts. all_to_all: each to the ranks of its experts; all_gather: all to all"
        " ranks, for few ranks and small batches; local: nowhere, with parallel.expert 1. Default: auto, local or"
        " all_to_all.",
    )
    deduplicate: bool = Field(
        default=False,
        description="all_to_all: a token with several experts on one rank travels there once, and one sum comes back."
        " Default: false.",
    )
    wire: Literal["compute", "float32"] = Field(
        default="compute",
        description="Type of the numbers that travel: compute, that of the experts; or float32. Default: compute.",
    )
    products: Literal["auto", "loop", "grouped"] = Field(
        default="auto",
        description="Matrix products of the experts. loop: one after another; grouped: all at once with"
        " torch.nn.functional.grouped_mm; auto: grouped on accelerators that have it. Default: auto.",
    )

    compile: bool = Field(
        default=False,
        description="Whether the experts' computation runs under torch.compile; the first steps then take up to a"
        " minute, and CPUs need a C++ compiler. Default: false.",
    )

    @field_validator("layers")
    @classmethod
    def _layers_differ(cls, value: str | list[int] | EveryLayers) -> str | list[int] | EveryLayers:
        if not isinstance(value, list):
            return value
        if not value:
            raise ValueError("it names no layer. List at least one, or set moe: null for a dense model.")
        twice = [index for index, count in Counter(value).items() if count > 1]
        if twice:
            raise ValueError(f"it names layer {twice[0]} more than once. Name each layer once.")
        return value

    @field_validator("top_k")
    @classmethod
    def _top_k_fits(cls, value: int, info: ValidationInfo) -> int:
        experts = info.data.get("num_experts", value)
        if value > experts:
            raise ValueError(
                f"it must be from 1 to moe.num_experts, which is {experts}."
                f" Use top_k: {experts} at most, or num_experts: {value} at least."
            )
        return value

    @field_validator("router")
    @classmethod
    def _router_fits(cls, value: RouterSection, info: ValidationInfo) -> RouterSection:
        if {"num_experts", "top_k", "zero_experts"} <= info.data.keys():
            problem = router_problem(value, info.data["num_experts"], info.data["top_k"], info.data["zero_experts"])
            if problem:
                raise statement(problem)
        return value

    @field_validator("shared_gate")
    @classmethod
    def _gate_has_an_expert(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("shared_dim") == 0:
            raise ValueError("there is no shared expert, because shared_dim is 0. Set shared_dim, or remove the gate.")
        return value

    @field_validator("capacity")
    @classmethod
    def _capacity_fits(cls, value: CapacitySection | None, info: ValidationInfo) -> CapacitySection | None:
        router = info.data.get("router")
        if value is not None and router is not None and router.kind == "expert_choice":
            raise statement(
                "moe.capacity is set but moe.router.kind is expert_choice, where each expert takes top_k * tokens /"
                " experts tokens anyway. Remove moe.capacity."
            )
        if value is not None and value.normalise == "after" and getattr(router, "weights", None) == "raw":
            raise statement(
                "moe.capacity.normalise is after but moe.router.weights is raw; raw weights are not normalised. Use"
                " normalise: before, or weights: normalised."
            )
        return value

    @field_validator("device_groups")
    @classmethod
    def _groups_divide(cls, value: int | None, info: ValidationInfo) -> int | None:
        experts = info.data.get("num_experts")
        if value is not None and experts is not None and experts % value:
            near = [size for size in nearest_divisors(experts, value) if size > 1]
            repair = f"Use device_groups: {alternatives(near)}." if near else "Leave it out."
            raise ValueError(f"it must divide moe.num_experts, which is {experts}. {repair}")
        return value

    @field_validator("balance")
    @classmethod
    def _losses_differ(cls, value: list[BalanceTerm]) -> list[BalanceTerm]:
        for loss, count in Counter(term.loss for term in value).items():
            if count > 1:
                raise statement(
                    f"moe.balance has {count} terms with loss {loss}; each loss may appear once."
                    " Keep one and add up the coefficients."
                )
        return value

    @field_validator("balance")
    @classmethod
    def _losses_fit(cls, value: list[BalanceTerm], info: ValidationInfo) -> list[BalanceTerm]:
        losses = {term.loss for term in value}
        refuse_all(loss_problems(losses, info.data), value)
        return value

    @field_validator("deduplicate")
    @classmethod
    def _deduplicates_what_travels(cls, value: bool, info: ValidationInfo) -> bool:
        dispatcher = info.data.get("dispatcher", "auto")
        if value and dispatcher in ("local", "all_gather"):
            raise ValueError(
                f"moe.dispatcher is {dispatcher}, where no token travels twice. Use dispatcher: all_to_all."
            )
        return value

    @property
    def choices(self) -> int:
        """What the router chooses from: experts and zero experts."""
        return self.num_experts + self.zero_experts

    def moe_layers(self, num_layers: int) -> tuple[int, ...]:
        """Gives the indices of the MoE layers of a model with `num_layers` layers, in ascending order.

        Raises:
            RecipeError: if an index lies outside the model, or no layer is left.
        """
        if isinstance(self.layers, EveryLayers):
            chosen = tuple(range(self.layers.offset, num_layers, self.layers.every))
            if not chosen:
                raise RecipeError(
                    f"moe.layers.offset is {self.layers.offset} but model.layers is {num_layers}; no layer"
                    f" would be MoE. Use an offset from 0 to {num_layers - 1}."
                )
            return chosen
        if isinstance(self.layers, list):
            outside = [index for index in self.layers if index >= num_layers]
            if outside:
                raise RecipeError(
                    f"moe.layers names layer {alternatives(outside)} but model.layers is {num_layers};"
                    f" use indices from 0 to {num_layers - 1}."
                )
            return tuple(sorted(self.layers))
        return tuple(range(num_layers))


def parse_moe(options: Mapping[str, Any]) -> MoeSection:
    """The section that options of a single layer stand for; None is left out.

    Raises:
        RecipeError: an option is not valid, or does not fit another; lists every error.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return MoeSection.model_validate(given)
    except ValidationError as error:
        raise RecipeError("\n".join(describe_errors(error, MoeSection, given))) from error
