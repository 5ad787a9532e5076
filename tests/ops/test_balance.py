"""The Switch loss and the z-loss over sums: hand values, and their scopes."""

import functools
import math

import pytest
import torch

from moe_async.ops.balance import load_fractions, micro_batch_share, step_share, switch_loss, z_loss
from moe_async.ops.routing import top_k_routing
from moe_async.ops.sums import routing_sums
from tests.helpers.numerics import assert_close
from tests.helpers.sums import EXPERTS, TOP_K, added, balanced, collapsed, logits_of, sums_of, sums_of_choice

float64 = functools.partial(torch.tensor, dtype=torch.float64)


def rows_of(logits):
    """The sums of one sequence, as a layer gives them."""
    return routing_sums(logits, top_k_routing(logits, TOP_K))


def test_a_hand_written_example():
    logits = float64([[math.log(3.0), 0.0], [math.log(3.0), 0.0], [0.0, 0.0]])
    sums = sums_of_choice(logits, torch.tensor([[0], [0], [1]]))
    # f = (2/3, 1/3) and P = (2/3, 1/3): the loss is 2 (4/9 + 1/9).
    assert_close(switch_loss(sums), float64(10 / 9))
    # logsumexp is ln 4, ln 4 and ln 2.
    assert_close(z_loss(sums), float64(3 * math.log(2.0) ** 2))


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("num_experts", [8, 64, 256])
def test_the_switch_loss_is_1_at_perfect_balance(num_experts, top_k):
    sums = balanced(num_experts, top_k)
    assert sums.counts_E.tolist() == [top_k] * num_experts
    assert_close(switch_loss(sums), float64(1.0))


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("num_experts", [8, 64, 256])
def test_the_switch_loss_is_experts_over_k_at_collapse(num_experts, top_k):
    assert_close(switch_loss(collapsed(num_experts, top_k)), float64(num_experts / top_k))


@pytest.mark.parametrize("cut", [[4, 0, 9, 1], [7, 7]])
def test_with_the_fractions_of_the_step_micro_batches_equal_one_big_batch(cut):
    big = logits_of(14).requires_grad_()
    expected = switch_loss(sums_of(big))
    expected.backward()

    parts = [part.detach().clone().requires_grad_() for part in big.split(cut)]
    sums = [rows_of(part) for part in parts]
    step = added([part.total() for part in sums])
    actual = sum(step_share(switch_loss, part, step) for part in sums) / step.tokens
    assert step.tokens == 14
    assert_close(actual, expected)
    actual.backward()
    assert_close(torch.cat([part.grad for part in parts]), big.grad)


def test_with_their_own_fractions_micro_batches_give_the_token_weighted_mean():
    parts = [rows_of(logits_of(4)), rows_of(-logits_of(9, seed=1))]
    totals = [part.total() for part in parts]
    actual = sum(micro_batch_share(switch_loss, part) for part in parts) / 13
    expected = sum(total.tokens * switch_loss(total) for total in totals) / 13
    assert_close(actual, expected)
    # Which is another number than the loss of the whole.
    whole = sum(step_share(switch_loss, part, added(totals)) for part in parts) / 13
    assert_close(whole, switch_loss(added(totals)))
    assert actual.item() > whole.item()


def test_fractions_are_float64_without_gradient_and_sum_to_1():
    fractions = load_fractions(torch.tensor([3, 0, 1]))
    assert fractions.dtype == torch.float64 and fractions.tolist() == [0.75, 0.0, 0.25]
    # Above 2^24 float32 no longer tells neighbours apart.
    assert load_fractions(torch.tensor([2**25 + 1, 2**25 - 1])).tolist() == [0.5 + 2**-26, 0.5 - 2**-26]


def test_no_tokens_have_fractions_of_zero():
    assert load_fractions(torch.zeros(EXPERTS, dtype=torch.int64)).tolist() == [0.0] * EXPERTS


def test_the_z_loss_by_hand_and_its_gradient():
    logits = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    loss = z_loss(sums_of(logits, top_k=1))
    assert_close(loss, float64(math.log(4) ** 2))
    loss.backward()
    # d (logsumexp^2) = 2 logsumexp softmax, and each token is half of the mean.
    assert_close(logits.grad, float64([[math.log(4) / 4] * 4] * 2))


def test_the_switch_loss_pushes_probability_away_from_the_busiest_expert():
    logits = torch.zeros(8, 4, dtype=torch.float64, requires_grad=True)
    switch_loss(sums_of_choice(logits, torch.tensor([[0]] * 5 + [[1], [2], [3]]))).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()
