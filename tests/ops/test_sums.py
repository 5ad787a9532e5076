"""Sums over tokens: hand values, the slow twin, masks, and how they add up."""

import functools
import math

import pytest
import torch

from moe_async.ops.balance import switch_loss, z_loss
from moe_async.ops.routing import Selection, highest_k, top_k_routing
from moe_async.ops.sums import RoutingSums, routing_sums
from tests.helpers.numerics import assert_close
from tests.helpers.reference import naive_sums, naive_switch_loss, naive_z_loss
from tests.helpers.sums import EXPERTS, TOP_K, balanced, choosing, collapsed, logits_of, sums_of, sums_of_choice

float64 = functools.partial(torch.tensor, dtype=torch.float64)


def test_a_hand_written_example():
    logits = float64([[math.log(3.0), 0.0], [math.log(3.0), 0.0], [0.0, 0.0]])
    sums = sums_of_choice(logits, torch.tensor([[0], [0], [1]]))
    assert sums.counts_E.tolist() == [2, 1] and sums.tokens.item() == 3 and sums.dropped.item() == 0
    assert sums.first_counts_E.tolist() == sums.free_counts_E.tolist() == [2, 1] and sums.bad_tokens.item() == 0
    assert_close(sums.prob_sum_E, float64([2.0, 1.0]))
    assert_close(sums.weight_sum_E, float64([1.5, 0.5]))
    # logsumexp is ln 4, ln 4 and ln 2.
    assert_close(sums.z_sum, float64(9 * math.log(2.0) ** 2))
    entropy = 2 * (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) + math.log(2)
    assert_close(sums.entropy_sum, float64(entropy))
    assert_close(sums.top_sum, float64(0.75 + 0.75 + 0.5))
    assert_close(sums.margin_sum, float64(0.5 + 0.5 + 0.0))


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
    assert_close(sums.top_sum, float64(naive.top_sum))
    assert_close(sums.margin_sum, float64(naive.margin_sum))
    loss = 0.3 * switch_loss(sums) + 0.1 * z_loss(sums)
    expected = 0.3 * naive_switch_loss(naive, top_k) + 0.1 * naive_z_loss(naive)
    assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert_close(logits.grad, twin.grad)


def test_counts_are_of_assignments_before_any_drop():
    logits = logits_of(40)
    selection = top_k_routing(logits, TOP_K)
    sums = sums_of(logits)
    assert sums.counts_E.sum().item() == TOP_K * 40 and sums.dropped.item() == 0
    # Everything that goes to the busiest expert is dropped.
    full = selection.experts_TK == 0
    fewer = routing_sums(logits, selection, full_TK=full).total()
    assert fewer.dropped_E.tolist() == [sums.counts_E[0].item(), 0, 0, 0, 0]
    assert fewer.dropped.item() == sums.counts_E[0].item() > 0
    assert torch.equal(fewer.counts_E, sums.counts_E) and torch.equal(switch_loss(fewer), switch_loss(sums))


def test_gradients_flow_through_probabilities_weights_and_logits_alone():
    sums = sums_of(logits_of(6).requires_grad_())
    with_gradient = {name for name, value in sums._asdict().items() if value.requires_grad}
    assert with_gradient == {"prob_sum_E", "weight_sum_E", "z_sum"}


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
    sums = routing_sums(probs.detach(), choosing(chosen, probs), live_T=none_live)
    (sums.prob_sum_E.sum() + sums.weight_sum_E.sum()).backward()
    assert torch.equal(probs.grad, torch.zeros_like(probs))


@pytest.mark.parametrize("field", RoutingSums._fields)
def test_sums_add_up_over_micro_batches(field):
    logits = logits_of(15)
    parts = [getattr(sums_of(part), field) for part in logits.split([6, 0, 9])]
    assert_close(sum(parts), getattr(sums_of(logits), field), torch.float64)


