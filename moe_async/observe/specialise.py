"""What experts specialise in, from the experts that each token took.

Shape letters: N tokens, S sequences, K experts per token, E experts, C domains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_async.observe.windows import Array


@dataclass(frozen=True)
class Information:
    """How much the expert of an assignment tells about the domain of its text.

    Attributes:
        bits: mutual information between expert and domain.
        baseline: the same with labels shuffled over sequences, mean; what chance alone gives.
        spread: its standard deviation over shuffles.
    """

    bits: float
    baseline: float
    spread: float


def domain_information(
    counts_SE: Array, domain_S: Array, domains: int, shuffles: int = 200, seed: int = 0
) -> Information:
    """Mutual information between expert and domain, with its shuffled baseline.

    Labels are shuffled over whole sequences, because tokens of one sequence are alike: shuffled over tokens, the
    baseline would be too low and chance would look like specialisation.

    Args:
        counts_SE: assignments of each sequence to each expert.
        domain_S: index of each sequence's domain.
        domains: C.
        shuffles: how many.
        seed: of the shuffles.
    """
    chance = np.random.default_rng(seed)
    labels_S = np.asarray(domain_S, dtype=np.int64)
    shuffled = [_information(counts_SE, chance.permutation(labels_S), domains) for _ in range(shuffles)]
    return Information(_information(counts_SE, labels_S, domains), float(np.mean(shuffled)), float(np.std(shuffled)))


def _information(counts_SE: Array, domain_S: Array, domains: int) -> float:
    counts_CE = np.zeros((domains, counts_SE.shape[1]))
    np.add.at(counts_CE, domain_S, counts_SE)
    return mutual_information(counts_CE)


def mutual_information(counts_CE: Array) -> float:
    """Mutual information between the rows and the columns of a table of counts, in bits; 0 without counts."""
    total = counts_CE.sum()
    if not total:
        return 0.0
    joint_CE = counts_CE / total
    apart_CE = joint_CE.sum(axis=1, keepdims=True) * joint_CE.sum(axis=0, keepdims=True)
    there = joint_CE > 0
    return float((joint_CE[there] * np.log2(joint_CE[there] / apart_CE[there])).sum())


@dataclass(frozen=True)
class Pair:
    """Two experts that serve tokens together.

    Attributes:
        first: an expert.
        second: another one, of a higher number.
        count: tokens that both serve.
        lift: that over what chance gives; 1 is chance.
    """

    first: int
    second: int
    count: int
    lift: float


@dataclass(frozen=True)
class Coactivation:
    """How often each pair of experts serves the same token.

    Attributes:
        together_EE: tokens that both serve; zeros on the diagonal.
        lift_EE: that over what chance gives; NaN on the diagonal, and where one of the two is in no pair.
    """

    together_EE: Array
    lift_EE: Array

    def strongest(self, most: int, least: int = 5) -> tuple[Pair, ...]:
        """The pairs that serve tokens together more often than by chance, those that say most first: by
        ``count * log(lift)``, so that no pair of rare experts leads because of a token or two.

        Args:
            most: pairs.
            least: tokens that both have to have served.
        """
        there_EE = np.triu((self.together_EE >= least) & (np.nan_to_num(self.lift_EE) > 1), 1)
        says_EE = np.where(there_EE, self.together_EE * np.log(np.where(there_EE, self.lift_EE, 1.0)), 0.0)
        rows, columns = np.unravel_index(np.argsort(-says_EE, axis=None, kind="stable")[:most], says_EE.shape)
        return tuple(
            Pair(int(one), int(other), int(self.together_EE[one, other]), float(self.lift_EE[one, other]))
            for one, other in zip(rows, columns, strict=True)
            if there_EE[one, other]
        )


def coactivation(experts_NK: Array, experts: int) -> Coactivation:
    """How often each pair of experts serves the same token, and what chance would give.

    Chance keeps how many pairs each expert is in, and otherwise lets every two experts meet alike: the table of largest
    entropy with these sums and an empty diagonal, because a token takes no expert twice.

    Args:
        experts_NK: the experts of each token; negative places count for nothing.
        experts: E.
    """
    taken_NE = np.zeros((len(experts_NK), experts))
    rows, columns = np.nonzero(experts_NK >= 0)
    taken_NE[rows, experts_NK[rows, columns]] = 1.0
    together_EE = taken_NE.T @ taken_NE
    np.fill_diagonal(together_EE, 0.0)
    chance_EE = _chance(together_EE)
    lift_EE = np.divide(together_EE, chance_EE, out=np.full_like(together_EE, np.nan), where=chance_EE > 0)
    return Coactivation(together_EE, lift_EE)


def _chance(together_EE: Array, rounds: int = 500) -> Array:
    """A symmetric table x_i x_j with an empty diagonal and the row sums of another one, by iterative scaling."""
    sums_E = together_EE.sum(axis=1)
    size_E = np.sqrt(sums_E)
    for _ in range(rounds):
        now_E = size_E * (size_E.sum() - size_E)
        better_E = size_E * np.sqrt(np.divide(sums_E, now_E, out=np.zeros_like(now_E), where=now_E > 0))
        if np.allclose(better_E, size_E, rtol=1e-9):
            break
        size_E = better_E
    chance_EE = np.outer(size_E, size_E)
    np.fill_diagonal(chance_EE, 0.0)
    return np.asarray(chance_EE)


def agreement(first_NK: Array, second_NK: Array, experts: int) -> tuple[float, float]:
    """Share of the experts of a token that two routers have in common, mean over tokens, and what chance would give.

    Chance keeps each router's loads and lets it choose without a look at the token.

    Args:
        first_NK: the experts that one router gave each token, no expert twice; negative places count for nothing.
        second_NK: those of the other for the same tokens.
        experts: E.
    """
    taken_NK = first_NK >= 0
    common = (taken_NK & (first_NK[:, :, None] == second_NK[:, None, :]).any(axis=2)).sum()
    first_E, second_E = (np.bincount(part[part >= 0], minlength=experts) for part in (first_NK, second_NK))
    choices = max(int(taken_NK.sum()), 1)
    return float(common / choices), float((first_E * second_E).sum() / max(len(first_NK), 1) / choices)


@dataclass(frozen=True)
class Preference:
    """A token that an expert serves more often than its load alone would have it.

    Attributes:
        token: its id.
        count: how often the expert served it.
        lift: share of the token among what the expert serves, over its share among what all serve; 1 is chance.
    """

    token: int
    count: int
    lift: float


def preferred_tokens(
    token_N: Array, experts_NK: Array, experts: int, most: int = 6, least: int = 5
) -> list[tuple[Preference, ...]]:
    """The tokens that tell each expert from the others, those that say most first.

    Tokens are in the order of their parts of the divergence between what an expert serves and what all serve,
    ``count * log(lift)``: no rare token leads because of its lift alone, nor a frequent one because of its count.

    Args:
        token_N: id of each token.
        experts_NK: the experts of each token; negative places count for nothing.
        experts: E.
        most: tokens of an expert.
        least: times that an expert has to have served a token.
    """
    rows, columns = np.nonzero(experts_NK >= 0)
    known_V, place_N = np.unique(token_N, return_inverse=True)
    served_EV = np.zeros((experts, len(known_V)), dtype=np.int64)
    np.add.at(served_EV, (experts_NK[rows, columns], place_N[rows]), 1)
    all_V, all_E = served_EV.sum(axis=0), served_EV.sum(axis=1)
    chance_EV = np.outer(all_E, all_V) / max(all_E.sum(), 1)
    lift_EV = np.divide(served_EV, chance_EV, out=np.zeros(chance_EV.shape), where=chance_EV > 0)
    there_EV = (served_EV >= least) & (lift_EV > 1)
    says_EV = np.where(there_EV, served_EV * np.log(np.where(there_EV, lift_EV, 1.0)), 0.0)
    return [
        tuple(
            Preference(int(known_V[place]), int(served_EV[expert, place]), float(lift_EV[expert, place]))
            for place in np.argsort(-says_EV[expert], kind="stable")[:most]
            if there_EV[expert, place]
        )
        for expert in range(experts)
    ]
