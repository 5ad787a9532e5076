"""The axes of a run's record of expert loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_async.comm import World
from moe_async.observe import LoadMeta
from moe_async.observe.store import NO_DOMAIN

if TYPE_CHECKING:
    from moe_async.recipe import Recipe


def load_meta(recipe: Recipe, world: World, domains: tuple[str, ...]) -> LoadMeta:
    """The axes of a run's record; no layer where the model has no experts."""
    layers = recipe.moe.moe_layers(recipe.model.layers) if recipe.moe else ()
    moe, topology = recipe.moe, world.topology
    if moe is None or not layers:
        return LoadMeta((), (), (), domains=(*domains, NO_DOMAIN))
    return LoadMeta(
        layers=tuple(f"layer {layer}" for layer in layers),
        experts=(moe.num_experts,) * len(layers),
        top_k=(moe.top_k,) * len(layers),
        zero_experts=moe.zero_experts,
        domains=(*domains, NO_DOMAIN),
        rank_experts=tuple(topology.experts_of(rank) for rank in range(world.size)),
        balanced_by=_balanced_by(recipe),
    )


def _balanced_by(recipe: Recipe) -> tuple[str, ...]:
    assert recipe.moe is not None
    terms = tuple(f"moe.balance: {term.loss}, coefficient {term.coefficient:g}" for term in recipe.moe.balance)
    update = getattr(recipe.moe.router, "update", None)
    return terms + ((f"moe.router.update: {update.rule}, rate {update.rate:g}",) if update is not None else ())
