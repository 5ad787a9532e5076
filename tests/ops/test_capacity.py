"""Which assignments find a place, by hand and against filling the places one after another."""

import functools
import math

import pytest
import torch

from moe_async.ops.capacity import capacity, drop_order, renormalised, within_capacity
from moe_async.ops.routing import Selection, gshard_routing, top_k_routing
from tests.helpers.numerics import assert_close
from tests.helpers.reference_routing import NaiveToken, naive_capacity, naive_drop, naive_order, naive_top_k

POLICIES = ["position", "probability", "random", "batch_prioritised"]
float64 = functools.partial(torch.tensor, dtype=torch.float64)


class Drawn:
    def __init__(self, values):
        self.values = values

    def uniform(self, purpose, shape, device):
        assert tuple(self.values.shape) == shape
        return self.values


def logits_of(tokens, choices, seed=0):
    """Uneven routing: the first expert is ahead."""
    logits = torch.randn(tokens, choices, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[:, 0] += 1
    return logits


def pairs(order_A, top_k):
    return [(a // top_k, a % top_k) for a in order_A.tolist()]


# Capacity


@pytest.mark.parametrize(
    ("factor", "top_k", "tokens", "choices", "minimum", "expected"),
    [
        (1.0, 1, 8, 4, 1, 2),
        (1.0, 2, 8, 4, 1, 4),
        # 2.25 tokens: a part of a place is a place.
        (1.0, 1, 9, 4, 1, 3),
        (1.25, 2, 8, 4, 1, 5),
        (0.5, 1, 8, 4, 1, 1),
        (0.5, 1, 8, 4, 3, 3),
        (0.01, 1, 8, 4, 1, 1),
        (1.0, 1, 0, 4, 2, 2),
        (2.0, 2, 100, 8, 4, 50),
    ],
)
def test_capacity_by_hand(factor, top_k, tokens, choices, minimum, expected):
    assert capacity(factor, top_k, tokens, choices, minimum) == expected


def test_capacity_equals_counting_up():
    for factor in (0.25, 0.7, 1.0, 1.25, 2.0):
        for tokens in range(40):
            for top_k, choices, minimum in ((1, 4, 1), (2, 6, 1), (3, 8, 4)):
                expected = naive_capacity(factor, top_k, tokens, choices, minimum)
                assert capacity(factor, top_k, tokens, choices, minimum) == expected


def test_a_product_that_is_whole_gives_no_place_more():
    # 1.1 * 100 / 10 is 11; in floating point it is 11.000000000000002.
    assert capacity(1.1, 1, 100, 10, 1) == 11
    assert capacity(1.1, 2, 100, 4, 1) == 55


# The order


def by_hand():
    """Three tokens, two choices each; expert 0 is everybody's first or second choice."""
    probs = float64([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.7, 0.0, 0.3]])
    experts = torch.tensor([[0, 1], [1, 2], [0, 2]])
    return Selection(experts, probs.gather(-1, experts), probs)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("position", [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]),
        # 0.7, 0.6, 0.5, then three times 0.3 in the order of positions.
        ("probability", [(2, 0), (1, 0), (0, 0), (0, 1), (1, 1), (2, 1)]),
        ("random", [(2, 1), (0, 0), (2, 0), (1, 1), (0, 1), (1, 0)]),
        ("batch_prioritised", [(2, 0), (1, 0), (0, 0), (2, 1), (1, 1), (0, 1)]),
    ],
)
def test_orders_by_hand(policy, expected):
    draws = torch.tensor([0.2, 0.8, 0.9, 0.7, 0.5, 0.1])
    assert pairs(drop_order(by_hand(), policy, Drawn(draws)), 2) == expected


