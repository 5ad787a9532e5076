"""Every balance loss: its value at balance and at collapse, the papers' formulas in loops, and its scopes."""

import functools
import math

import pytest
import torch

from moe_async.engine.balance import BalanceLosses
from moe_async.ops.balance import (
    communication_loss,
    device_loss,
    gshard_loss,
    importance_loss,
    load_fractions,
    load_loss,
    micro_batch_share,
    sequence_loss,
    sequence_share,
    squared_cv,
    step_share,
    switch_loss,
    z_loss,
)
from moe_async.ops.routing import Groups, Selection, noisy_top_k_routing, top_k_routing
from moe_async.ops.sums import RoutingSums, routing_sums
from moe_async.recipe import MoeSection
from tests.helpers.numerics import assert_close
from tests.helpers.reference_routing import NAIVE_LOSSES, naive_noisy, naive_top_k

EXPERTS, ZERO, GROUPS, TOP_K = 6, 2, 3, 2
BIAS = [0.5, -0.25, 0.0, 0.25, -0.5, 0.125]
float64 = functools.partial(torch.tensor, dtype=torch.float64)


def loss_named(name, num_experts=EXPERTS, groups=GROUPS, reach=TOP_K):
    if name == "device":
        return functools.partial(device_loss, num_experts=num_experts, device_groups=groups)
    if name == "communication":
        return functools.partial(communication_loss, num_experts=num_experts, device_groups=groups, reach=reach)
    plain = (switch_loss, gshard_loss, importance_loss, load_loss, z_loss, sequence_loss)
    return {loss.__name__.removesuffix("_loss"): loss for loss in plain}[name]


def naive_named(name, num_experts=EXPERTS, groups=GROUPS, reach=TOP_K):
    more = {"device": {"groups": groups}, "communication": {"groups": groups, "reach": reach}}.get(name)
    return functools.partial(NAIVE_LOSSES[name], **({"num_experts": num_experts, **more} if more else {}))


