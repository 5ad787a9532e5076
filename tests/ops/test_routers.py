"""The routers' rules: scores without underflow, groups, biases, and the rules that are not a plain top-k."""

import functools
import math

import pytest
import torch

from moe_async.ops.routing import (
    Groups,
    Selection,
    expert_choice_routing,
    gshard_routing,
    hash_table,
    in_best_groups,
    log_scores,
    noisy_top_k_routing,
    read_record,
    record,
    top_k_routing,
)
from tests.helpers.numerics import assert_close
from tests.helpers.reference_routing import naive_expert_choice, naive_gshard, naive_noisy, naive_top_k

SCORES = ["softmax", "sigmoid", "sqrt_softplus"]
TOKENS, EXPERTS = 12, 8
float64 = functools.partial(torch.tensor, dtype=torch.float64)


def logits_of(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Drawn:
    """A source of noise that gives the numbers it was made with, whatever for."""

    def __init__(self, values):
        self.values = values

    def uniform(self, purpose, shape, device):
        assert tuple(self.values.shape) == shape
        return self.values

    normal = uniform


def assert_same(selection, tokens, inputs, twins):
    """The selection and its gradients are those of the naive tokens."""
    for t, token in enumerate(tokens):
        taken = [True] * len(token.experts) if selection.taken_TK is None else selection.taken_TK[t].tolist()
        assert selection.experts_TK[t].tolist() == token.experts and taken == token.taken
    expected = [torch.stack([torch.stack(token.weights) for token in tokens]), torch.stack([t.probs for t in tokens])]
    actual = [selection.weights_TK, selection.probs_TE]
    if selection.chance_TE is not None:
        expected.append(torch.stack([token.chance for token in tokens]))
        actual.append(selection.chance_TE)
    losses = [0, 0]
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs)
        direction = logits_of(*ours.shape, seed=9)
        losses = [losses[0] + (ours * direction).sum(), losses[1] + (theirs * direction).sum()]
    for loss in losses:
        loss.backward()
    for value, twin in zip(inputs, twins, strict=True):
        assert_close(value.grad, twin.grad)


def with_twin(value):
    return value.requires_grad_(), value.detach().clone().requires_grad_()


# Scores


def test_scores_by_hand():
    logits = float64([[math.log(3.0), 0.0]])
    assert_close(log_scores(logits, "softmax").exp(), float64([[3 / 4, 1 / 4]]))
    assert_close(log_scores(logits, "sigmoid").exp(), float64([[3 / 4, 1 / 2]]))
    # log(1 + 3) and log(2), whose quotient is 2.
    assert_close(log_scores(logits, "sqrt_softplus").exp(), float64([[math.log(4) ** 0.5, math.log(2) ** 0.5]]))


def test_sqrt_softplus_is_smooth_where_its_series_begins():
    at = [-18 - 1e-9, -18, -18 + 1e-9, -9, -17.5, -18.5, -30]
    logits = float64(at).requires_grad_()
    logs = log_scores(logits, "sqrt_softplus")
    assert_close(logs, float64([0.5 * math.log(math.log1p(math.exp(z))) for z in at]))
    logs.sum().backward()
    # The slope of log(softplus(z)) / 2.
    slopes = [0.5 / ((1 + math.exp(-z)) * math.log1p(math.exp(z))) for z in at]
    assert_close(logits.grad, float64(slopes))


@pytest.mark.parametrize("low", [-40.0, -100.0, -1000.0])
@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_scores_that_underflow_keep_their_proportion_and_a_finite_gradient(score, low):
    steps = torch.tensor([[0.0, 1.0, 0.5, -1.0]], dtype=torch.float32)
    logits = (low + steps).requires_grad_()
    selection = top_k_routing(logits, 2, score=score)
    # Far below zero sigmoid(z) and softplus(z) are exp(z), the root of softplus exp(z / 2).
    expected = torch.softmax(steps if score == "sigmoid" else steps / 2, -1)
    assert selection.experts_TK.tolist() == [[1, 2]]
    assert_close(selection.probs_TE, expected)
    assert_close(selection.weights_TK, expected[:, [1, 2]] / expected[:, [1, 2]].sum())
    (selection.probs_TE[0, 0] + selection.weights_TK[0, 0]).backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 0] > 0


