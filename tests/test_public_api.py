"""The names that people import, and what importing them costs."""

import importlib
import importlib.metadata

import pytest
import torch

import moe_async
from tests.helpers.fresh import loaded_after

HEAVY = ("torch", "deepspeed", "pydantic", "numpy", "yaml")


@pytest.mark.parametrize("name", moe_async.__all__)
def test_every_public_name_is_what_its_home_says(name):
    value = getattr(moe_async, name)
    assert value is getattr(moe_async, name)
    if name != "__version__":
        assert value.__doc__ and value.__module__.startswith("moe_async.")
        assert getattr(importlib.import_module(value.__module__), name) is value


def test_names_are_listed_once_and_completed():
    assert len(set(moe_async.__all__)) == len(moe_async.__all__)
    assert dir(moe_async) == sorted(moe_async.__all__)
    assert {"MoELayer", "build_model", "initialize", "join_world", "load_recipe"} <= set(dir(moe_async))


def test_a_star_import_brings_the_public_names():
    names = {}
    exec("from moe_async import *", names)
    assert set(moe_async.__all__) <= set(names)


def test_the_version_is_that_of_the_installed_package():
    assert moe_async.__version__ == importlib.metadata.version("moe_async")


def test_importing_the_package_is_quick():
    assert loaded_after("import moe_async", "moe_async", *HEAVY) == ["moe_async"]
    assert loaded_after("import moe_async; dir(moe_async)", *HEAVY) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Topology", []),
        ("load_recipe", ["pydantic"]),
        ("Recipe", ["pydantic"]),
        ("MoELayer", ["torch"]),
        ("build_model", ["torch"]),
        ("MicroBatch", ["torch"]),
        ("initialize", ["torch"]),
    ],
)
def test_a_name_brings_no_more_than_it_needs(name, expected):
    loaded = loaded_after(f"from moe_async import {name}", "torch", "deepspeed", "pydantic")
    assert "deepspeed" not in loaded
    assert set(expected) <= set(loaded) and ("torch" in loaded) == ("torch" in expected)


def test_an_unknown_name_says_so():
    with pytest.raises(AttributeError, match=r"module 'moe_async' has no attribute 'MoELayr'"):
        moe_async.MoELayr  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'MoELayr' from 'moe_async'"):
        exec("from moe_async import MoELayr")


def test_a_layer_in_three_lines():
    from moe_async import MoELayer

    x = torch.randn(2, 5, 16)
    y, routing, selection = MoELayer(dim=16, num_experts=4, top_k=2)(x)
    assert y.shape == (2, 5, 16) and selection.shape == (2, 5, 2) and selection.dtype == torch.int64
    assert routing.counts_E.shape == (2, 4) and routing.tokens.tolist() == [5, 5]
    assert routing.total().counts_E.sum() == 2 * 10 and routing.total().tokens == 10