def logits_of(tokens, choices=EXPERTS, seed=0):
    """Uneven routing: the first expert is ahead."""
    logits = torch.randn(tokens, choices, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[:, 0] += 1
    return logits


class Drawn:
    def __init__(self, values):
        self.values = values

    def normal(self, purpose, shape, device):
        return self.values


def noise_of(tokens, choices=EXPERTS):
    return logits_of(tokens, choices, seed=7), logits_of(tokens, choices, seed=8)


def sums_of(name, logits, live=None, *, noise=None, num_zero=0, sequences=1, groups=GROUPS):
    """The sums that a loss needs: by noisy top-k for ``load``, else by sigmoid scores with a bias."""
    if name == "load":
        raw, normal = noise_of(*logits.shape) if noise is None else noise
        selection = noisy_top_k_routing(logits, raw, TOP_K, Drawn(normal))
    else:
        bias = torch.tensor(BIAS + [0.0] * num_zero)
        selection = top_k_routing(logits, TOP_K, score="sigmoid", bias_E=bias, scale=2.5)
    return routing_sums(logits, selection, live_T=live, num_zero=num_zero, device_groups=groups, sequences=sequences)


def naive_tokens(name, logits, live=None, num_zero=0):
    live = [True] * len(logits) if live is None else live.tolist()
    raw, normal = noise_of(*logits.shape)
    tokens = []
    for t, row in enumerate(logits):
        if not live[t]:
            tokens.append(None)
        elif name == "load":
            tokens.append(naive_noisy(row, raw[t], normal[t], TOP_K))
        else:
            tokens.append(naive_top_k(row, TOP_K, score="sigmoid", bias=BIAS + [0.0] * num_zero, scale=2.5))
    return tokens


# Values by hand


def test_sums_by_hand():
    """Two sequences of two tokens, two experts and a zero expert, two groups of one expert."""
    logits = float64([[math.log(2.0), 0.0, 0.0]] * 4)
    selection = Selection(
        torch.tensor([[0, 1], [1, 2], [0, 2], [2, 0]]),
        float64([[0.5, 0.25], [0.75, 0.125], [1.0, 2.0], [4.0, 8.0]]),
        torch.softmax(logits, -1),
        taken_TK=torch.tensor([[True, True], [True, False], [True, True], [True, True]]),
        free_TK=torch.tensor([[1, 2]] * 4),
        chance_TE=float64([[0.5, 1.0, 0.0]] * 4),
    )
    full = torch.tensor([[False, True], [False, False], [True, False], [False, False]])
    live = torch.tensor([True, True, True, False])
    sums = routing_sums(logits, selection, sequences=2, live_T=live, full_TK=full, num_zero=1, device_groups=2)
    assert sums.counts_E.tolist() == [[1, 2, 0], [1, 0, 1]]
    assert sums.first_counts_E.tolist() == [[1, 1, 0], [1, 0, 0]]
    assert sums.free_counts_E.tolist() == [[0, 2, 2], [0, 1, 1]]
    assert sums.dropped_E.tolist() == [[0, 1, 0], [1, 0, 0]] and sums.dropped.tolist() == [1, 1]
    assert sums.sent_G.tolist() == [[1, 2, 0], [1, 0, 1]]
    assert sums.tokens.tolist() == [2, 1] and sums.bad_tokens.tolist() == [0, 0]
    assert_close(sums.prob_sum_E, float64([[1.0, 0.5, 0.5], [0.5, 0.25, 0.25]]))
    assert_close(sums.weight_sum_E, float64([[0.5, 1.0, 0.0], [1.0, 0.0, 2.0]]))
    assert_close(sums.chance_sum_E, float64([[1.0, 2.0, 0.0], [0.5, 1.0, 0.0]]))
    assert_close(sums.z_sum, float64([2.0, 1.0]) * math.log(4) ** 2)
    assert_close(sums.entropy_sum, float64([2.0, 1.0]) * 1.5 * math.log(2))
    whole = sums.total()
    assert whole.counts_E.tolist() == [2, 2, 1] and whole.tokens.item() == 3 and whole.dropped.item() == 2


def test_a_token_is_sent_to_a_group_once_for_all_its_experts_there():
    selection = Selection(torch.tensor([[0, 1, 4], [2, 3, 0]]), torch.ones(2, 3), torch.ones(2, 5))
    sums = routing_sums(torch.zeros(2, 5), selection, num_zero=1, device_groups=2)
    assert sums.sent_G.tolist() == [[2, 1, 1]]
    assert routing_sums(torch.zeros(2, 5), selection).sent_G.shape == (1, 0)


def test_losses_by_hand():
    """Three tokens, two experts: f = (2/3, 1/3), P = (2/3, 1/3), first choices (1, 0), importance (3, 1)."""
    sums = RoutingSums(
        counts_E=torch.tensor([4, 2]),
        first_counts_E=torch.tensor([3, 0]),
        free_counts_E=torch.tensor([0, 6]),
        dropped_E=torch.tensor([1, 0]),
        prob_sum_E=float64([2.0, 1.0]),
        weight_sum_E=float64([3.0, 1.0]),
        chance_sum_E=float64([1.0, 5.0]),
        sent_G=torch.tensor([3, 2]),
        z_sum=float64(6.0),
        entropy_sum=float64(0.0),
        top_sum=float64(0.0),
        margin_sum=float64(0.0),
        tokens=torch.tensor(3),
        bad_tokens=torch.tensor(0),
    )
    expected = {
        "switch": 2 * (4 / 9 + 1 / 9),
        "gshard": 2 * (2 / 3),
        "sequence": 2 * (1 / 3),
        # Mean 2, variance 1; mean 3, variance 4.
        "importance": 1 / 4,
        "load": 4 / 9,
        "z": 2.0,
        "device": 4 / 3 * 2 / 3 + 2 / 3 * 1 / 3,
        # Groups over reach is 2: F = (2 * 3/3, 2 * 2/3).
        "communication": 2 * 2 / 3 + 4 / 3 * 1 / 3,
    }
    for name, value in expected.items():
        assert_close(loss_named(name, 2, 2, 1)(sums), float64(value), what=name)


def test_the_squared_coefficient_of_variation_is_that_of_a_population():
    # Mean 4, deviations -3, -1, 1, 3.
    assert_close(squared_cv(float64([[1.0, 3.0, 5.0, 7.0], [2.0, 2.0, 2.0, 2.0]])), float64([5 / 16, 0.0]))
    assert squared_cv(float64([3.0])).item() == 0.0
    nothing = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    squared_cv(nothing).backward()
    assert squared_cv(nothing).item() == 0.0 and torch.equal(nothing.grad, torch.zeros_like(nothing))


def balanced(num_experts, top_k):
    """E tokens that each take the next K experts in turn, with a uniform distribution."""
    logits = torch.zeros(num_experts, num_experts, dtype=torch.float64)
    chosen = (torch.arange(num_experts)[:, None] + torch.arange(top_k)) % num_experts
    weights = torch.full(chosen.shape, 1 / top_k, dtype=torch.float64)
    return Selection(chosen, weights, torch.softmax(logits, -1), chance_TE=torch.full_like(logits, 0.5)), logits


@pytest.mark.parametrize("name", [*NAIVE_LOSSES])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("num_experts", [4, 8, 64])
def test_at_perfect_balance(name, num_experts, top_k):
    selection, logits = balanced(num_experts, top_k)
    # As many groups as experts: a token reaches K of them.
    sums = routing_sums(logits, selection, device_groups=num_experts).total()
    even = {"importance": 0.0, "load": 0.0, "z": math.log(num_experts) ** 2}.get(name, 1.0)
    assert_close(loss_named(name, num_experts, num_experts, top_k)(sums), float64(even))


@pytest.mark.parametrize("name", ["device", "communication"])
@pytest.mark.parametrize("num_zero", [0, 4])
def test_larger_groups_at_perfect_balance(name, num_zero):
    selection, logits = balanced(8 + num_zero, 1)
    sums = routing_sums(logits, selection, device_groups=2, num_zero=num_zero).total()
    assert sums.sent_G.tolist() == [4, 4, 4][: 2 + (num_zero > 0)]
    assert_close(loss_named(name, 8, 2, 1)(sums), float64(1.0))


@pytest.mark.parametrize("name", ["switch", "gshard", "sequence"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 1), (8, 2), (64, 4)])
def test_at_collapse(name, num_experts, top_k):
    """K experts take everything and share the probability: E/K (with shares of first choices alone as well)."""
    logits = torch.full((6, num_experts), -math.inf, dtype=torch.float64)
    logits[:, :top_k] = 0.0
    sums = routing_sums(logits, top_k_routing(logits, top_k)).total()
    assert_close(loss_named(name)(sums), float64(num_experts / top_k))