def test_random_without_noise_is_by_position():
    assert torch.equal(drop_order(by_hand(), "random", None), drop_order(by_hand(), "position", None))


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_keep_the_order_of_positions(policy):
    selection = top_k_routing(torch.zeros(70, 4), 2)
    order = drop_order(selection, policy, Drawn(torch.zeros(140)))
    by_position = [(t, j) for j in range(2) for t in range(70)]
    if policy == "random":
        # Equal draws do not happen; by assignment here.
        by_position = sorted(by_position)
    assert pairs(order, 2) == by_position


# Filling places


def test_places_by_hand():
    experts = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 2]])
    every, first_first = torch.ones(4, 2, dtype=torch.bool), torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    one, two = (within_capacity(experts, every, first_first, limit).tolist() for limit in (1, 2))
    # First choices in order: 0, 0, 1, 0; second ones: 1, 1, 0, 2.
    assert one == [[True, False], [False, False], [True, False], [False, True]]
    assert two == [[True, True], [True, False], [True, False], [False, True]]
    assert within_capacity(experts, every, first_first, 3)[2, 1].item() is False
    assert within_capacity(experts, every, first_first, 4).all()


def test_what_is_not_eligible_takes_no_place():
    experts = torch.zeros(3, 1, dtype=torch.int64)
    eligible = torch.tensor([[False], [True], [True]])
    assert within_capacity(experts, eligible, torch.arange(3), 1).tolist() == [[False], [True], [False]]


@pytest.mark.parametrize("limit", [0, 1, 5])
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens_and_no_places(tokens, limit):
    experts = torch.zeros(tokens, 2, dtype=torch.int64)
    kept = within_capacity(experts, torch.ones(tokens, 2, dtype=torch.bool), torch.arange(2 * tokens), limit)
    assert kept.shape == (tokens, 2) and kept.dtype == torch.bool and kept.sum() == min(limit, 2 * tokens)


def case(draws_second, masked):
    """Uneven top-2 of 40 tokens over 5 experts, by scores or with GShard's draws; and its naive tokens."""
    logits = logits_of(40, 5)
    generator = torch.Generator().manual_seed(3)
    selection = gshard_routing(logits, Drawn(torch.rand(40, generator=generator))) if draws_second else None
    selection = selection or top_k_routing(logits, 2)
    taken = torch.ones(40, 2, dtype=torch.bool) if selection.taken_TK is None else selection.taken_TK
    live = torch.arange(40) % 4 != 1 if masked else torch.ones(40, dtype=torch.bool)
    tokens = []
    for t, row in enumerate(logits):
        token = naive_top_k(row, 2)
        token.taken = taken[t].tolist()
        tokens.append(token if live[t] else None)
    return selection, taken & live[:, None], tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("limit", [1, 3, 7, 40])
@pytest.mark.parametrize("draws_second", [False, True], ids=["top 2", "gshard"])
@pytest.mark.parametrize("masked", [False, True], ids=["all live", "masked"])
def test_equals_filling_places_one_after_another(policy, limit, draws_second, masked):
    selection, eligible, tokens = case(draws_second, masked)
    draws = torch.rand(80, generator=torch.Generator().manual_seed(4))
    kept = within_capacity(selection.experts_TK, eligible, drop_order(selection, policy, Drawn(draws)), limit)
    executed, dropped = naive_drop(tokens, naive_order(tokens, policy, draws.view(40, 2).tolist()), limit, 5)
    assert kept.tolist() == [[False, False] if token is None else token.taken for token in executed]
    counts = torch.bincount(selection.experts_TK[kept], minlength=5)
    assert counts.max() <= limit and (sum(dropped) > 0) == (limit < 40)
    # A place stays empty only where nobody wants it.
    wanted = torch.bincount(selection.experts_TK[eligible], minlength=5)
    assert torch.equal(counts, wanted.clamp(max=limit))


