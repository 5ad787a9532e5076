"""Choosing experts: ties, weights, and which gradient reaches the router."""

import functools
import math

import pytest
import torch

from moe_async.ops.routing import highest_k, top_k_routing
from tests.helpers.numerics import assert_close
from tests.helpers.reference import naive_choice, naive_top_k_weights

float64 = functools.partial(torch.tensor, dtype=torch.float64)


def logits_of(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_hand_written_example():
    logits = float64([[0.0, math.log(2.0), math.log(5.0)]])
    raw, normalised = (top_k_routing(logits, 2, weights=rule) for rule in ("raw", "normalised"))
    assert raw.experts_TK.tolist() == normalised.experts_TK.tolist() == [[2, 1]]
    assert_close(raw.probs_TE, float64([[1 / 8, 2 / 8, 5 / 8]]))
    assert_close(raw.weights_TK, float64([[5 / 8, 2 / 8]]))
    assert_close(normalised.weights_TK, float64([[5 / 7, 2 / 7]]))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0, 1, 2]),
        ([0.0, 2.0, 2.0, 2.0], [1, 2, 3]),
        ([2.0, 0.0, 2.0, 1.0], [0, 2, 3]),
        ([0.0, -0.0, 0.0, -0.0], [0, 1, 2]),
    ],
)
def test_equal_scores_pick_the_lowest_index(scores, expected):
    assert highest_k(torch.tensor([scores]), 3).tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_k", [1, 8, 64])
def test_sixty_four_equal_scores_pick_the_lowest_indices(top_k, dtype):
    # Sorting networks keep short rows in order by accident; 64 columns and many rows leave that path.
    actual = top_k_routing(torch.zeros(300, 64, dtype=dtype), top_k).experts_TK
    assert torch.equal(actual, torch.arange(top_k).expand(300, top_k))


def test_ties_among_64_experts_equal_the_sorted_list():
    scores = torch.randint(0, 5, (200, 64), generator=torch.Generator().manual_seed(1)).float()
    actual = highest_k(scores, 16).tolist()
    assert actual == [naive_choice(row, 16) for row in scores]


@pytest.mark.parametrize("rule", ["normalised", "raw"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 6])
def test_equals_the_naive_choice_including_the_gradient(rule, top_k):
    logits = logits_of(7, 6).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    selection = top_k_routing(logits, top_k, weights=rule)
    direction = logits_of(7, top_k, seed=1)
    rows = [naive_top_k_weights(row, top_k, rule) for row in twin]
    assert selection.experts_TK.dtype == torch.int64
    assert selection.experts_TK.tolist() == [chosen for chosen, _ in rows]
    expected = torch.stack([weights for _, weights in rows])
    assert_close(selection.weights_TK, expected)
    (selection.weights_TK * direction).sum().backward()
    (expected * direction).sum().backward()
    assert_close(logits.grad, twin.grad)


@pytest.mark.parametrize("top_k", [2, 5])
def test_normalised_weights_are_a_softmax_over_the_logits_taken(top_k):
    logits = logits_of(9, 8)
    selection = top_k_routing(logits, top_k, weights="normalised")
    expected = torch.softmax(logits.gather(-1, selection.experts_TK), dim=-1)
    assert_close(selection.weights_TK, expected)
    assert_close(selection.weights_TK.sum(-1), torch.ones(9, dtype=torch.float64))


def test_raw_top_1_is_the_probability_itself_with_its_gradient():
    logits = logits_of(5, 4).requires_grad_()
    selection = top_k_routing(logits, 1, weights="raw")
    assert torch.equal(selection.weights_TK, selection.probs_TE.max(-1, keepdim=True).values)
    assert_close(selection.weights_TK, torch.softmax(logits, -1).max(-1, keepdim=True).values)
    selection.weights_TK.sum().backward()
    assert (logits.grad.norm(dim=-1) > 0).all()


def test_normalised_top_1_is_always_1_and_teaches_the_router_nothing():
    """Which is why recipes and layers refuse it."""
    logits = logits_of(5, 4).requires_grad_()
    selection = top_k_routing(logits, 1, weights="normalised")
    assert torch.equal(selection.weights_TK, torch.ones(5, 1, dtype=torch.float64))
    selection.weights_TK.sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_a_recorded_choice_is_replayed_with_weights_of_the_new_scores():
    logits = logits_of(3, 4)
    recorded = torch.tensor([[3, 0], [1, 2], [0, 1]])
    taken = torch.softmax(logits, -1).gather(-1, recorded)
    for rule, expected in (("raw", taken), ("normalised", taken / taken.sum(-1, keepdim=True))):
        selection = top_k_routing(logits, 2, weights=rule, experts_TK=recorded)
        assert torch.equal(selection.experts_TK, recorded)
        assert_close(selection.weights_TK, expected)
    own = top_k_routing(logits, 2)
    again = top_k_routing(logits, 2, experts_TK=own.experts_TK)
    for name, value in own._asdict().items():
        other = getattr(again, name)
        assert (value is None and other is None) or torch.equal(value, other), name


def test_best_first_and_a_distribution_over_all_experts():
    selection = top_k_routing(logits_of(20, 8), 8)
    assert_close(selection.probs_TE.sum(-1), torch.ones(20, dtype=torch.float64))
    assert (selection.weights_TK[:, :-1] >= selection.weights_TK[:, 1:]).all()
    assert selection.experts_TK.sort(-1).values.tolist() == [list(range(8))] * 20


def test_choosing_draws_no_gradient_and_leaves_the_scores_alone():
    scores = logits_of(4, 6).requires_grad_()
    before = scores.detach().clone()
    assert not highest_k(scores, 2).requires_grad and torch.equal(scores.detach(), before)


def test_no_tokens():
    selection = top_k_routing(torch.zeros(0, 4), 2)
    assert selection.experts_TK.shape == selection.weights_TK.shape == (0, 2) and selection.probs_TE.shape == (0, 4)