# The naive losses


@pytest.mark.parametrize("name", [*NAIVE_LOSSES])
@pytest.mark.parametrize("masked", [False, True], ids=["all live", "masked"])
@pytest.mark.parametrize("num_zero", [0, ZERO])
def test_equals_the_naive_loss_including_the_gradient(name, masked, num_zero):
    logits = logits_of(11, EXPERTS + num_zero).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    live = torch.arange(11) % 4 != 1 if masked else None
    actual = loss_named(name)(sums_of(name, logits, live, num_zero=num_zero).total())
    expected = naive_named(name)(naive_tokens(name, twin, live, num_zero))
    assert_close(actual, expected)
    actual.backward()
    expected.backward()
    assert_close(logits.grad, twin.grad)
    assert logits.grad.norm() > 0


def test_counts_are_those_of_the_executed_selection_with_bias_and_groups():
    logits = logits_of(40)
    selection = top_k_routing(logits, TOP_K, score="sigmoid", bias_E=torch.tensor(BIAS), groups=Groups(GROUPS, 2, 2))
    sums = routing_sums(logits, selection).total()
    executed = torch.bincount(selection.experts_TK.reshape(-1), minlength=EXPERTS)
    alone = top_k_routing(logits, TOP_K, score="sigmoid").experts_TK
    assert sums.counts_E.tolist() == executed.tolist()
    assert sums.free_counts_E.tolist() == torch.bincount(alone.reshape(-1), minlength=EXPERTS).tolist()
    assert sums.counts_E.tolist() != sums.free_counts_E.tolist()
    mean = sums.prob_sum_E / 40
    assert_close(switch_loss(sums), EXPERTS * (executed.double() / 80 * mean).sum())
    assert_close(sequence_loss(sums), EXPERTS * (sums.free_counts_E.double() / 80 * mean).sum())


