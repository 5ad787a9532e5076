"""The selection bias follows the load: by hand, against the formulas, and in a loop with a skewed router."""

import functools

import pytest
import torch

from moe_async.moe import MoELayer
from moe_async.ops.bias import BiasState, load_errors, updated_bias
from moe_async.ops.load import load_balance
from tests.helpers.numerics import assert_close
from tests.helpers.reference_routing import NaiveBias, naive_bias_update

GAINS = {"sign": {}, "proportional": {}, "pid": {"integral": 0.5, "derivative": 0.5}}
RULES = list(GAINS)
float64 = functools.partial(torch.tensor, dtype=torch.float64)


def fresh(choices):
    return BiasState(*(torch.zeros(choices) for _ in range(3)))


def router_of(num_experts=4, top_k=2, zero_experts=0, *, router=None, **update):
    router = router or {"kind": "sigmoid_bias", "update": {"rate": 0.25, **update}}
    return MoELayer(3, num_experts, top_k, 1, router=router, zero_experts=zero_experts).router


def bias_after(router, *counts, first_step=1):
    for step, row in enumerate(counts, first_step):
        router.update_bias(torch.tensor(row), step)
    return router.selection_bias.tolist()


# Errors


def test_errors_by_hand():
    # The share of an expert shall be 1/4: shares 1/2, 1/4, 1/8, 1/8 are 2, 1, 1/2, 1/2 of it.
    errors = load_errors(torch.tensor([4, 2, 1, 1]), 4, 2, 2)
    assert errors.dtype == torch.float64 and errors.tolist() == [-1.0, 0.0, 0.5, 0.5]