def test_the_sigmoid_distribution_is_a_softmax_of_logarithms():
    logits = torch.full((3, 6), -40.0) + torch.linspace(-2, 2, 18).view(3, 6)
    expected = torch.softmax(torch.nn.functional.logsigmoid(logits), -1)
    assert_close(top_k_routing(logits, 2, score="sigmoid").probs_TE, expected)


# Top-k

BIAS = [0.0, 0.25, -0.25, 0.5, -0.5, 0.125, 0.0, -0.125]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("rule", ["normalised", "raw"])
@pytest.mark.parametrize("bias", [None, BIAS], ids=["unbiased", "biased"])
@pytest.mark.parametrize("groups", [None, (4, 2, 2), (4, 2, 1), (2, 1, 3)], ids=str)
def test_top_k_equals_the_naive_choice_including_the_gradient(score, rule, bias, groups):
    logits, twin = with_twin(logits_of(TOKENS, EXPERTS))
    options = {"score": score, "scale": 2.5}
    selection = top_k_routing(
        logits,
        3,
        weights=rule,
        bias_E=None if bias is None else torch.tensor(bias),
        groups=None if groups is None else Groups(*groups),
        **options,
    )
    tokens = [naive_top_k(row, 3, rule=rule, bias=bias, groups=groups, **options) for row in twin]
    free_TK = selection.experts_TK if selection.free_TK is None else selection.free_TK
    assert free_TK.tolist() == [token.free for token in tokens]
    assert_same(selection, tokens, [logits], [twin])


def test_the_bias_decides_the_choice_and_is_not_in_the_weights():
    logits = float64([[math.log(3.0), 0.0, -math.log(3.0)]])  # sigmoid: 3/4, 1/2, 1/4
    selection = top_k_routing(logits, 2, score="sigmoid", scale=2.0, bias_E=torch.tensor([-1.0, 0.0, 0.0]))
    assert selection.experts_TK.tolist() == [[1, 2]] and selection.free_TK.tolist() == [[0, 1]]
    assert_close(selection.weights_TK, 2 * float64([[2 / 3, 1 / 3]]))
    assert_close(selection.probs_TE, float64([[3 / 6, 2 / 6, 1 / 6]]))


def test_equal_scores_plus_bias_pick_the_lowest_index():
    # 0.5 + 0.25 and 0.75 are the same number.
    logits = float64([[0.0, math.log(3.0), 0.0, 0.0]])
    bias = torch.tensor([0.25, 0.0, 0.25, 0.0])
    assert top_k_routing(logits, 2, score="sigmoid", bias_E=bias).experts_TK.tolist() == [[0, 1]]
    assert top_k_routing(logits, 3, score="sigmoid", bias_E=bias).experts_TK.tolist() == [[0, 1, 2]]


def test_weights_without_a_taken_place_left_over_sum_to_the_scale():
    selection = top_k_routing(logits_of(9, 6), 4, score="sigmoid", scale=2.5)
    assert_close(selection.weights_TK.sum(-1), torch.full((9,), 2.5, dtype=torch.float64))
    assert_close(selection.probs_TE.sum(-1), torch.ones(9, dtype=torch.float64))


def test_a_recorded_choice_takes_the_place_of_the_biased_one():
    recorded = torch.tensor([[5, 0]] * TOKENS)
    logits, twin = with_twin(logits_of(TOKENS, EXPERTS))
    selection = top_k_routing(
        logits, 2, score="sigmoid", bias_E=torch.tensor(BIAS), groups=Groups(4, 1, 1), experts_TK=recorded
    )
    options = {"score": "sigmoid", "bias": BIAS, "groups": (4, 1, 1)}
    tokens = [naive_top_k(row, 2, experts=[5, 0], **options) for row in twin]
    # What the scores alone would choose is still their own.
    assert selection.free_TK.tolist() == [token.free for token in tokens]
    assert_same(selection, tokens, [logits], [twin])


# Groups


def test_groups_by_hand():
    scores = float64([[0.9, 0.1, 0.6, 0.5, 0.7, 0.2]])
    # Sums of two: 1.0, 1.1, 0.9; highest: 0.9, 0.6, 0.7.
    i, o = True, False
    assert in_best_groups(scores, Groups(3, 1, 2)).tolist() == [[o, o, i, i, o, o]]
    assert in_best_groups(scores, Groups(3, 2, 1)).tolist() == [[i, i, o, o, i, i]]
    assert in_best_groups(scores, Groups(3, 3, 1)).dtype == torch.bool
    # Negative scores, as a bias makes them: -0.2 - 0.3 is more than -0.1 - 0.9.
    assert in_best_groups(float64([[-0.1, -0.9, -0.2, -0.3]]), Groups(2, 1, 2)).tolist() == [[o, o, i, i]]