@pytest.mark.parametrize("bias", [None, BIAS], ids=["unbiased", "biased"])
def test_the_sequence_loss_ignores_groups_and_bias(bias):
    """DeepSeek-V3, eq. 18: its shares are of the K highest scores of all experts, whatever may be chosen."""
    # The two best are in different groups, of which one alone may be used: experts 0 and 1 are taken.
    by_hand = float64([[3.0, 0.0, -9.0, -9.0, 2.0, -9.0]])
    limited = top_k_routing(by_hand, 2, score="sigmoid", groups=Groups(3, 1, 2))
    sums = routing_sums(by_hand, limited).total()
    assert sums.counts_E.tolist() == [1, 1, 0, 0, 0, 0] and sums.free_counts_E.tolist() == [1, 0, 0, 0, 1, 0]

    logits = logits_of(40)
    options = {"score": "sigmoid", "bias_E": None if bias is None else torch.tensor(bias)}
    sums, free = (
        routing_sums(logits, selection).total()
        for selection in (
            top_k_routing(logits, TOP_K, **options, groups=Groups(GROUPS, 1, 2)),
            top_k_routing(logits, TOP_K, score="sigmoid"),
        )
    )
    assert torch.equal(sums.free_counts_E, free.counts_E) and not torch.equal(sums.counts_E, free.counts_E)
    assert_close(sequence_loss(sums), switch_loss(free))
    assert not is_close(switch_loss(sums), switch_loss(free))


@pytest.mark.parametrize(("top_k", "reach"), [(1, 1), (2, 2), (3, 3), (5, 3)])
def test_the_reach_of_the_communication_loss_counts_the_group_of_zero_experts(top_k, reach):
    moe = MoeSection.model_validate(
        {
            "num_experts": 4,
            "zero_experts": 2,
            "top_k": min(top_k, 4),
            "expert_dim": 1,
            "device_groups": 2,
            "balance": [{"loss": "communication", "coefficient": 0.02}],
        }
    )
    (loss,) = BalanceLosses(moe, torch.device("cpu"))._functions
    # Each token in as many groups as it can be, each group equally often: the loss is 1.
    places = [[0, 2, 4], [2, 4, 0], [4, 0, 2]]
    chosen = torch.tensor([row[:reach] for row in places])
    logits = torch.zeros(3, 6, dtype=torch.float64)
    selection = Selection(chosen, torch.ones(chosen.shape, dtype=torch.float64), torch.softmax(logits, -1))
    assert_close(loss(routing_sums(logits, selection, num_zero=2, device_groups=2).total()), float64(1.0))


def test_what_is_dropped_stays_in_the_share():
    """All tokens to expert 0, of which only a fourth fit: the loss is E, and not the 1 of what was executed."""
    logits = torch.zeros(8, 4, dtype=torch.float64)
    logits[:, 0] = 50.0
    selection = top_k_routing(logits, 1)
    full = torch.arange(8)[:, None] >= 2
    sums = routing_sums(logits, selection, full_TK=full).total()
    assert sums.dropped_E.tolist() == [6, 0, 0, 0]
    for loss in (switch_loss, gshard_loss, sequence_loss):
        assert_close(loss(sums), float64(4.0))


@pytest.mark.parametrize("name", [*NAIVE_LOSSES])
def test_padding_changes_nothing(name):
    logits = logits_of(9)
    twin = torch.cat([logits, 100 * logits_of(6, seed=3)]).requires_grad_()
    logits.requires_grad_()
    raw, normal = noise_of(15)
    plain = sums_of(name, logits, noise=(raw[:9], normal[:9])).total()
    padded = sums_of(name, twin, torch.arange(15) < 9, noise=(raw, normal)).total()
    for field in RoutingSums._fields:
        assert_close(getattr(padded, field), getattr(plain, field), torch.float64, field)
    loss_named(name)(plain).backward()
    loss_named(name)(padded).backward()
    assert_close(twin.grad[:9], logits.grad)
    assert torch.equal(twin.grad[9:], torch.zeros_like(twin.grad[9:]))


