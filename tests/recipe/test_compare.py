"""What may differ between a checkpoint's recipe and the one that goes on from it."""

import pytest

from moe_async.recipe import state_differences
from tests.helpers.small import SMALL, small_recipe


def test_equal_recipes_do_not_differ():
    assert state_differences(small_recipe(), small_recipe()) == []
    assert state_differences(small_recipe(moe=None), small_recipe(moe=None)) == []


def test_entries_that_change_the_meaning_of_weights_and_moments():
    given = small_recipe(model__layers=3, moe__top_k=1, moe__layers=[1, 2], optim__kind="adamw")
    assert state_differences(small_recipe(), given) == [
        "model.layers was 2 and is 3",
        "moe.layers was [1] and is [1, 2]",
        "moe.top_k was 2 and is 1",
        "optim.kind was 'sgd' and is 'adamw'",
    ]
    rule = small_recipe(moe=SMALL["moe"] | {"router": {"kind": "topk", "weights": "raw"}})
    (difference,) = state_differences(small_recipe(), rule)
    assert difference == "moe.router.weights was None and is 'raw'"
    noisy = small_recipe(moe=SMALL["moe"] | {"router": {"kind": "topk", "jitter": 0.1}})
    assert state_differences(small_recipe(), noisy) == []
    dense = state_differences(small_recipe(), small_recipe(moe=None))
    assert dense == [
        "moe.layers was [1] and is None",
        "moe.num_experts was 4 and is None",
        "moe.zero_experts was 0 and is None",
        "moe.top_k was 2 and is None",
        "moe.router.kind was 'topk' and is None",
        "moe.router.bias was False and is None",
        "moe.router.softmax was 'before' and is None",
        "moe.router.scale was 1.0 and is None",
        "moe.router.apply was 'output' and is None",
        "moe.router.freeze was False and is None",
        "moe.expert_dim was 6 and is None",
        "moe.expert was 'swiglu' and is None",
        "moe.expert_bias was False and is None",
        "moe.shared_dim was 0 and is None",
        "moe.shared_gate was False and is None",
    ]


def with_moe(**entries):
    return small_recipe(moe=SMALL["moe"] | entries)


def test_device_groups_are_compared():
    assert state_differences(with_moe(device_groups=2), with_moe(device_groups=4)) == [
        "moe.device_groups was 2 and is 4"
    ]
    assert state_differences(small_recipe(), with_moe(device_groups=4)) == ["moe.device_groups was None and is 4"]


def test_how_weights_began_may_differ():
    init = {"std": 0.5}
    given = small_recipe(model=SMALL["model"] | {"init": init})
    assert given.model.init != small_recipe().model.init
    assert state_differences(small_recipe(), given) == []


GROUPS = {"number": 2, "keep": 1}


@pytest.mark.parametrize(
    ("saved", "given", "differences"),
    [
        ({"kind": "topk"}, {"kind": "topk", "bias": True}, ["bias was False and is True"]),
        ({"kind": "topk"}, {"kind": "topk", "softmax": "after"}, ["softmax was 'before' and is 'after'"]),
        ({"kind": "topk"}, {"kind": "topk", "weights": "raw"}, ["weights was None and is 'raw'"]),
        ({"kind": "topk"}, {"kind": "topk", "scale": 2.5}, ["scale was 1.0 and is 2.5"]),
        ({"kind": "topk"}, {"kind": "topk", "apply": "input"}, ["apply was 'output' and is 'input'"]),
        ({"kind": "topk"}, {"kind": "topk", "freeze": True}, ["freeze was False and is True"]),
        (
            {"kind": "topk"},
            {"kind": "topk", "groups": GROUPS},
            ["groups was None and is {'number': 2, 'keep': 1, 'top': 2}"],
        ),
        (
            {"kind": "sigmoid_bias"},
            {"kind": "sigmoid_bias", "score": "softmax", "scale": 2.0},
            ["score was 'sigmoid' and is 'softmax'", "scale was 1.0 and is 2.0"],
        ),
        (
            {"kind": "topk"},
            {"kind": "sigmoid_bias"},
            [
                "kind was 'topk' and is 'sigmoid_bias'",
                "bias was False and is None",
                "score was None and is 'sigmoid'",
                "softmax was 'before' and is None",
            ],
        ),
        # How a router is disturbed, and how its bias follows the load, may change.
        ({"kind": "topk"}, {"kind": "topk", "jitter": 0.1, "input_noise": 0.1, "compute": "bfloat16"}, []),
        ({"kind": "sigmoid_bias"}, {"kind": "sigmoid_bias", "update": {"rule": "pid", "rate": 0.1, "until": 3}}, []),
    ],
    ids=str,
)
def test_routers_are_compared_entry_by_entry(saved, given, differences):
    expected = [f"moe.router.{difference}" for difference in differences]
    assert state_differences(with_moe(router=saved), with_moe(router=given)) == expected


def test_lengths_rates_batches_and_coefficients_may_differ():
    given = small_recipe(
        train=SMALL["train"] | {"steps": 99, "global_batch": 16, "seed": 4},
        optim=SMALL["optim"] | {"lr": 0.1, "clip": 2.0},
        moe=SMALL["moe"] | {"balance": []},
        parallel={"expert": 2, "zero": 0},
    )
    assert state_differences(small_recipe(), given) == []
