"""Sums over tokens and the balance losses over them: hand values, the slow twin, and how sums add up."""

import functools
import math

import pytest
import torch

from moe_async.ops.balance import RoutingSums, load_fractions, routing_sums, switch_loss_sum, z_loss_sum
from moe_async.ops.routing import highest_k
from tests.helpers.numerics import assert_close
from tests.helpers.reference import naive_sums, naive_switch_loss, naive_z_loss

EXPERTS, TOP_K = 5, 2
float64 = functools.partial(torch.tensor, dtype=torch.float64)


def logits_of(tokens, seed=0):
    """Uneven routing: the first expert is ahead."""
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits + float64([1.0, 0, 0, 0, 0])


def sums_of(logits, mask=None, top_k=TOP_K):
    probs = torch.softmax(logits, -1)
    return routing_sums(logits, probs, highest_k(probs, top_k), mask)


def balanced(num_experts, top_k):
    """Sums of E tokens that each take the next K experts in turn, with a uniform distribution."""
    logits = torch.zeros(num_experts, num_experts, dtype=torch.float64)
    chosen = (torch.arange(num_experts)[:, None] + torch.arange(top_k)) % num_experts
    return routing_sums(logits, torch.softmax(logits, -1), chosen, None)


def collapsed(num_experts, top_k, tokens=6):
    """Sums of tokens that all take the first K experts, which share all the probability."""
    logits = torch.full((tokens, num_experts), -math.inf, dtype=torch.float64)
    logits[:, :top_k] = 0.0
    return routing_sums(logits, torch.softmax(logits, -1), torch.arange(top_k).expand(tokens, top_k), None)


def test_a_hand_written_example():
    logits = float64([[math.log(3.0), 0.0], [math.log(3.0), 0.0], [0.0, 0.0]])
    sums = routing_sums(logits, torch.softmax(logits, -1), torch.tensor([[0], [0], [1]]), None)
    assert sums.counts_E.tolist() == [2, 1] and sums.tokens.item() == 3 and sums.dropped.item() == 0
    assert_close(sums.prob_sum_E, float64([2.0, 1.0]))
    # f = (2/3, 1/3) and P = (2/3, 1/3): the loss is 2 (4/9 + 1/9), times three tokens.
    assert_close(switch_loss_sum(sums), float64(10 / 3))
    # logsumexp is ln 4, ln 4 and ln 2.
    assert_close(z_loss_sum(sums), float64(9 * math.log(2.0) ** 2))
    entropy = 2 * (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) + math.log(2)
    assert_close(sums.entropy_sum, float64(entropy))


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("num_experts", [8, 64, 256])
def test_the_switch_loss_is_1_at_perfect_balance(num_experts, top_k):
    sums = balanced(num_experts, top_k)
    assert sums.counts_E.tolist() == [top_k] * num_experts
    assert_close(switch_loss_sum(sums) / sums.tokens, float64(1.0))


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("num_experts", [8, 64, 256])
def test_the_switch_loss_is_experts_over_k_at_collapse(num_experts, top_k):
    sums = collapsed(num_experts, top_k)
    assert_close(switch_loss_sum(sums) / sums.tokens, float64(num_experts / top_k))


@pytest.mark.parametrize("masked", [False, True], ids=["all live", "masked"])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_equals_the_naive_sums_including_gradients(top_k, masked):
    logits = logits_of(11).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    mask = torch.arange(11) % 4 != 1 if masked else None
    sums = sums_of(logits, mask, top_k)
    chosen = highest_k(torch.softmax(twin, -1), top_k).tolist()
    naive = naive_sums(twin, chosen, None if mask is None else mask.tolist())

    assert sums.counts_E.dtype == torch.int64 and sums.counts_E.tolist() == naive.counts
    assert sums.tokens.dtype == torch.int64 and sums.tokens.item() == naive.tokens
    assert_close(sums.prob_sum_E, naive.prob_sum)
    assert_close(sums.entropy_sum, float64(naive.entropy_sum))
    loss = (0.3 * switch_loss_sum(sums) + 0.1 * z_loss_sum(sums)) / sums.tokens
    expected = 0.3 * naive_switch_loss(naive, top_k) + 0.1 * naive_z_loss(naive)
    assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert_close(logits.grad, twin.grad)


def test_counts_are_of_assignments_before_any_drop():
    sums = sums_of(logits_of(40))
    assert sums.counts_E.sum().item() == TOP_K * 40 and sums.dropped.item() == 0
    fewer = sums._replace(dropped=torch.tensor(30))
    assert torch.equal(switch_loss_sum(fewer), switch_loss_sum(sums))


