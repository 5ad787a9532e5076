"""The trigram model against a dictionary implementation of its formula."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from moe_async.data import ByteTokenizer, Corpus, TrigramModel, heldout_batches
from moe_async.errors import DataError


class SlowTrigrams:
    """Interpolated Kneser-Ney by dictionaries, written from the formula, one token at a time."""

    def __init__(self, streams: list[list[int]], vocab_size: int) -> None:
        trigrams: Counter[tuple[int, ...]] = Counter(
            gram for stream in streams for gram in zip(stream, stream[1:], stream[2:], strict=False)
        )
        before_pair: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for a, b, c in trigrams:
            before_pair[b, c].add(a)
        before_token: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for b, c in before_pair:
            before_token[c,].add(b)
        pairs = {pair: len(tokens) for pair, tokens in before_pair.items()}
        tokens = {token: len(others) for token, others in before_token.items()}
        self.tables: dict[int, Mapping[tuple[int, ...], int]] = {3: trigrams, 2: pairs, 1: tokens}
        self.vocab_size = vocab_size

    def probability(self, *gram: int) -> float:
        if not gram:
            return 1 / self.vocab_size
        table = self.tables[len(gram)]
        ones = sum(count == 1 for count in table.values())
        twos = sum(count == 2 for count in table.values())
        discount = ones / (ones + 2 * twos) if ones else 0.5
        shorter = self.probability(*gram[1:])
        same_context = [count for key, count in table.items() if key[:-1] == gram[:-1]]
        if not same_context:
            return shorter
        kept = max(table.get(gram, 0) - discount, 0.0)
        return (kept + discount * len(same_context) * shorter) / sum(same_context)

    def bits(self, stream: list[int]) -> float:
        grams = [stream[max(0, end - 3) : end] for end in range(2, len(stream) + 1)]
        return -sum(math.log2(self.probability(*gram)) for gram in grams)


def arrays(streams: list[list[int]]) -> list[np.ndarray]:
    return [np.array(stream, dtype=np.uint16) for stream in streams]


def random_streams(seed: int, lengths: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    """Skewed towards small ids, so that the tables hold ones, twos and many."""
    numbers = np.random.default_rng(seed)
    return [np.minimum(numbers.geometric(0.35, size) - 1, vocab_size - 1).tolist() for size in lengths]


def test_by_hand() -> None:
    """Stream 0 1 0 1 1, two tokens: trigrams 010, 101, 011, each once.

    Three ones and no two: D3 = 1, so trigrams hand everything on. Pairs (10), (01), (11) have one kind before them
    each: D2 = 1, all handed on. Tokens: N(.0) = 1 (from 10), N(.1) = 2 (from 01 and 11), D1 = 1 / (1 + 2) = 1/3.
    p(0) = (1 - 1/3) / 3 + (1/3 * 2 / 3) / 2 = 1/3 and p(1) = 2/3.
    """
    model = TrigramModel.count(arrays([[0, 1, 0, 1, 1]]), 2)
    np.testing.assert_allclose(model.probabilities([0, 0, 1], [1, 0, 1], [0, 1, 1]), [1 / 3, 2 / 3, 2 / 3])
    (bits,) = model.heldout_bits(arrays([[1, 0, 1]]))
    assert bits == pytest.approx(-math.log2(1 / 3) - math.log2(2 / 3))


@pytest.mark.parametrize("seed", range(4))
def test_it_agrees_with_the_slow_implementation(seed: int) -> None:
    vocab_size = 7
    train, heldout = random_streams(seed, (60, 2, 0, 35), vocab_size), random_streams(seed + 50, (20, 2, 3), vocab_size)
    slow, model = SlowTrigrams(train, vocab_size), TrigramModel.count(arrays(train), vocab_size)
    grams = np.array(list(np.ndindex(vocab_size, vocab_size, vocab_size)))
    expected = [slow.probability(*map(int, gram)) for gram in grams]
    np.testing.assert_allclose(model.probabilities(*grams.T), expected, rtol=1e-12)
    np.testing.assert_allclose(
        model.heldout_bits(arrays(heldout)), [slow.bits(stream) for stream in heldout], rtol=1e-12
    )


@pytest.mark.parametrize("train", [[[0, 1, 0, 1, 1]], [[3] * 30], random_streams(1, (300, 40), 9), [[0, 1, 2] * 20]])
def test_probabilities_sum_to_one_after_seen_and_unseen_contexts(train: list[list[int]]) -> None:
    model = TrigramModel.count(arrays(train), 9)
    contexts = np.array(list(np.ndindex(9, 9)))
    table = model.probabilities(contexts[:, :1], contexts[:, 1:], np.arange(9)[None, :])
    assert table.shape == (81, 9) and table.min() > 0
    np.testing.assert_allclose(table.sum(1), 1.0, rtol=1e-12)


def test_bytes_never_seen_cost_a_finite_number_of_bits() -> None:
    model = TrigramModel.count([ByteTokenizer().encode("the cat sat on the mat")], 257)
    (bits,) = model.heldout_bits([np.array([200, 201, 202, 256], dtype=np.uint16)])
    assert 24 < bits < 60


def test_text_like_the_training_text_costs_less() -> None:
    numbers = np.random.default_rng(0)
    words = numbers.choice(["the ", "cat ", "sat ", "on ", "mat "], 2000)
    encode = ByteTokenizer().encode
    model = TrigramModel.count([encode("".join(words[:1500]))], 257)
    like, unlike = model.heldout_bits([encode("".join(words[1500:])), encode("zebra xylophone quiz")])
    assert like / len("".join(words[1500:])) < 1.0 < 6.0 < unlike / len("zebra xylophone quiz")


def test_bits_per_byte_counts_what_held_out_batches_predict() -> None:
    streams = arrays(random_streams(3, (200, 120), 257))
    heldout = arrays(random_streams(4, (50, 31), 257))
    corpus = Corpus(("a", "b"), tuple(streams), tuple(heldout), (1.0, 1.0), (199, 119), (48, 30), ByteTokenizer())
    model = TrigramModel.count(corpus.train, 257)
    overall, by_domain = model.bits_per_byte(corpus)
    slow = SlowTrigrams([stream.tolist() for stream in streams], 257)
    labels = torch.cat([batch.labels.flatten() for batch in heldout_batches(corpus, 8, 0, 1, 4)])
    assert int((labels >= 0).sum()) == sum(len(stream) - 1 for stream in heldout)
    counted = [slow.bits(stream.tolist()) for stream in heldout]
    assert by_domain == pytest.approx({"a": counted[0] / 48, "b": counted[1] / 30})
    assert overall == pytest.approx(sum(counted) / 78)


def test_too_little_text_and_foreign_ids_are_refused() -> None:
    with pytest.raises(DataError, match="2 streams hold no trigram"):
        TrigramModel.count(arrays([[1, 2], []]), 5)
    with pytest.raises(DataError, match="token id 5 is outside a vocabulary of 5"):
        TrigramModel.count(arrays([[1, 2, 5]]), 5)
    with pytest.raises(DataError, match="token id 9"):
        TrigramModel.count(arrays([[1, 2, 3]]), 5).heldout_bits(arrays([[9, 1, 2]]))