@pytest.mark.parametrize("score", SCORES)
def test_scores_that_underflow_keep_their_order_inside_groups(score):
    # The scores of the last three are zero but for the first group's best, their logits tell them apart.
    logits = float64([[0.0, -3000.0, -2000.0, -4000.0, -5000.0, -6000.0]])
    selection = top_k_routing(logits, 3, score=score, groups=Groups(2, 1, 2))
    assert selection.experts_TK.tolist() == [[0, 2, 1]] == selection.free_TK.tolist()
    limited = top_k_routing(logits, 2, score=score, groups=Groups(3, 2, 1))
    assert limited.experts_TK.tolist() == [[0, 2]]


def test_nothing_but_a_bias_or_groups_sets_the_free_choice_apart():
    logits = logits_of(TOKENS, EXPERTS)
    assert top_k_routing(logits, 2).free_TK is None
    assert top_k_routing(logits, 2, experts_TK=torch.zeros(TOKENS, 2, dtype=torch.int64)).free_TK is None
    alone = top_k_routing(logits, 2).experts_TK
    for options in ({"groups": Groups(4, 1, 2)}, {"bias_E": torch.tensor(BIAS)}):
        selection = top_k_routing(logits, 2, **options)
        assert torch.equal(selection.free_TK, alone) and not torch.equal(selection.experts_TK, alone)


@pytest.mark.parametrize("score", SCORES)
def test_biases_that_make_every_score_negative_do_not_open_other_groups(score):
    selection = top_k_routing(logits_of(50, 16), 4, score=score, bias_E=torch.full((16,), -2.0), groups=Groups(4, 2, 2))
    used = torch.zeros(50, 4).scatter_(1, selection.experts_TK // 4, 1.0)
    assert (used.sum(-1) <= 2).all()
    # The same shift for all experts changes nothing.
    plain = top_k_routing(logits_of(50, 16), 4, score=score, groups=Groups(4, 2, 2))
    assert torch.equal(selection.experts_TK, plain.experts_TK)


def test_equal_groups_pick_the_lowest():
    selection = top_k_routing(torch.zeros(3, 12), 3, groups=Groups(6, 2, 2))
    assert selection.experts_TK.tolist() == [[0, 1, 2]] * 3


# GShard


def test_gshard_by_hand():
    # g = 3/4 and 1/4 of the two best alone: the second is taken where the draw lies below 1/2.
    logits = float64([[math.log(3.0), 0.0, math.log(0.5)]]).expand(4, 3)
    selection = gshard_routing(logits, Drawn(torch.tensor([0.0, 0.49, 0.5, 0.99])))
    assert selection.experts_TK.tolist() == [[0, 1]] * 4
    assert selection.taken_TK.tolist() == [[True, True], [True, True], [True, False], [True, False]]
    assert_close(selection.weights_TK, float64([[3 / 4, 1 / 4]]).expand(4, 2))
    assert gshard_routing(logits, None).taken_TK is None


@pytest.mark.parametrize("training", [False, True])
def test_gshard_equals_the_naive_rule_including_the_gradient(training):
    logits, twin = with_twin(3 * logits_of(TOKENS, EXPERTS))
    draws = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))
    selection = gshard_routing(logits, Drawn(draws) if training else None)
    tokens = [naive_gshard(row, draw if training else None) for row, draw in zip(twin, draws.tolist(), strict=True)]
    assert {token.taken[1] for token in tokens} == ({False, True} if training else {True})
    assert_same(selection, tokens, [logits], [twin])


# Noisy top-k


