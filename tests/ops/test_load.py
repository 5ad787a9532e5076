"""How evenly experts are loaded, by hand."""

import functools
import math

import numpy as np
import pytest
import torch

from moe_async.ops.load import (
    LoadBalance,
    effective_experts,
    load_balance,
    load_entropy,
    max_violation,
    relative_loads,
    variation,
)
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


@pytest.mark.parametrize(
    ("counts", "violation", "entropy"),
    [
        ([5, 5, 5, 5], 0.0, math.log(4)),
        ([1, 3, 5, 7], 0.75, -sum(n / 16 * math.log(n / 16) for n in (1, 3, 5, 7))),
        ([0, 8, 0, 0], 3.0, 0.0),
    ],
)
def test_violation_and_entropy_by_hand(counts, violation, entropy):
    assert float(max_violation(counts)) == pytest.approx(violation)
    assert float(load_entropy(counts)) == pytest.approx(entropy)
    assert float(effective_experts(counts)) == pytest.approx(math.exp(entropy))


def test_figures_of_many_loads_at_once_and_of_none():
    loads = np.array([[[2, 6], [0, 0]]])
    assert relative_loads(loads).tolist() == [[[0.5, 1.5], [0.0, 0.0]]]
    assert variation(loads).tolist() == [[0.5, 0.0]]
    assert max_violation(loads).tolist() == [[0.5, 0.0]]
    assert effective_experts(loads)[0, 1] == 0 and load_entropy(loads)[0, 1] == 0