@pytest.mark.parametrize("masked", [False, True], ids=["all live", "masked"])
def test_there_is_one_row_for_each_sequence(masked):
    logits, mask = logits_of(15), torch.arange(15) % 4 != 1 if masked else None
    rows = routing_sums(logits, top_k_routing(logits, TOP_K), sequences=3, live_T=mask)
    assert rows.counts_E.shape == rows.prob_sum_E.shape == (3, EXPERTS) and rows.tokens.shape == (3,)
    for index in range(3):
        own = slice(5 * index, 5 * index + 5)
        for name, value in sums_of(logits[own], None if mask is None else mask[own])._asdict().items():
            assert_close(getattr(rows, name)[index], value, torch.float64, name)


@pytest.mark.parametrize("sequences", [1, 3, 12], ids="{} sequences".format)
@pytest.mark.parametrize("masked", [False, True], ids=["all live", "masked"])
@pytest.mark.parametrize("empty", [False, True], ids=["all taken", "empty places"])
def test_counting_by_scatter_equals_a_loop(sequences, masked, empty):
    tokens, choices, top_k, length = 12, 7, 3, 12 // sequences
    generator = torch.Generator().manual_seed(sequences)

    def drawn(*shape):
        return torch.rand(*shape, generator=generator) < 0.7

    logits = torch.randn(tokens, choices, generator=generator, dtype=torch.float64)
    # A choice of its own in each place, also the same expert twice, as a replay may give it.
    selection = Selection(
        torch.randint(choices, (tokens, top_k), generator=generator),
        torch.ones(tokens, top_k, dtype=torch.float64),
        torch.softmax(logits, -1),
        taken_TK=drawn(tokens, top_k) if empty else None,
        free_TK=torch.randint(choices, (tokens, top_k), generator=generator),
    )
    live, full = drawn(tokens) if masked else None, ~drawn(tokens, top_k)
    sums = routing_sums(logits, selection, sequences=sequences, live_T=live, full_TK=full)

    expected = {name: [[0] * choices for _ in range(sequences)] for name in ("counts", "first", "free", "dropped")}
    for t in range(tokens):
        if live is not None and not live[t]:
            continue
        row = t // length
        for j in range(top_k):
            expert = int(selection.experts_TK[t, j])
            expected["free"][row][int(selection.free_TK[t, j])] += 1
            expected["dropped"][row][expert] += int(full[t, j])
            if selection.taken_TK is None or selection.taken_TK[t, j]:
                expected["counts"][row][expert] += 1
                expected["first"][row][expert] += j == 0
    actual = {
        "counts": sums.counts_E,
        "first": sums.first_counts_E,
        "free": sums.free_counts_E,
        "dropped": sums.dropped_E,
    }
    for name, value in actual.items():
        assert value.dtype == torch.int64 and value.tolist() == expected[name], name


@pytest.mark.parametrize("sequences", [0, 2])
def test_no_tokens_count_nothing(sequences):
    logits = torch.zeros(0, EXPERTS, dtype=torch.float64)
    sums = routing_sums(logits, top_k_routing(logits, TOP_K), sequences=sequences)
    assert sums.counts_E.tolist() == sums.free_counts_E.tolist() == [[0] * EXPERTS] * sequences


def test_no_tokens_give_zeros_with_a_finite_gradient():
    logits = torch.zeros(0, EXPERTS, dtype=torch.float64, requires_grad=True)
    sums = sums_of(logits)
    loss = switch_loss(sums) + z_loss(sums)
    assert loss.item() == 0.0 and sums.tokens.item() == 0 and sums.entropy_sum.item() == 0.0
    loss.backward()
    assert logits.grad.shape == (0, EXPERTS)


def test_the_entropy_of_a_uniform_and_of_a_certain_router():
    assert_close(balanced(8, 1).entropy_sum, float64(8 * math.log(8)))
    assert collapsed(8, 1).entropy_sum.item() == 0.0
