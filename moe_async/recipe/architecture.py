"""The sections that say what the model is: `model` and `moe`.

Each key states its meaning, unit and default. Rules inside one section live here; rules that compare sections live
in `schema`.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from moe_async.errors import RecipeError
from moe_async.recipe.messages import alternatives, nearest_divisors, nearest_multiples, statement


class Section(BaseModel):
    """What all sections share: unknown keys are errors, values are not converted and never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """The dense skeleton of the transformer."""

    dim: int = Field(gt=0, description="Width of the residual stream, in features. Required.")
    layers: int = Field(gt=0, description="Number of transformer layers. Required.")
    heads: int = Field(gt=0, description="Number of query heads in each attention layer. Required.")
    kv_heads: int = Field(
        default=None,
        validate_default=True,
        gt=0,
        description="Number of key and value heads; must divide heads. Default: heads.",
    )
    head_dim: int = Field(
        default=None,
        validate_default=True,
        gt=0,
        description="Width of one head, in features; must be even. Default: dim / heads.",
    )
    ffn_dim: int = Field(gt=0, description="Hidden width of the dense feed-forward layers, in features. Required.")
    ffn: Literal["swiglu", "gelu", "relu2"] = Field(
        default="swiglu", description="Kind of the dense feed-forward layers. Default: swiglu."
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="Added to the mean square in each RMS norm. Default: 1e-5.")
    rope_theta: float = Field(
        default=10000.0, gt=0, description="Base of the rotary position frequencies. Default: 10000."
    )
    tie_embeddings: bool = Field(
        default=True, description="Whether the output layer uses the token embedding's weight. Default: true."
    )
    vocab_size: int | None = Field(
        default=None, gt=0, description="Number of token ids. Default: null, the tokenizer's own number."
    )

    @field_validator("kv_heads", mode="before")
    @classmethod
    def _fill_kv_heads(cls, value: object, info: ValidationInfo) -> object:
        return info.data.get("heads", 1) if value is None else value

    @field_validator("kv_heads")
    @classmethod
    def _kv_heads_divide_heads(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("heads", value)
        if heads % value:
            near = alternatives(nearest_divisors(heads, value))
            raise ValueError(f"it must divide model.heads, which is {heads}. Use kv_heads: {near}.")
        return value

    @field_validator("head_dim", mode="before")
    @classmethod
    def _fill_head_dim(cls, value: object, info: ValidationInfo) -> object:
        if value is not None:
            return value
        if "dim" not in info.data or "heads" not in info.data:
            return 2  # a stand-in: the section is refused anyway, for its dim or heads
        dim, heads = info.data["dim"], info.data["heads"]
        if dim % (2 * heads):
            near = alternatives(nearest_multiples(dim, 2 * heads))
            raise statement(
                f"model.dim is {dim} but model.heads is {heads}; without head_dim the heads share dim evenly, and"
                f" each needs an even width for rotary positions. Use dim: {near}, or set model.head_dim."
            )
        return dim // heads

    @field_validator("head_dim")
    @classmethod
    def _head_dim_is_even(cls, value: int) -> int:
        if value % 2:
            near = alternatives(nearest_multiples(value, 2))
            raise ValueError(f"it must be even for rotary positions. Use head_dim: {near}.")
        return value


class EveryLayers(Section):
    """MoE layers at a fixed distance: offset, offset + every, offset + 2 every, ..."""

    every: int = Field(ge=1, description="Distance between MoE layers; 2 makes each second layer MoE. Required.")
    offset: int = Field(default=0, ge=0, description="Index of the first MoE layer, from 0. Default: 0.")


def _layers_form(value: object) -> str | None:
    """Tells which of the three forms of `moe.layers` a value has."""
    if value == "all":
        return "<word>"
    if isinstance(value, list):
        return "<list>"
    return "<mapping>" if isinstance(value, (dict, EveryLayers)) else None


MoeLayers = Annotated[
    Annotated[Literal["all"], Tag("<word>")]
    | Annotated[list[Annotated[int, Field(ge=0)]], Tag("<list>")]
    | Annotated[EveryLayers, Tag("<mapping>")],
    Discriminator(
        _layers_form,
        custom_error_type="layers_form",
        custom_error_message="it must be all, a list of layer indices, or a mapping such as {every: 2, offset: 1}",
    ),
]


class BalanceTerm(Section):
    """One loss that keeps routing even."""

    loss: Literal["switch", "z"] = Field(
        description="switch: experts times the sum of token share and mean probability, 1 when even;"
        " z: mean squared log-sum-exp of the router logits. Required."
    )
    coefficient: float = Field(ge=0, description="Factor of the loss in the training objective. Required.")
    scope: Literal["micro_batch", "step"] = Field(
        default="micro_batch",
        description="Tokens over which switch takes the load: each micro-batch of each rank, or step: all of an"
        " optimizer step, which is exactly the loss of one large batch and costs one more forward pass. z is the same"
        " for both. Default: micro_batch.",
    )


class MoeSection(Section):
    """Which layers hold experts, how many, and how tokens reach them."""

    layers: MoeLayers = Field(
        default="all",
        description="Which transformer layers are MoE: all, a list of indices from 0, or a mapping with"
        " every and offset. Default: all.",
    )
    num_experts: int = Field(ge=1, description="Number of routed experts in each MoE layer. Required.")
    top_k: int = Field(ge=1, description="Experts that each token goes to, from 1 to num_experts. Required.")
    expert_dim: int = Field(gt=0, description="Hidden width of one expert, in features. Required.")
    expert: Literal["swiglu", "gelu", "relu2"] = Field(
        default="swiglu", description="Kind of the experts: swiglu, gelu, or relu2 (squared ReLU). Default: swiglu."
    )
    weights: Literal["normalised", "raw"] = Field(
        default="normalised",
        description="How the chosen experts' outputs are weighted: normalised divides the chosen probabilities by"
        " their sum, raw keeps them. With top_k 1 the raw probability is always kept, because a weight that is"
        " always 1 would give the router no gradient. Default: normalised.",
    )
    shared_dim: int = Field(
        default=0,
        ge=0,
        description="Hidden width of the shared expert that sees every token, in features; 0 means none. Default: 0.",
    )
    balance: list[BalanceTerm] = Field(default=[], description="Balance losses, each at most once. Default: none.")

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
