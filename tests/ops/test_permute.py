"""Rows in the order of experts and back: layouts by hand, round trips, and the dtype in which gradients add up."""

import pytest
import torch

from moe_async.ops.permute import merge_rows, plan_rows, regroup_order, take_rows
from tests.helpers.numerics import assert_close

TOKENS, TOP_K, SLOTS, DIM = 9, 2, 5, 4


def random_case(tokens=TOKENS, top_k=TOP_K, seed=0):
    """Different slots for each token, input, weights, and what is sent: two thirds of the tokens, three quarters of
    their assignments."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, SLOTS, generator=generator)
    slots = scores.argsort(-1)[:, :top_k]
    x = torch.randn(tokens, DIM, generator=generator, dtype=torch.float64)
    weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
    live = (torch.arange(tokens) % 3 != 1)[:, None]
    return slots, x, weights, live & (torch.arange(tokens * top_k).view(tokens, top_k) % 4 != 1)


def test_a_plan_by_hand():
    # Assignments 0 and 1 are of token 0, 2 and 3 of token 1, 4 and 5 of token 2.
    slots = torch.tensor([[2, 0], [0, 1], [2, 1]])
    plan = plan_rows(slots, 4, None)
    assert plan.assignment_R.tolist() == [1, 2, 3, 5, 0, 4]
    assert plan.rows_per_slot_E.tolist() == [2, 2, 2, 0]
    masked = plan_rows(slots, 4, torch.tensor([[True, True], [False, False], [True, True]]))
    assert masked.assignment_R.tolist() == [1, 5, 0, 4]
    assert masked.rows_per_slot_E.tolist() == [1, 1, 2, 0]
    dropped = plan_rows(slots, 4, torch.tensor([[True, False], [True, True], [False, True]]))
    assert dropped.assignment_R.tolist() == [2, 3, 5, 0]
    assert dropped.rows_per_slot_E.tolist() == [1, 2, 1, 0]


def test_taking_and_merging_by_hand():
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0]], dtype=torch.float64)
    assignment = torch.tensor([2, 1, 3, 0])
    rows = take_rows(x, assignment, 2, torch.float64)
    assert rows.tolist() == [[2.0, 20.0], [1.0, 10.0], [2.0, 20.0], [1.0, 10.0]]
    done = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0]], dtype=torch.float64)
    # Token 0 has the rows 3 and 1, token 1 the rows 0 and 2.
    assert merge_rows(done, assignment, weights).tolist() == [[0.5 * 4 + 0.25 * 2, 0.0], [1.0 + 2.0 * 3, 0.0]]


def test_regrouping_by_hand():
    # Source 0 sent one row to expert 0 and two to expert 1, source 1 two and none: a | b c || d e.
    order = regroup_order(torch.tensor([[1, 2], [2, 0]]))
    assert order.tolist() == [0, 3, 4, 1, 2]
    assert regroup_order(torch.zeros(2, 3, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("partly", [False, True], ids=["all sent", "some sent"])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_a_plan_equals_the_naive_one(top_k, partly):
    slots, _, _, some = random_case(top_k=top_k)
    sent = some if partly else None
    plan = plan_rows(slots, SLOTS, sent)
    expected = [
        t * top_k + k
        for slot in range(SLOTS)
        for t in range(TOKENS)
        for k in range(top_k)
        if slots[t, k] == slot and (sent is None or sent[t, k])
    ]
    assert plan.assignment_R.tolist() == expected
    sizes = [sum(slots.reshape(-1)[a].item() == slot for a in expected) for slot in range(SLOTS)]
    assert plan.rows_per_slot_E.dtype == torch.int64 and plan.rows_per_slot_E.tolist() == sizes


@pytest.mark.parametrize("partly", [False, True], ids=["all sent", "some sent"])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_a_round_trip_is_the_weighted_sum_including_gradients(top_k, partly):
    slots, x, weights, some = random_case(top_k=top_k)
    sent = some if partly else torch.ones_like(some)
    x.requires_grad_()
    weights.requires_grad_()
    x_twin, weights_twin = (value.detach().clone().requires_grad_() for value in (x, weights))
    scale = torch.arange(1.0, SLOTS + 1, dtype=torch.float64)

    plan = plan_rows(slots, SLOTS, sent if partly else None)
    rows = take_rows(x, plan.assignment_R, top_k, x.dtype)
    # Each expert multiplies by its own number.
    done = rows * scale.repeat_interleave(plan.rows_per_slot_E)[:, None]
    actual = merge_rows(done, plan.assignment_R, weights)

    expected = torch.stack(
        [
            sum(
                (weights_twin[t, k] * scale[slots[t, k]] * x_twin[t] for k in range(top_k) if sent[t, k]),
                start=torch.zeros(DIM, dtype=torch.float64),
            )
            for t in range(TOKENS)
        ]
    )
    assert_close(actual, expected)
    direction = torch.linspace(-1, 1, TOKENS * DIM, dtype=torch.float64).view(TOKENS, DIM)
    (actual * direction).sum().backward()
    (expected * direction).sum().backward()
    assert_close(x.grad, x_twin.grad)
    assert_close(weights.grad, weights_twin.grad)


def test_derivatives_equal_finite_differences():
    slots, x, weights, sent = random_case(tokens=3)
    plan = plan_rows(slots, SLOTS, sent)

    def layer(x, weights):
        return merge_rows(take_rows(x, plan.assignment_R, TOP_K, x.dtype) ** 2, plan.assignment_R, weights)

    assert torch.autograd.gradcheck(layer, (x.requires_grad_(), weights.requires_grad_()))


def test_the_gradient_of_bfloat16_rows_is_summed_in_the_dtype_of_the_token():
    x = torch.ones(1, 1, requires_grad=True)
    rows = take_rows(x, torch.tensor([0, 1, 2]), 3, torch.bfloat16)
    assert rows.dtype == torch.bfloat16
    # bfloat16 has 8 bits: 1 + 2^-9 + 2^-9 is 1 there, in whatever order, unless the small ones meet first.
    gradients = torch.tensor([[1.0], [2.0**-9], [2.0**-10]], dtype=torch.bfloat16)
    assert (gradients[0] + gradients[1] + gradients[2]).item() == 1.0
    assert gradients.sum(dim=0).item() == 1.0
    rows.backward(gradients)
    assert x.grad.dtype == torch.float32 and x.grad.item() == 1.0 + 2.0**-9 + 2.0**-10


def test_bfloat16_rows_are_merged_in_the_dtype_of_the_weights():
    rows = torch.tensor([[1.0], [2.0**-9], [2.0**-10]], dtype=torch.bfloat16)
    weights = torch.ones(1, 3, requires_grad=True)
    merged = merge_rows(rows, torch.tensor([0, 1, 2]), weights)
    assert merged.dtype == torch.float32 and merged.item() == 1.0 + 2.0**-9 + 2.0**-10
    merged.sum().backward()
    assert weights.grad.tolist() == [[1.0, 2.0**-9, 2.0**-10]]


def test_tokens_that_send_nothing_get_zeros_and_no_gradient():
    slots, x, weights, _ = random_case()
    x.requires_grad_()
    plan = plan_rows(slots, SLOTS, torch.zeros(TOKENS, TOP_K, dtype=torch.bool))
    assert plan.assignment_R.shape == (0,) and plan.rows_per_slot_E.tolist() == [0] * SLOTS
    rows = take_rows(x, plan.assignment_R, TOP_K, torch.float64)
    merged = merge_rows(rows, plan.assignment_R, weights)
    assert torch.equal(merged, torch.zeros(TOKENS, DIM, dtype=torch.float64))
    merged.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_no_tokens_at_all():
    x = torch.zeros(0, DIM, requires_grad=True)
    plan = plan_rows(torch.zeros(0, TOP_K, dtype=torch.int64), SLOTS, None)
    assert plan.rows_per_slot_E.tolist() == [0] * SLOTS
    merged = merge_rows(take_rows(x, plan.assignment_R, TOP_K, torch.float32), plan.assignment_R, torch.zeros(0, TOP_K))
    assert merged.shape == (0, DIM)
    merged.sum().backward()
    assert x.grad.shape == (0, DIM)


def test_a_token_that_lost_one_row_keeps_the_other():
    weights = torch.tensor([[0.5, 0.25]], dtype=torch.float64)
    merged = merge_rows(torch.tensor([[8.0]], dtype=torch.float64), torch.tensor([1]), weights)
    assert merged.tolist() == [[2.0]]


def test_regrouping_sorts_by_expert_and_keeps_the_order_of_sources():
    sizes = torch.tensor([[2, 0, 3], [1, 1, 0], [0, 4, 2]])
    labels = [(e, p, i) for p in range(3) for e in range(3) for i in range(int(sizes[p, e]))]
    actual = [labels[i] for i in regroup_order(sizes).tolist()]
    assert actual == sorted(labels)
