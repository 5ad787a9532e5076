"""Joining a launch and putting a model under the engine: the first calls of every training script."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import nn

from moe_async.comm import World, make_world, read_launch, start_process_group
from moe_async.engine.balance import BalanceLosses
from moe_async.engine.deepspeed_bridge import DeepSpeedBridge, communication_backend, select_device
from moe_async.engine.step import Engine
from moe_async.errors import DataError, EngineError, RecipeError
from moe_async.moe import MoELayer
from moe_async.recipe import deepspeed_config
from moe_async.topology import Topology

if TYPE_CHECKING:
    from moe_async.data import Corpus, Tokenizer
    from moe_async.recipe import Recipe

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A collective of this package whose partner stays away for this long fails. The groups that DeepSpeed makes for itself
keep the back-end's own limit (30 minutes for gloo)."""


def join_world(recipe: Recipe, timeout: timedelta = COLLECTIVE_TIMEOUT) -> World:
    """Join the ranks of this launch (`deepspeed`, `torchrun`, Slurm, or a process on its own) and make its groups.

    Every rank calls it once; blocks until all have come.

    Raises:
        RecipeError: the recipe does not fit the number of ranks.
        CommunicationError: the launcher's variables are missing or wrong.
    """
    launch = read_launch()
    recipe.check_world(launch.world_size)
    device = select_device(launch.local_rank)
    start_process_group(communication_backend(), launch, timeout)
    num_experts = recipe.moe.num_experts if recipe.moe else 1
    topology = Topology(launch.world_size, recipe.parallel.expert, num_experts)
    return make_world(topology, launch, device, timeout)


def initialize(model: nn.Module, recipe: Recipe, world: World | None = None) -> Engine:
    """Put ``model`` under the engine that the recipe describes. Every rank calls it; blocks.

    Args:
        model: this rank's model on its device: of `build_model`, or one's own with `MoELayer` inside. For `train_step`
            its forward takes ``(tokens, token_mask)`` and returns `moe_async.model.ModelOutput`.
        recipe: its ``optim``, ``moe.balance``, ``parallel.zero``, ``sync`` and ``train`` entries are used.
            ``train.seed`` seeds torch's random state, on every rank alike: the noise of routers follows from it. Under
            a policy of ``sync.between`` that sends gradients, steps leave the weights as they are.
        world: what the model was built with (`join_world`); None: a process on its own, which is joined here.

    Raises:
        EngineError: the model was built for other ranks than these.
    """
    world = world or join_world(recipe)
    check_built_for(model, world)
    torch.manual_seed(recipe.train.seed)
    between = recipe.sync.between
    bridge = DeepSpeedBridge(
        model,
        recipe.optim,
        deepspeed_config(recipe, world.size),
        world,
        recipe.sync.delay,
        sends_gradients=between is not None and between.sends_gradients,
    )
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.check_finite = False
    return Engine(bridge, recipe.optim, BalanceLosses(recipe.moe, world.device), recipe.train.steps)


def check_built_for(model: nn.Module, world: World) -> None:
    """Refuse a model whose MoE layers talk to other ranks than ``world`` does. Every rank calls it; blocks.

    All ranks fail together: one that failed alone would leave the others waiting.
    """
    problem = ""
    for name, layer in model.named_modules():
        # A group of one rank talks to nobody, whichever rank it was made for.
        ranks = layer.dispatch.group.ranks if isinstance(layer, MoELayer) else world.expert.ranks
        if ranks != world.expert.ranks and max(len(ranks), world.expert.size) > 1:
            problem = (
                f"{name} was built for the expert group of ranks {list(ranks)} but rank {world.rank} is in "
                + str(list(world.expert.ranks))
            )
    problems = [text for text in world.everyone.gather_objects(problem) if text]
    if problems:
        raise EngineError(
            f"{problems[0]}; pass the World that join_world(recipe) returns to build_model (or MoELayer) and to "
            "initialize."
        )


def check_vocabulary(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Refuse a model without a place for every token id."""
    size = recipe.model.vocab_size
    if size is not None and size < tokenizer.vocab_size:
        raise RecipeError(
            f"model.vocab_size is {size} but the tokenizer {recipe.data.tokenizer!r} has {tokenizer.vocab_size} ids; "
            f"use {tokenizer.vocab_size} or more, or leave the entry out."
        )


def check_same_text(corpus: Corpus, world: World) -> None:
    """Refuse ranks that read different text. Every rank calls it; blocks."""
    found = world.everyone.gather_objects(corpus.fingerprint)
    others = [rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]]
    if others:
        raise DataError(
            f"ranks {others} read other text than rank 0, so they would train on other data or wait for one another: "
            "a source changes while it is read, or machines hold different files. Give all ranks the same files."
        )