def test_gradients_flow_through_probabilities_and_logits_alone():
    sums = sums_of(logits_of(6).requires_grad_())
    assert sums.prob_sum_E.requires_grad and sums.z_sum.requires_grad
    assert not any(value.requires_grad for value in (sums.counts_E, sums.entropy_sum, sums.tokens, sums.dropped))


def test_masked_tokens_may_hold_anything():
    logits = logits_of(6)
    padded = torch.cat([logits, torch.full((2, EXPERTS), math.nan), torch.full((1, EXPERTS), math.inf)])
    padded.requires_grad_()
    sums = sums_of(padded, torch.arange(9) < 6)
    for name, value in sums_of(logits)._asdict().items():
        assert_close(getattr(sums, name), value, torch.float64, name)
    # And none of it reaches the gradient.
    probs = torch.full((2, EXPERTS), math.nan).requires_grad_()
    none_live, chosen = torch.zeros(2, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.int64)
    routing_sums(probs.detach(), probs, chosen, none_live).prob_sum_E.sum().backward()
    assert torch.equal(probs.grad, torch.zeros_like(probs))


@pytest.mark.parametrize("cut", [[4, 0, 9, 1], [7, 7]])
def test_with_the_fractions_of_the_step_micro_batches_equal_one_big_batch(cut):
    big = logits_of(14).requires_grad_()
    whole = sums_of(big)
    expected = switch_loss_sum(whole) / whole.tokens
    expected.backward()

    parts = [part.detach().clone().requires_grad_() for part in big.split(cut)]
    sums = [sums_of(part) for part in parts]
    fractions = load_fractions(sum(part.counts_E for part in sums))
    actual = sum(switch_loss_sum(part, fractions) for part in sums) / sum(part.tokens for part in sums)
    assert_close(actual, expected)
    actual.backward()
    assert_close(torch.cat([part.grad for part in parts]), big.grad)


def test_with_their_own_fractions_micro_batches_give_the_token_weighted_mean():
    parts = [sums_of(logits_of(4)), sums_of(-logits_of(9, seed=1))]
    actual = sum(switch_loss_sum(part) for part in parts) / 13
    expected = sum(part.tokens * (switch_loss_sum(part) / part.tokens) for part in parts) / 13
    assert_close(actual, expected)
    # Which is another number than the loss of the whole.
    fractions = load_fractions(parts[0].counts_E + parts[1].counts_E)
    whole = sum(switch_loss_sum(part, fractions) for part in parts) / 13
    assert actual.item() > whole.item()


@pytest.mark.parametrize("field", RoutingSums._fields)
def test_sums_add_up_over_micro_batches(field):
    logits = logits_of(15)
    parts = [getattr(sums_of(part), field) for part in logits.split([6, 0, 9])]
    assert_close(sum(parts), getattr(sums_of(logits), field), torch.float64)


def test_fractions_are_float64_without_gradient_and_sum_to_1():
    fractions = load_fractions(torch.tensor([3, 0, 1]))
    assert fractions.dtype == torch.float64 and fractions.tolist() == [0.75, 0.0, 0.25]
    # Above 2^24 float32 no longer tells neighbours apart.
    assert load_fractions(torch.tensor([2**25 + 1, 2**25 - 1])).tolist() == [0.5 + 2**-26, 0.5 - 2**-26]


def test_no_tokens_give_zeros_with_a_finite_gradient():
    logits = torch.zeros(0, EXPERTS, dtype=torch.float64, requires_grad=True)
    sums = sums_of(logits)
    assert load_fractions(sums.counts_E).tolist() == [0.0] * EXPERTS
    loss = switch_loss_sum(sums) + z_loss_sum(sums)
    assert loss.item() == 0.0 and sums.tokens.item() == 0 and sums.entropy_sum.item() == 0.0
    loss.backward()
    assert logits.grad.shape == (0, EXPERTS)


def test_the_z_loss_by_hand_and_its_gradient():
    logits = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    loss = z_loss_sum(sums_of(logits, top_k=1))
    assert_close(loss, float64(2 * math.log(4) ** 2))
    loss.backward()
    # d (logsumexp^2) = 2 logsumexp softmax.
    assert_close(logits.grad, float64([[2 * math.log(4) / 4] * 4] * 2))


def test_the_entropy_of_a_uniform_and_of_a_certain_router():
    assert_close(balanced(8, 1).entropy_sum, float64(8 * math.log(8)))
    assert collapsed(8, 1).entropy_sum.item() == 0.0


def test_the_switch_loss_pushes_probability_away_from_the_busiest_expert():
    logits = torch.zeros(8, 4, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([[0]] * 5 + [[1], [2], [3]])
    switch_loss_sum(routing_sums(logits, torch.softmax(logits, -1), chosen, None)).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()