def test_errors_with_zero_experts_by_hand():
    # Of K = 2 places 1.5 shall go to three experts, so each shall have the share 1.5 / (2 * 3) = 1/4.
    errors = load_errors(torch.tensor([4, 2, 1, 1]), 3, 1.5, 2)
    assert errors.tolist() == [-1.0, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("wanted", [None, 2])
def test_an_even_load_is_exactly_no_error(wanted):
    # 1 / 49 * 49 is not 1 in floating point, and the rule `sign` would take the rest for a load.
    for choices in range(2, 200):
        for count in (1, 7, 1000):
            errors = load_errors(torch.full((choices,), count), choices - 1 if wanted is None else choices, wanted, 2)
            assert not errors.any(), (choices, count)


def test_nothing_routed_is_no_error():
    assert load_errors(torch.zeros(4, dtype=torch.int64), 4, 2, 2).tolist() == [0.0] * 4


# Updates


def test_sign_by_hand():
    # Mean 2: down, as it is, up, up. The mean of these moves is 1/4 and taken off.
    state = updated_bias(fresh(4), load_errors(torch.tensor([4, 2, 1, 1]), 4, 2, 2), 4, "sign", 0.1, 0.0, 0.0)
    assert_close(state.bias_E, torch.tensor([-0.125, -0.025, 0.075, 0.075]))
    assert state.last_error_E.tolist() == state.error_sum_E.tolist() == [-1.0, 0.0, 0.5, 0.5]


def test_proportional_by_hand():
    state = updated_bias(fresh(2), float64([-0.5, 0.5]), 2, "proportional", 0.5, 9.0, 9.0)
    assert state.bias_E.tolist() == [-0.25, 0.25]


def test_pid_by_hand():
    first = updated_bias(fresh(1), float64([0.5]), 1, "pid", 1.0, 0.5, 0.25)
    # 0.5 + 0.5 * 0.5 + 0.25 * (0.5 - 0).
    assert first.bias_E.tolist() == [0.875]
    second = updated_bias(first, float64([-0.25]), 1, "pid", 1.0, 0.5, 0.25)
    # -0.25 + 0.5 * 0.25 + 0.25 * (-0.25 - 0.5).
    assert second.bias_E.tolist() == [0.875 - 0.3125]
    assert second.error_sum_E.tolist() == [0.25] and second.last_error_E.tolist() == [-0.25]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_zero", [0, 3])
def test_equals_the_naive_rule_over_many_updates(rule, num_zero):
    generator = torch.Generator().manual_seed(0)
    state, naive = fresh(5 + num_zero), NaiveBias(*([0.0] * (5 + num_zero) for _ in range(3)))
    for _ in range(20):
        counts = torch.randint(0, 50, (5 + num_zero,), generator=generator)
        errors = load_errors(counts, 5, 2.5 if num_zero else 3.0, 3)
        state = updated_bias(state, errors, 5, rule, 1e-2, 0.1, 0.3)
        options = {"top_k": 3, "experts_per_token": 2.5 if num_zero else None, "integral": 0.1, "derivative": 0.3}
        naive = naive_bias_update(naive, counts.tolist(), 5, rule, 1e-2, **options)
        for value, expected in zip(state, (naive.bias, naive.error_sum, naive.last_error), strict=True):
            assert value.dtype == torch.float32
            assert_close(value, float64(expected), torch.float32)
    assert state.bias_E[5:].tolist() == [0.0] * num_zero
    if rule == "sign" and not num_zero:
        # The biases do not drift together.
        assert_close(state.bias_E.sum(), torch.tensor(0.0))


@pytest.mark.parametrize("rule", RULES)
def test_an_even_load_moves_nothing(rule):
    for num_experts in range(2, 13):
        for top_k in range(1, num_experts + 1):
            router = router_of(num_experts, top_k, rule=rule, **GAINS[rule])
            assert bias_after(router, [7] * num_experts) == [0.0] * num_experts


@pytest.mark.parametrize("rule", RULES)
def test_an_even_load_with_zero_experts_moves_nothing(rule):
    for num_experts, num_zero in ((2, 1), (3, 2), (3, 4), (5, 1), (8, 4)):
        router = router_of(num_experts, 2, num_zero, rule=rule, **GAINS[rule])
        router.update_bias(torch.full((num_experts + num_zero,), 7), 1)
        assert_close(router.selection_bias, torch.zeros(num_experts + num_zero))


def test_small_steps_add_up_in_float32():
    state = BiasState(torch.ones(2), torch.zeros(2), torch.zeros(2))
    for _ in range(200):
        state = updated_bias(state, float64([1.0, -1.0]), 2, "sign", 1e-3, 0.0, 0.0)
    assert_close(state.bias_E, torch.tensor([1.2, 0.8]))


# The router's part


def test_the_router_updates_its_own_bias():
    assert bias_after(router_of(2, 1), [3, 1]) == [-0.25, 0.25]
    assert bias_after(router_of(2, 1), [3, 1], [1, 3], [1, 3]) == [0.25, -0.25]
    # Errors -0.5 and 0.5, then 0.5 and -0.5.
    router = router_of(2, 1, rule="pid", rate=1.0, integral=1.0, derivative=2.0)
    assert bias_after(router, [3, 1], [1, 3]) == [-2.0 + 2.5, 2.0 - 2.5]
    assert router.error_sum.tolist() == [0.0, 0.0] and router.last_error.tolist() == [0.5, -0.5]


def test_zero_experts_and_how_many_of_a_token_shall_be_real():
    # An even load over 2 experts and 2 zero experts is a share of 1/4 each: all moves, as nothing else is centred.
    assert bias_after(router_of(2, 2, 2), [2, 4, 1, 9]) == [0.25, 0.0, 0.0, 0.0]
    # Half an expert a token is a share of 0.5 / (2 * 2) = 1/8.
    assert bias_after(router_of(2, 2, 2, experts_per_token=0.5), [2, 4, 1, 9]) == [0.0, -0.25, 0.0, 0.0]


def test_updates_end_and_can_be_off():
    assert bias_after(router_of(2, 1, until=2), [3, 1], [3, 1]) == [-0.5, 0.5]
    assert bias_after(router_of(2, 1, until=2), [3, 1], [3, 1], [3, 1], [3, 1]) == [-0.5, 0.5]
    assert bias_after(router_of(2, 1, until=0), [3, 1]) == [0.0, 0.0]
    assert bias_after(router_of(2, 1, router={"kind": "sigmoid_bias", "update": None}), [3, 1]) == [0.0, 0.0]
    plain = router_of(2, 1, router={"kind": "topk"})
    plain.update_bias(torch.tensor([3, 1]), 1)
    assert plain.bias_state is None and not list(plain.buffers())


def test_no_gradient_moves_the_bias():
    router = router_of(rule="sign")
    _, selection = router(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
    (selection.weights_TK.square().sum() + selection.probs_TE[:, 0].sum()).backward()
    assert not router.selection_bias.requires_grad and router.selection_bias.grad is None
    router.update_bias(torch.tensor([4, 2, 1, 1]), 1)
    assert not router.selection_bias.requires_grad


@torch.no_grad()
@pytest.mark.parametrize("rule", RULES)
def test_a_skewed_router_becomes_even(rule):
    """One logit is ahead by 1; the bias takes the load of each step and evens it out."""
    gains = {"integral": 0.05, "derivative": 0.1} if rule == "pid" else {}
    router = router_of(8, 2, rule=rule, rate=0.02, **gains)
    router.weight.copy_(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)))
    router.weight[0, 2], router.weight[1:, 2] = 1.0, 0.0
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(2))
    x[:, 2] = 1.0
    loads = []
    for step in range(1, 41):
        counts = torch.bincount(router(x)[1].experts_TK.reshape(-1), minlength=8)
        loads.append(load_balance(counts).max_over_mean)
        router.update_bias(counts, step)
    assert loads[0] > 1.6 and loads[-1] < 1.3
