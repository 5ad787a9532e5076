"""What keeps a learner out of a run: another recipe, another code, other libraries. The first difference is named."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_async.comm import World
from moe_async.comm.session import Header
from moe_async.recipe import dump_recipe, parse_recipe

if TYPE_CHECKING:
    from moe_async.recipe import Recipe

_FREE = ("name", "parallel", "log", "deepspeed")
"""Sections in which learners of one run may differ: where and on how many ranks each of them computes."""

_LIBRARIES = ("torch", "deepspeed")


def make_hello(recipe: Recipe, world: World, learner: int) -> Header:
    """What a learner says of itself.

    Args:
        recipe: its resolved recipe.
        world: its ranks.
        learner: the place it wants; -1: any.
    """
    return {
        "kind": "hello",
        "learner": learner,
        "world_size": world.size,
        "expert_parallel": world.topology.expert_parallel,
        "recipe": dump_recipe(recipe),
        "code": code_fingerprints(),
        "libraries": library_versions(),
    }


def library_versions() -> dict[str, str]:
    """Versions of the libraries on which numbers depend."""
    return {name: version(name) for name in _LIBRARIES}


def code_fingerprints() -> dict[str, str]:
    """A short hash of each module of this package, by its path in it."""
    root = Path(__file__).parents[1]
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(root.rglob("*.py"))
        if "tools" not in path.relative_to(root).parts
    }


def difference(first: Header, other: Header) -> str:
    """The first thing in which a learner differs from the one that began the run; empty when nothing does."""
    for name in _LIBRARIES:
        ours, theirs = first["libraries"].get(name), other["libraries"].get(name)
        if ours != theirs:
            return f"the run has {name} {ours} but this learner {theirs}. Install the same version."
    for path in sorted(first["code"].keys() | other["code"].keys()):
        if first["code"].get(path) != other["code"].get(path):
            return f"moe_async/{path} differs from that of the run. Install the same version of the package."
    run, own = dict(_entries(first["recipe"])), dict(_entries(other["recipe"]))
    for path in run | own:
        if run.get(path) != own.get(path):
            return (
                f"{path} is {run.get(path)!r} in the run but {own.get(path)!r} in this learner's recipe. Use the run's "
                "recipe."
            )
    if run.get("sync.via") == "all_reduce":
        return _shape_difference(first, other)
    return ""


def _shape_difference(first: Header, other: Header) -> str:
    """Learners that add up among themselves do so rank by rank."""
    sizes = [(header["world_size"], header["expert_parallel"]) for header in (first, other)]
    if sizes[0] == sizes[1]:
        return ""
    run, own = (f"{ranks} ranks with expert-parallel size {parallel}" for ranks, parallel in sizes)
    return (
        f"the run has learners of {run} but this learner has {own}; with sync.via all_reduce rank r of each adds up "
        "with rank r of the others. Start it as the others were started, or use sync.via: syncer."
    )


def _entries(text: str) -> Iterator[tuple[str, Any]]:
    """Entries of a resolved recipe that have to be equal, section by section."""
    recipe = parse_recipe(text, "a learner's recipe")
    for section in type(recipe).model_fields:
        if section not in _FREE:
            value = getattr(recipe, section)
            yield from _flat(section, value.model_dump() if hasattr(value, "model_dump") else value)


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Compared as a whole where keys may differ between two recipes, entry by entry elsewhere."""
    if isinstance(value, Mapping) and path.count(".") < 1:
        for key, entry in value.items():
            yield from _flat(f"{path}.{key}", entry)
    else:
        yield path, value
