"""The section `model`: the dense skeleton.

Each key states its meaning, unit and default. Rules inside one section live here; rules that compare sections live
in `schema`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from moe_async.recipe.messages import alternatives, nearest_divisors, nearest_multiples, statement
from moe_async.recipe.section import Section


class InitSection(Section):
    """How weight matrices begin: normal values around zero. Norms begin at one, biases at zero."""

    scale: float = Field(
        default=1.0,
        gt=0,
        description="The standard deviation is the square root of scale / inputs; Switch Transformer has 0.1."
        " Default: 1.",
    )
    std: float | None = Field(
        default=None,
        gt=0,
        description="One standard deviation for all matrices and the embedding instead. Default: null, by scale.",
    )
    truncate: float | None = Field(
        default=None,
        gt=0,
        description="Values beyond this many standard deviations are drawn anew; 2 in Switch Transformer, 3 in OLMoE."
        " Default: null, never.",
    )
    depth_scaled: bool = Field(
        default=True,
        description="Whether matrices that write into the residual stream begin smaller, by the square root of twice"
        " the layers. Default: true.",
    )


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
    qk_norm: Literal["none", "head", "full"] = Field(
        default="none",
        description="Norm of queries and keys: head, of each head (Qwen3); full, of all heads together (OLMoE)."
        " Default: none.",
    )
    init: InitSection = Field(default=InitSection(), description="How weights begin. Default: by the number of inputs.")
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
