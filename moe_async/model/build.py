"""A model from a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moe_async.comm import World
from moe_async.data.tokenizer import make_tokenizer
from moe_async.model.transformer import Transformer, TransformerShape
from moe_async.moe import MoELayer
from moe_async.moe.classes import classify
from moe_async.moe.feed_forward import FeedForward
from moe_async.ops.initialise import Init
from moe_async.topology import Topology

if TYPE_CHECKING:
    from moe_async.recipe import ModelSection, MoeSection, Recipe

EXPERT_DTYPE = {"selective": torch.bfloat16, "bf16": torch.bfloat16, "float32": None, "float64": None}
"""Dtype of experts and of their tokens on the wire, by precision preset; None: the parameters' own."""

DENSE_DTYPE = {"selective": None, "bf16": torch.bfloat16, "float32": None, "float64": None}
"""Dtype in which dense layers compute, by precision preset; None: the parameters' own."""


def build_model(recipe: Recipe, world: World | None = None) -> Transformer:
    """The recipe's model with its initial weights, on this rank's device.

    Args:
        recipe: a resolved recipe.
        world: this rank's view of the launch (`moe_async.join_world`); None: one process with all experts, on the CPU.

    Parameters are float32 (float64 with ``precision: float64``). One seed gives the same model at every number of
    ranks and expert-parallel size.
    """
    world = world or World(Topology(num_experts=recipe.moe.num_experts if recipe.moe else 1))
    parameter_dtype = torch.float64 if recipe.train.precision == "float64" else torch.float32
    with torch.device("meta"):
        model = make_transformer(recipe, world)
    model = model.to(parameter_dtype).to_empty(device=world.device)
    model.reset_parameters(recipe.train.seed)
    return model


def make_transformer(recipe: Recipe, world: World) -> Transformer:
    """The recipe's model without meaningful weights, on the ambient device: ``meta`` costs no memory."""
    shape = transformer_shape(recipe.model, make_tokenizer(recipe.data.tokenizer).vocab_size)
    precision = recipe.train.precision
    moe = recipe.moe
    moe_layers = moe.moe_layers(recipe.model.layers) if moe else ()

    def make_feed_forward(index: int) -> FeedForward | MoELayer:
        if moe is None or index not in moe_layers:
            return FeedForward(shape.dim, recipe.model.ffn_dim, recipe.model.ffn, shape.init)
        return _moe_layer(moe, shape, EXPERT_DTYPE[precision], world)

    return Transformer(
        shape,
        make_feed_forward,
        autocast_dtype=DENSE_DTYPE[precision],
        recompute=recipe.train.recompute,
    )


def transformer_shape(section: ModelSection, tokenizer_vocab: int) -> TransformerShape:
    """Sizes from the recipe's ``model`` section, with its defaults filled in."""
    return TransformerShape(
        dim=section.dim,
        layers=section.layers,
        heads=section.heads,
        kv_heads=section.kv_heads or section.heads,
        head_dim=section.head_dim or section.dim // section.heads,
        vocab_size=section.vocab_size or tokenizer_vocab,
        norm_eps=section.norm_eps,
        rope_theta=section.rope_theta,
        tie_embeddings=section.tie_embeddings,
        qk_norm=section.qk_norm,
        init=Init(
            scale=section.init.scale,
            std=section.init.std,
            truncate=section.init.truncate,
            # So that the residual stream does not grow with depth.
            output_scale=(2 * section.layers) ** -0.5 if section.init.depth_scaled else 1.0,
        ),
    )


def _moe_layer(moe: MoeSection, shape: TransformerShape, dtype: torch.dtype | None, world: World) -> MoELayer:
    return MoELayer(
        shape.dim,
        moe.num_experts,
        moe.top_k,
        moe.expert_dim,
        expert=moe.expert,
        router=moe.router,
        zero_experts=moe.zero_experts,
        expert_bias=moe.expert_bias,
        expert_dropout=moe.expert_dropout,
        shared_dim=moe.shared_dim,
        shared_gate=moe.shared_gate,
        capacity=moe.capacity,
        device_groups=moe.device_groups or 0,
        dispatcher=moe.dispatcher,
        deduplicate=moe.deduplicate,
        wire=moe.wire,
        products=moe.products,
        compile=moe.compile,
        compute_dtype=dtype,
        world=world,
        vocab_size=shape.vocab_size,
        init=shape.init,
    )


class ParameterCount(NamedTuple):
    """Sizes of a model over all ranks: ``total`` parameters, and those ``active`` for one token."""

    total: int
    active: int


def count_parameters(recipe: Recipe) -> ParameterCount:
    """Parameters of the recipe's model; of routed experts a token uses ``top_k``. Makes no weights."""
    moe = recipe.moe
    with torch.device("meta"):
        model = make_transformer(recipe, World(Topology(num_experts=moe.num_experts if moe else 1)))
    classes = classify(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if classes[name] == "expert")
    idle = round(experts * (1 - moe.top_k / moe.choices)) if moe else 0
    return ParameterCount(sum(sizes.values()), sum(sizes.values()) - idle)