def test_noisy_top_k_by_hand():
    # softplus(r) = 1 makes h = (1, 2, 0.5): threshold 2, 1, 2 and distances -1, -1, -1.5 of the logits.
    logits = float64([[1.0, 0.0, 0.5]])
    raw = torch.full((1, 3), math.log(math.e - 1), dtype=torch.float64)
    selection = noisy_top_k_routing(logits, raw, 1, Drawn(float64([[0.0, 2.0, 0.0]])))
    assert selection.experts_TK.tolist() == [[1]]
    assert_close(selection.probs_TE, torch.softmax(float64([[1.0, 2.0, 0.5]]), -1))
    expected = [0.5 * math.erfc(d / math.sqrt(2)) for d in (1.0, 1.0, 1.5)]
    assert_close(selection.chance_TE, float64([expected]))
    quiet = noisy_top_k_routing(logits, raw, 1, None)
    assert quiet.experts_TK.tolist() == [[0]] and quiet.chance_TE is None


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS - 1, EXPERTS])
def test_noisy_top_k_equals_the_naive_rule_including_gradients(top_k):
    logits, twin = with_twin(logits_of(TOKENS, EXPERTS))
    raw, raw_twin = with_twin(logits_of(TOKENS, EXPERTS, seed=1))
    normal = logits_of(TOKENS, EXPERTS, seed=2)
    selection = noisy_top_k_routing(logits, raw, top_k, Drawn(normal))
    tokens = [naive_noisy(*row, top_k) for row in zip(twin, raw_twin, normal, strict=True)]
    assert_same(selection, tokens, [logits, raw], [twin, raw_twin])


def test_learned_noise_that_vanishes_leaves_a_finite_gradient():
    logits, raw = logits_of(TOKENS, EXPERTS).float().requires_grad_(), torch.full((TOKENS, EXPERTS), -60.0)
    raw.requires_grad_()
    selection = noisy_top_k_routing(logits, raw, 2, Drawn(logits_of(TOKENS, EXPERTS, seed=2)))
    certain = torch.zeros(TOKENS, EXPERTS).scatter_(1, selection.experts_TK, 1.0)
    assert torch.equal(selection.chance_TE, certain)
    selection.chance_TE.sum().backward()
    assert logits.grad.isfinite().all() and raw.grad.isfinite().all()


# Expert choice


def test_expert_choice_by_hand():
    # Three tokens, two experts, K = 1: each expert takes ceil(3 / 2) = 2 tokens, so both take the second.
    selection = expert_choice_routing(float64([[2.0, 0.0], [0.0, 0.0], [0.0, 3.0]]), 1, None)
    assert record(selection, None).tolist() == [[0, -2], [0, 1], [1, -1]]
    assert_close(selection.weights_TK[1], float64([0.5, 0.5]))


@pytest.mark.parametrize("masked", [False, True], ids=["all live", "masked"])
@pytest.mark.parametrize("top_k", [1, 2, 3, EXPERTS])
def test_expert_choice_equals_the_naive_rule_including_the_gradient(top_k, masked):
    logits, twin = with_twin(logits_of(TOKENS, EXPERTS))
    live = torch.arange(TOKENS) % 4 != 1 if masked else None
    selection = expert_choice_routing(logits, top_k, live)
    tokens = naive_expert_choice(twin, top_k, None if live is None else live.tolist())
    executed = [
        [e for e, taken in zip(*row, strict=True) if taken]
        for row in zip(selection.experts_TK.tolist(), selection.taken_TK.tolist(), strict=True)
    ]
    assert executed == [[] if token is None else token.experts for token in tokens]
    alive = [token for token in tokens if token is not None]
    assert selection.experts_TK.shape[1] == max(1, *(len(token.experts) for token in alive))
    actual = selection.weights_TK[selection.taken_TK]
    expected = torch.stack([w for token in alive for w in token.weights])
    assert_close(actual, expected)
    direction = logits_of(len(expected), seed=3)
    (actual * direction).sum().backward()
    (expected * direction).sum().backward()
    assert_close(logits.grad, twin.grad)


