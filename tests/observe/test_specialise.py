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
    lift_EE = coactivation(np.array([[0, 1], [1, 0], [2, 3], [3, 2]]), 5)
    assert lift_EE[0, 1] == lift_EE[3, 2] == 2.0
    assert lift_EE[0, 2] == lift_EE[0, 0] == lift_EE[4, 0] == 0.0


def test_agreement_of_two_routers():
    first_NK = np.array([[0, 1], [2, 3], [0, 1], [2, 3]])
    assert agreement(first_NK, first_NK[:, ::-1], 4) == (1.0, 0.5)
    share, chance = agreement(first_NK, np.array([[0, 2], [2, 0], [0, 2], [2, 0]]), 4)
    assert (share, chance) == (0.5, 0.5)


def test_agreement_of_tokens_that_took_fewer():
    first_NK = np.array([[0, -1], [1, 2]])
    assert agreement(first_NK, np.array([[-1, 3], [2, -1]]), 4) == (1 / 3, 1 / 6)
