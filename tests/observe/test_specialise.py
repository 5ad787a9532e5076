"""Measures of specialisation, where the answer is known."""

import numpy as np
import pytest

from moe_async.observe.specialise import agreement, coactivation, domain_information


def test_experts_that_tell_the_domain():
    domain_S = np.array([0, 1] * 20)
    counts_SE = np.where(domain_S[:, None] == 0, [[8, 0]], [[0, 8]])
    found = domain_information(counts_SE, domain_S, 2)
    assert found.bits == pytest.approx(1.0)
    assert found.baseline < 0.1 and found.spread < 0.1


def test_experts_that_tell_the_sequence_alone():
    """Each sequence has an expert of its own kind whatever its domain: that is chance, and the baseline says so."""
    chance = np.random.default_rng(0)
    counts_SE = 50 * np.eye(4, dtype=np.int64)[chance.integers(0, 4, 40)]
    found = domain_information(counts_SE, chance.integers(0, 2, 40), 2)
    assert found.baseline > 0.02 and abs(found.bits - found.baseline) < 3 * found.spread


def test_nothing_was_routed():
    assert domain_information(np.zeros((4, 3)), np.array([0, 1, 0, 1]), 2).bits == 0.0


def test_pairs_of_experts():
    # Experts 0 and 1 always come together, for half of the tokens; 2 and 3 for the others; 4 never.
    found = coactivation(np.array([[0, 1], [1, 0], [2, 3], [3, 2]]), 5)
    # By chance each of the four would meet each of three others a third of the time.
    assert found.lift_EE[0, 1] == pytest.approx(3.0) and found.lift_EE[3, 2] == pytest.approx(3.0)
    assert found.lift_EE[0, 2] == 0.0 and np.isnan(found.lift_EE[0, 0]) and np.isnan(found.lift_EE[4, 0])
    assert found.together_EE[0, 1] == 2 and found.strongest(9, least=3) == ()
    assert [(pair.first, pair.second, pair.count) for pair in found.strongest(9, least=2)] == [(0, 1, 2), (2, 3, 2)]


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (8, 2), (16, 6)])
@pytest.mark.parametrize("skew", [0.0, 0.6])
def test_a_router_that_chooses_at_random_has_lifts_of_one(experts, top_k, skew):
    """Without replacement, and whatever the loads: experts with larger logits are chosen more often."""
    chance = np.random.default_rng(0)
    logits_NE = chance.gumbel(size=(40_000, experts)) + skew * np.linspace(-1, 1, experts)
    found = coactivation(np.argsort(-logits_NE, axis=1)[:, :top_k], experts)
    apart_EE = found.lift_EE[~np.eye(experts, dtype=bool)]
    assert np.abs(apart_EE - 1).max() < 0.15 and np.abs(apart_EE.mean() - 1) < 0.02


def test_the_strongest_pair_is_no_accident_of_rare_experts():
    many = [[0, 1]] * 200 + [[2, 3]] * 200 + [[0, 2]] * 60 + [[1, 3]] * 60
    found = coactivation(np.array([*many, [4, 5]]), 6)
    assert found.lift_EE[4, 5] > found.lift_EE[0, 1] > 1
    assert [(pair.first, pair.second) for pair in found.strongest(1)] == [(0, 1)]


def test_agreement_of_two_routers():
    first_NK = np.array([[0, 1], [2, 3], [0, 1], [2, 3]])
    assert agreement(first_NK, first_NK[:, ::-1], 4) == (1.0, 0.5)
    share, chance = agreement(first_NK, np.array([[0, 2], [2, 0], [0, 2], [2, 0]]), 4)
    assert (share, chance) == (0.5, 0.5)


def test_agreement_of_tokens_that_took_fewer():
    first_NK = np.array([[0, -1], [1, 2]])
    assert agreement(first_NK, np.array([[-1, 3], [2, -1]]), 4) == (1 / 3, 1 / 6)
