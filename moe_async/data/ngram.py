"""A trigram model: what the same held-out text costs without any network.

The yardstick for a language model that has trained for a minute. A, B, C are the token before the last, the last token
and the token to predict; V is the vocabulary size.

Interpolated Kneser-Ney smoothing with one absolute discount D per order. n counts trigrams, N counts *kinds*: N(. b c)
is the number of different tokens seen before the pair (b, c), and a dot further on sums or counts likewise.

    p(c | a b) = (n(abc) - D3)+ / n(ab.)   +  D3 * kinds of c after ab  / n(ab.)   *  p(c | b)
    p(c | b)   = (N(.bc) - D2)+ / N(.b.)   +  D2 * kinds of c after b   / N(.b.)   *  p(c)
    p(c)       = (N(.c)  - D1)+ / N(..)    +  D1 * kinds of c           / N(..)    *  1 / V

where (x)+ = max(x, 0), N(.b.) and N(..) sum over c, and N(.c) is the number of different tokens before c. A context
never seen hands all its probability to the next line. D = n1 / (n1 + 2 n2), with n1 and n2 the numbers of entries of
the order's table that are 1 and 2.

Reference: R. Kneser and H. Ney, "Improved backing-off for m-gram language modeling", ICASSP 1995; the interpolated
form as in S. F. Chen and J. Goodman, "An empirical study of smoothing techniques for language modeling", 1999.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_async.data.corpus import Corpus
from moe_async.errors import DataError

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class _Order:
    """One line of the formula: sorted keys (context * V + c), their counts, and sums and kinds by context.

    keys int64 [kinds], counts int64 [kinds], sums and kinds int64 [number of contexts].
    """

    keys: _Integers
    counts: _Integers
    sums: _Integers
    kinds: _Integers
    discount: float

    def interpolate(self, context: _Integers, token: _Integers, vocab_size: int, lower: _Floats) -> _Floats:
        """The probability of `token` after `context`, given that of the shorter context; all [n]."""
        key = context * vocab_size + token
        at = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        count = np.where(self.keys[at] == key, self.counts[at], 0)
        total = self.sums[context]
        seen = np.maximum(count - self.discount, 0.0) + self.discount * self.kinds[context] * lower
        return np.where(total > 0, seen / np.maximum(total, 1), lower)


class TrigramModel:
    """Interpolated Kneser-Ney over token ids; made by `count`."""

    def __init__(self, orders: tuple[_Order, _Order, _Order], vocab_size: int) -> None:
        """Hold the tables of one, two and three tokens, in that order."""
        self._orders = orders
        self.vocab_size = vocab_size

    @classmethod
    def count(cls, streams: Sequence[npt.NDArray[np.uint16]], vocab_size: int) -> TrigramModel:
        """Count the trigrams of streams, integers [tokens] each; none spans two streams.

        Needs V^2 counters, so it is for vocabularies of some thousand tokens. Raises DataError without a trigram, or
        with an id that is not below `vocab_size`.
        """
        keys = np.concatenate([np.empty(0, dtype=np.int64), *(_trigram_keys(stream, vocab_size) for stream in streams)])
        if not len(keys):
            raise DataError(f"{len(streams)} streams hold no trigram; the trigram model needs more text to count.")
        keys.sort()
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        counts = np.diff(first, append=len(keys))
        three = _order(keys[first], counts, vocab_size, num_contexts=vocab_size**2)
        two = _order(*_kinds(three.keys % vocab_size**2, vocab_size**2), vocab_size, num_contexts=vocab_size)
        one = _order(*_kinds(two.keys % vocab_size, vocab_size), vocab_size, num_contexts=1)
        return cls((one, two, three), vocab_size)

    def probabilities(self, first: npt.ArrayLike, second: npt.ArrayLike, third: npt.ArrayLike) -> _Floats:
        """p(third | first second) for arrays of ids that broadcast to [n]; float64 [n]."""
        a, b, c = np.broadcast_arrays(*(np.asarray(ids, dtype=np.int64) for ids in (first, second, third)))
        return self._orders[2].interpolate(a * self.vocab_size + b, c, self.vocab_size, self._after_one(b, c))

    def heldout_bits(self, streams: Sequence[npt.NDArray[np.uint16]]) -> tuple[float, ...]:
        """Bits that each stream costs, its first token apart (as in `heldout_batches`).

        The second token has a context of one. Raises DataError for an id outside the vocabulary.
        """
        bits = []
        for stream in streams:
            _check_ids(stream, self.vocab_size)
            ids = stream.astype(np.int64)
            second = self._after_one(ids[:1], ids[1:2])
            rest = self.probabilities(ids[:-2], ids[1:-1], ids[2:])
            bits.append(-float(np.log2(second).sum() + np.log2(rest).sum()))
        return tuple(bits)

    def bits_per_byte(self, corpus: Corpus) -> tuple[float, dict[str, float]]:
        """Bits per byte of the held-out text of a corpus: over all of it, and by domain.

        The tokens are those that `heldout_batches` predicts, ends of documents included; the bytes are those of text.
        """
        bits = self.heldout_bits(corpus.heldout)
        by_domain = {
            name: cost / size for name, cost, size in zip(corpus.domains, bits, corpus.heldout_bytes, strict=True)
        }
        return sum(bits) / sum(corpus.heldout_bytes), by_domain

    def _after_one(self, context: _Integers, token: _Integers) -> _Floats:
        """p(token | one token before), [n]."""
        one, two, _ = self._orders
        uniform = np.full(token.shape, 1.0 / self.vocab_size)
        unigram = one.interpolate(np.zeros_like(token), token, self.vocab_size, uniform)
        return two.interpolate(context, token, self.vocab_size, unigram)


def _trigram_keys(stream: npt.NDArray[np.uint16], vocab_size: int) -> _Integers:
    _check_ids(stream, vocab_size)
    ids = stream.astype(np.int64)
    return (ids[:-2] * vocab_size + ids[1:-1]) * vocab_size + ids[2:]


def _check_ids(stream: npt.NDArray[np.uint16], vocab_size: int) -> None:
    if len(stream) and int(stream.max()) >= vocab_size:
        raise DataError(
            f"token id {int(stream.max())} is outside a vocabulary of {vocab_size}; pass the vocab_size of the "
            "tokenizer that made the streams."
        )


def _kinds(keys: _Integers, num_keys: int) -> tuple[_Integers, _Integers]:
    """The different keys, sorted, and how often each stands in `keys`."""
    counts = np.bincount(keys, minlength=num_keys)
    present = np.flatnonzero(counts)
    return present, counts[present]


def _order(keys: _Integers, counts: _Integers, vocab_size: int, num_contexts: int) -> _Order:
    contexts = keys // vocab_size
    kinds = np.bincount(contexts, minlength=num_contexts)
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(kinds)])
    sums = np.diff(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])[ends])
    return _Order(keys, counts, sums, kinds, _discount(counts))


def _discount(counts: _Integers) -> float:
    """n1 / (n1 + 2 n2); a half where no count is 1 or 2, as in a tiny table of frequent tokens."""
    ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
    return ones / (ones + 2 * twos) if ones else 0.5
