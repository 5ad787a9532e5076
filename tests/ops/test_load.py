"""How evenly experts are loaded, by hand."""

import functools

import pytest
import torch

from moe_async.ops.load import LoadBalance, load_balance
from tests.helpers.numerics import assert_close

float64 = functools.partial(torch.tensor, dtype=torch.float64)


@pytest.mark.parametrize(
    ("counts", "max_over_mean", "cv", "dead"),
    [
        ([5, 5, 5, 5], 1.0, 0.0, 0),
        # Mean 4; deviations -3, -1, 1, 3 have the population variance 5.
        ([1, 3, 5, 7], 7 / 4, 5**0.5 / 4, 0),
        # Mean 2; one expert has all: variance (36 + 3 * 4) / 4 = 12.
        ([0, 8, 0, 0], 4.0, 12**0.5 / 2, 3),
        ([0, 2], 2.0, 1.0, 1),
        ([6], 1.0, 0.0, 0),
    ],
)
def test_by_hand(counts, max_over_mean, cv, dead):
    actual = load_balance(torch.tensor(counts))
    assert actual.dead == dead
    assert_close(float64([actual.max_over_mean, actual.cv]), float64([max_over_mean, cv]))


@pytest.mark.parametrize("experts", [1, 4])
def test_nothing_routed_is_all_zeros_and_every_expert_dead(experts):
    expected = LoadBalance(max_over_mean=0.0, cv=0.0, dead=experts)
    assert load_balance(torch.zeros(experts, dtype=torch.int64)) == expected


def test_the_figures_do_not_depend_on_how_many_tokens_there_are():
    counts = torch.tensor([9, 0, 4, 3])
    few, many = load_balance(counts), load_balance(counts * 2**40)
    assert few.dead == many.dead == 1
    assert_close(float64([many.max_over_mean, many.cv]), float64([few.max_over_mean, few.cv]))


def test_collapse_onto_one_of_n_gives_n_over_the_mean():
    counts = torch.zeros(64, dtype=torch.int64)
    counts[17] = 1000
    actual = load_balance(counts)
    assert actual.max_over_mean == 64 and actual.dead == 63
    assert_close(float64(actual.cv), float64(63**0.5))


def test_the_figures_are_plain_numbers():
    actual = load_balance(torch.tensor([1, 2]))
    assert type(actual.max_over_mean) is type(actual.cv) is float and type(actual.dead) is int