@pytest.mark.parametrize("name", [*NAIVE_LOSSES])
def test_no_tokens_give_zero_with_a_finite_gradient(name):
    for tokens, live in ((0, None), (3, torch.zeros(3, dtype=torch.bool))):
        logits = logits_of(tokens).requires_grad_()
        loss = loss_named(name)(sums_of(name, logits, live).total())
        assert loss.item() == 0.0
        loss.backward()
        assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("low", [-40.0, -120.0])
@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_pushing_all_scores_down_does_not_help(score, low):
    logits = (logits_of(20).float() + low).requires_grad_()
    loss = switch_loss(routing_sums(logits, top_k_routing(logits, TOP_K, score=score)).total())
    # So far down sigmoid is exp(z), and the root of softplus exp(z / 2).
    relative = (logits.detach() - low) * (1.0 if score == "sigmoid" else 0.5)
    expected = switch_loss(routing_sums(relative, top_k_routing(relative, TOP_K)).total())
    assert_close(loss, expected)
    loss.backward()
    assert logits.grad.isfinite().all() and logits.grad.norm() > 0


def test_the_load_fractions_are_exact():
    fractions = load_fractions(torch.tensor([[3, 0, 1], [0, 0, 0]]))
    assert fractions.dtype == torch.float64 and fractions.tolist() == [[0.75, 0.0, 0.25], [0.0, 0.0, 0.0]]
    # Above 2^24 float32 no longer tells neighbours apart.
    assert load_fractions(torch.tensor([2**25 + 1, 2**25 - 1])).tolist() == [0.5 + 2**-26, 0.5 - 2**-26]


# Scopes


@pytest.mark.parametrize("name", [*NAIVE_LOSSES])
def test_each_sequence_has_its_own_loss(name):
    logits = logits_of(12).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    live = torch.tensor([True] * 4 + [True, False, True, False] + [False, True, True, True])
    raw, normal = noise_of(12)
    sums = sums_of(name, logits, live, sequences=3, noise=(raw, normal))
    rows = [
        loss_named(name)(sums_of(name, twin[own], live[own], noise=(raw[own], normal[own])).total())
        for own in (slice(0, 4), slice(4, 8), slice(8, 12))
    ]
    assert_close(loss_named(name)(sums), torch.stack(rows))
    share, expected = sequence_share(loss_named(name), sums), 4 * rows[0] + 2 * rows[1] + 3 * rows[2]
    assert_close(share, expected)
    share.backward()
    expected.backward()
    assert_close(logits.grad, twin.grad)


@pytest.mark.parametrize("name", [*NAIVE_LOSSES])
def test_repeating_a_sequence_leaves_the_loss_as_it_is(name):
    logits = logits_of(5)
    raw, normal = noise_of(5)
    once = sums_of(name, logits, noise=(raw, normal))
    three = sums_of(name, logits.repeat(3, 1), noise=(raw.repeat(3, 1), normal.repeat(3, 1)), sequences=3)
    for share in (sequence_share, micro_batch_share):
        assert_close(share(loss_named(name), three) / 15, share(loss_named(name), once) / 5)


@pytest.mark.parametrize("name", [*NAIVE_LOSSES])
def test_a_micro_batch_counts_by_its_live_tokens(name):
    live = torch.arange(10) != 3
    sums = sums_of(name, logits_of(10), live, sequences=2)
    assert_close(micro_batch_share(loss_named(name), sums), 9 * loss_named(name)(sums.total()))


def in_micro_batches(name, logits, live, noise):
    """The sums of three unequal micro-batches; the second has two sequences."""
    cuts = [(slice(0, 3), 1), (slice(3, 13), 2), (slice(13, 18), 1)]
    return [
        sums_of(name, logits[own], live[own], noise=tuple(value[own] for value in noise), sequences=sequences)
        for own, sequences in cuts
    ]