@pytest.mark.parametrize("policy", ["position", "probability", "batch_prioritised"])
def test_padding_does_not_change_who_stays(policy):
    logits = logits_of(30, 4)
    padded = torch.cat([logits[:9], 9 * logits_of(5, 4, seed=1), logits[9:]])
    live = torch.ones(35, dtype=torch.bool)
    live[9:14] = False
    every = torch.ones(30, 2, dtype=torch.bool)
    plain, filled = top_k_routing(logits, 2), top_k_routing(padded, 2)
    expected = within_capacity(plain.experts_TK, every, drop_order(plain, policy, None), 6)
    eligible = live[:, None].expand(35, 2)
    actual = within_capacity(filled.experts_TK, eligible, drop_order(filled, policy, None), 6)
    assert torch.equal(actual[live], expected) and not actual[~live].any()


def test_the_order_has_no_gradient():
    logits = logits_of(6, 4).requires_grad_()
    selection = top_k_routing(logits, 2)
    for policy in POLICIES:
        assert not drop_order(selection, policy, Drawn(torch.rand(12))).requires_grad


# Weights of what is left


def test_renormalised_by_hand():
    weights = float64([[0.6, 0.4], [0.6, 0.4], [0.5, 0.5], [1.5, 1.0]])
    before = torch.tensor([[True, True], [True, True], [True, False], [True, True]])
    kept = torch.tensor([[True, False], [False, False], [True, False], [False, True]])
    actual = renormalised(weights, before, kept)
    # The whole weight for the survivor; nothing is left of the second; what was never taken does not count; the
    # scale of 2.5 stays.
    assert_close(actual[kept], float64([1.0, 0.5, 2.5]))
    assert_close(actual[1], weights[1])


@pytest.mark.parametrize(("limit", "places"), [(3, {0, 1, 2}), (6, {1, 2, 3})])
def test_renormalised_equals_the_naive_rule_including_the_gradient(limit, places):
    logits = logits_of(20, 5).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    selection = top_k_routing(logits, 3, score="sigmoid", scale=2.5)
    before = torch.ones(20, 3, dtype=torch.bool)
    kept = within_capacity(selection.experts_TK, before, drop_order(selection, "position", None), limit)
    actual = renormalised(selection.weights_TK, before, kept)[kept]
    tokens = [naive_top_k(row, 3, score="sigmoid", scale=2.5) for row in twin]
    executed, _ = naive_drop(tokens, naive_order(tokens, "position"), limit, 5, "after")
    left = [[w for w, taken in zip(t.weights, t.taken, strict=True) if taken] for t in executed]
    assert {len(weights) for weights in left} == places
    expected = torch.stack([w for weights in left for w in weights])
    assert_close(actual, expected)
    direction = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
    (actual * direction).sum().backward()
    (expected * direction).sum().backward()
    assert_close(logits.grad, twin.grad)


def test_nothing_kept_is_finite_with_a_finite_gradient():
    weights = torch.full((3, 2), 0.5, requires_grad=True)
    nothing, every = torch.zeros(3, 2, dtype=torch.bool), torch.ones(3, 2, dtype=torch.bool)
    for before, kept in ((every, nothing), (nothing, nothing)):
        actual = renormalised(weights, before, kept)
        assert torch.equal(actual, weights)
        actual.sum().backward()
    assert weights.grad.isfinite().all()


def test_weights_that_underflow_stay_finite():
    weights = torch.tensor([[1.0, 0.0]], requires_grad=True)
    every, second = torch.tensor([[True, True]]), torch.tensor([[False, True]])
    actual = renormalised(weights, every, second)
    actual.sum().backward()
    assert actual.isfinite().all() and weights.grad.isfinite().all()


def test_zero_experts_have_no_limit_in_the_naive_rule():
    # The twin itself: the layer's tests rely on it.
    token = NaiveToken(*[torch.full((3,), math.log(1 / 3))] * 2, [2, 0], [1.0, 1.0], [True, True], [2, 0])
    executed, dropped = naive_drop([token] * 3, [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)], 1, 2)
    assert [t.taken for t in executed] == [[True, True], [True, False], [True, False]] and dropped == [2, 0, 0]
