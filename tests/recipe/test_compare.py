"""What may differ between a checkpoint's recipe and the one that goes on from it."""

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
    assert "moe.num_experts was 4 and is None" in dense and len(dense) == 15


def test_lengths_rates_batches_and_coefficients_may_differ():
    given = small_recipe(
        train=SMALL["train"] | {"steps": 99, "global_batch": 16, "seed": 4},
        optim=SMALL["optim"] | {"lr": 0.1, "clip": 2.0},
        moe=SMALL["moe"] | {"balance": []},
        parallel={"expert": 2, "zero": 0},
    )
    assert state_differences(small_recipe(), given) == []
