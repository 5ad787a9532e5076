"""The learning rate of each step, by hand and at its ends."""

import functools

import pytest
import torch

from moe_async.engine.schedule import learning_rate
from moe_async.recipe import OptimSection
from tests.helpers.numerics import assert_close

float64 = functools.partial(torch.tensor, dtype=torch.float64)
KINDS = ["constant", "cosine", "wsd"]


def rates(steps, lr=8.0, **schedule):
    optim = OptimSection.model_validate({"lr": lr, "schedule": schedule})
    return [learning_rate(optim, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        ({"kind": "constant"}, 3, [8.0, 8.0, 8.0]),
        # A warm-up of three steps: quarters of the way up, the whole at step 3.
        ({"kind": "constant", "warmup": 3}, 6, [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]),
        # Half a cosine over four intervals: 1, (1 + sqrt(1/2)) / 2, 1/2, (1 - sqrt(1/2)) / 2, 0.
        ({"kind": "cosine", "final": 0.0}, 5, [8.0, 4 + 8**0.5, 4.0, 4 - 8**0.5, 0.0]),
        ({"kind": "cosine", "final": 0.5}, 5, [8.0, 6 + 2**0.5, 6.0, 6 - 2**0.5, 4.0]),
        ({"kind": "cosine", "final": 0.0, "warmup": 1}, 4, [4.0, 8.0, 4.0, 0.0]),
        # Level, then down over 0.4 * 10 steps: the last level step is step 5.
        ({"kind": "wsd", "final": 0.0, "decay": 0.4}, 10, [8.0] * 6 + [6.0, 4.0, 2.0, 0.0]),
        ({"kind": "wsd", "final": 0.5, "decay": 0.4, "warmup": 1}, 10, [4.0] + [8.0] * 5 + [7.0, 6.0, 5.0, 4.0]),
    ],
    ids=["constant", "warm-up", "cosine", "cosine to a half", "cosine with warm-up", "wsd", "wsd with warm-up"],
)
def test_by_hand(schedule, steps, expected):
    assert_close(float64(rates(steps, **schedule)), float64(expected))


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_up_to_lr_at_the_end_of_warm_up_and_down_to_the_final_rate(kind, warmup, final):
    actual = rates(40, lr=0.3, kind=kind, warmup=warmup, final=final)
    assert actual[warmup] == 0.3 and max(actual) == 0.3 and min(actual) >= 0
    assert_close(float64(actual[-1]), float64(0.3 if kind == "constant" else 0.3 * final))
    assert actual[: warmup + 1] == sorted(actual[: warmup + 1]) and len(set(actual[: warmup + 1])) == warmup + 1
    assert actual[warmup:] == sorted(actual[warmup:], reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_one_step(kind):
    (actual,) = rates(1, kind=kind, final=0.25)
    assert actual in (8.0, 2.0)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_past_the_last_step_the_rate_stays(kind):
    optim = OptimSection.model_validate({"lr": 1.0, "schedule": {"kind": kind, "final": 0.25}})
    assert_close(float64([learning_rate(optim, step, 10) for step in (9, 10, 50)]), float64([0.25] * 3))


def test_a_warm_up_that_meets_the_decay_goes_up_only_as_far_as_lr():
    actual = rates(10, kind="cosine", warmup=9)
    assert_close(float64(actual), float64([0.8 * step for step in range(1, 11)]))