def is_close(actual, expected):
    try:
        assert_close(actual, expected)
    except AssertionError:
        return False
    return True


def detached(sums):
    packed = sums.pack()
    assert not packed.requires_grad
    return sums.unpack(packed)


@pytest.mark.parametrize("name", [*NAIVE_LOSSES])
def test_micro_batches_of_scope_step_equal_one_large_batch(name):
    logits, noise, live = logits_of(18), noise_of(18), torch.arange(18) % 5 != 2
    twin = logits.clone().requires_grad_()
    logits.requires_grad_()
    loss = loss_named(name)
    expected = loss(sums_of(name, twin, live, noise=noise).total())
    expected.backward()
    with torch.no_grad():
        first = [sums.total() for sums in in_micro_batches(name, logits, live, noise)]
    step = detached(RoutingSums(*(sum(values) for values in zip(*first, strict=True))))
    parts = in_micro_batches(name, logits, live, noise)
    actual = sum(step_share(loss, sums, step) for sums in parts) / live.sum()
    assert_close(actual, expected)
    actual.backward()
    assert_close(logits.grad, twin.grad)

    # Narrower scopes are other losses (but for z, a plain mean).
    own = sum(micro_batch_share(loss, sums) for sums in parts) / live.sum()
    assert is_close(own, expected) == (name == "z")

    # And so is scope `previous`, the slopes at the loads of other data (those of z are the same everywhere).
    logits.grad = None
    other = detached(sums_of(name, 2 * logits_of(30, seed=5)).total())
    shares = sum(step_share(loss, sums, other) for sums in in_micro_batches(name, logits, live, noise)) / live.sum()
    assert_close(shares, loss(other).to(shares.dtype))
    assert not is_close(shares, expected)
    shares.backward()
    assert is_close(logits.grad, twin.grad) == (name == "z")


def test_a_step_share_is_a_scalar_of_the_dtype_of_the_sums():
    sums = sums_of("switch", logits_of(6).float().requires_grad_(), sequences=2)
    share = step_share(switch_loss, sums, detached(sums.total()))
    assert share.shape == () and share.dtype == torch.float32 and share.requires_grad
    assert_close(share, 6 * switch_loss(sums.total()))
    with torch.no_grad():
        assert_close(step_share(switch_loss, sums, detached(sums.total())), share)


def test_packing_keeps_large_integers_and_takes_the_order_of_the_fields():
    sums = sums_of("load", logits_of(6)).total()._replace(tokens=torch.tensor(2**53 - 1))
    packed = sums.pack()
    assert packed.dtype == torch.float64 and packed.dim() == 1
    for name, value in sums.unpack(packed)._asdict().items():
        assert_close(value, getattr(sums, name), torch.float64, name)
        assert value.is_floating_point() == getattr(sums, name).is_floating_point()
    assert sums.unpack(packed).tokens.item() == 2**53 - 1


@pytest.mark.parametrize("field", RoutingSums._fields)
def test_sums_add_up_over_micro_batches(field):
    logits, noise, live = logits_of(18), noise_of(18), torch.arange(18) % 5 != 2
    whole = sums_of("load", logits, live, noise=noise).total()
    parts = [getattr(sums.total(), field) for sums in in_micro_batches("load", logits, live, noise)]
    assert_close(sum(parts), getattr(whole, field), torch.float64)


def test_tokens_whose_logits_are_not_finite_are_counted():
    logits = logits_of(5)
    logits[1, 0], logits[3, 2] = math.nan, math.inf
    selection = top_k_routing(logits_of(5), 2)
    assert routing_sums(logits, selection).bad_tokens.item() == 2
    assert routing_sums(logits, selection, live_T=torch.arange(5) != 1).bad_tokens.item() == 1


@pytest.mark.parametrize("name", ["switch", "sequence", "gshard"])
def test_the_loss_pushes_probability_away_from_the_busiest_expert(name):
    logits = torch.zeros(8, 4, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([[0]] * 5 + [[1], [2], [3]])
    selection = top_k_routing(logits, 1, experts_TK=chosen)
    loss_named(name)(routing_sums(logits, selection).total()).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()