def test_equal_probabilities_take_the_earliest_tokens():
    selection = expert_choice_routing(torch.zeros(100, 4), 2, None)
    assert selection.taken_TK.all(-1).tolist() == [True] * 50 + [False] * 50
    assert selection.experts_TK[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("live", [None, torch.zeros(0, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)], ids=str)
def test_expert_choice_without_live_tokens_takes_nothing(live):
    selection = expert_choice_routing(torch.zeros(0 if live is None else len(live), 4), 2, live)
    assert not selection.taken_TK.any() and selection.experts_TK.shape[1] == 1


# Hash


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_hash_table_has_distinct_experts_and_spreads_the_first_evenly(top_k):
    table = hash_table(40, 5, top_k, torch.Generator().manual_seed(0))
    assert table.dtype == torch.int64 and table.shape == (40, top_k)
    assert all(len(set(row)) == top_k and set(row) <= set(range(5)) for row in table.tolist())
    assert torch.bincount(table[:, 0]).tolist() == [8] * 5
    assert table[:, 0].tolist() != sorted(table[:, 0].tolist())
    assert torch.equal(table, hash_table(40, 5, top_k, torch.Generator().manual_seed(0)))
    assert not torch.equal(table, hash_table(40, 5, top_k, torch.Generator().manual_seed(1)))


def test_the_other_experts_of_the_hash_table_are_of_every_kind():
    table = hash_table(4000, 5, 2, torch.Generator().manual_seed(0))
    pairs = torch.bincount(table[:, 0] * 5 + table[:, 1], minlength=25).view(5, 5)
    assert pairs.diagonal().tolist() == [0] * 5
    # 200 of each of the 20 pairs are expected, give or take 14.
    assert (pairs + 200 * torch.eye(5)).sub(200).abs().max() < 70


# What is common to all


def routed(kind, logits):
    draw = torch.rand(logits.shape, generator=torch.Generator().manual_seed(5))
    if kind == "gshard":
        return gshard_routing(logits, Drawn(draw[:, 0]))
    if kind == "noisy":
        return noisy_top_k_routing(logits, torch.zeros_like(logits), 3, Drawn(draw))
    if kind == "expert choice":
        return expert_choice_routing(logits, 3, None)
    return top_k_routing(logits, 3, score=kind, bias_E=torch.tensor(BIAS), groups=Groups(4, 2, 2))


@pytest.mark.parametrize("kind", [*SCORES, "gshard", "noisy", "expert choice"])
def test_the_experts_of_a_token_are_distinct(kind):
    for logits in (logits_of(200, EXPERTS), torch.zeros(200, EXPERTS, dtype=torch.float64)):
        experts = routed(kind, logits).experts_TK.sort(-1).values
        assert (experts[:, 1:] > experts[:, :-1]).all()


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "sqrt_softplus", "noisy"])
def test_equal_logits_pick_the_lowest_index(kind):
    logits = torch.zeros(300, 64, dtype=torch.float64)
    if kind == "noisy":
        selection = noisy_top_k_routing(logits, logits, 6, Drawn(torch.zeros(300, 64)))
    else:
        selection = top_k_routing(logits, 6, score=kind, bias_E=torch.zeros(64))
    assert selection.experts_TK.tolist() == [[0, 1, 2, 3, 4, 5]] * 300


def test_a_record_tells_what_was_executed_and_can_be_read_back():
    experts, taken = torch.tensor([[2, 0], [0, 1]]), torch.tensor([[True, False], [True, False]])
    selection = Selection(experts, torch.ones(2, 2), torch.ones(2, 3), taken_TK=taken)
    assert record(selection, None).tolist() == [[2, -1], [0, -2]]
    again = read_record(record(selection, None), 3)
    assert torch.equal(again.experts_TK, experts) and torch.equal(again.taken_TK, taken) and again.full_TK is None
    everything = selection._replace(taken_TK=None)
    assert record(everything, None).tolist() == experts.tolist()
    assert [value is None for value in read_record(experts, 3)] == [False, True, True]


def test_a_record_tells_what_was_dropped_from_what_was_not_taken():
    experts = torch.arange(3).repeat_interleave(3)[:, None]
    taken, full = torch.tensor([True, True, False] * 3)[:, None], torch.tensor([False, True, False] * 3)[:, None]
    selection = Selection(experts, torch.ones(9, 1), torch.ones(9, 3), taken_TK=taken)
    recorded = record(selection, full)
    assert recorded.tolist() == [[0], [-4], [-1], [1], [-5], [-2], [2], [-6], [-3]]
    for value, expected in zip(read_record(recorded, 3), (experts, taken, full), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("value", [3, 4, 30, -7, -100])
def test_a_record_of_experts_that_do_not_exist_is_refused(value):
    recorded = torch.tensor([[0, 2], [-6, -1]])
    assert read_record(recorded, 3).experts_TK.tolist() == [[0, 2], [2, 0]]
    recorded[1, 0] = value
    with pytest.raises(
        ValueError, match=rf"the selection holds {value} but there are 3 experts; entries are 0 to 2, or"
    ):
        read_record(recorded, 3)
