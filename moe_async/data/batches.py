"""Windows of token streams as batches: an endless training sequence, and the held-out set.

B windows of a batch, S tokens of a window (`seq_len`).

The training sequence is one list of windows, defined by the corpus, `seq_len` and the seed. Ranks and accumulation
only deal it out, so a step sees the same windows on any number of ranks, and its place is a few counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_async.data.corpus import Corpus
from moe_async.errors import DataError

IGNORED_LABEL = -100
"""The label where nothing is to be predicted (what torch's cross entropy ignores)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch of one rank.

    Shapes: tokens int64 [B, S]; labels int64 [B, S], the token after each position, or IGNORED_LABEL; domains
    int64 [B], indices into `corpus.domains` (0 for rows that only pad).
    """

    tokens: Tensor
    labels: Tensor
    domains: Tensor


@dataclasses.dataclass(frozen=True)
class _Epoch:
    """One pass over the training stream of a domain: where its grid of windows starts, and the order of them."""

    number: int
    shift: int
    order: npt.NDArray[np.int64]


class TrainStream:
    """The endless training sequence of windows, and this process's place in it.

    * Window n is of the domain that is furthest behind its share: the largest w_d (n + 1) - W c_d, for weights w of
      sum W and c windows drawn so far; ties go to the first domain. So counts follow the weights as closely as
      integers can.
    * In a domain, an epoch cuts the stream into windows of S tokens that do not overlap, from a seeded shift on and
      around its end, and takes them in a seeded order; both are new in each epoch. Fewer than S tokens are left out.

    Orders come from raw bits of PCG64, which numpy promises to keep, so a resumed run may have another numpy.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int) -> None:
        """Start at window 0. Raises DataError when a domain is shorter than a window; any integer is a seed."""
        for name, stream in zip(corpus.domains, corpus.train, strict=True):
            if len(stream) < seq_len + 1:
                raise DataError(
                    f"domain {name!r} has {len(stream)} tokens to train on, less than one window of {seq_len + 1}. "
                    "Give it more text, or lower data.seq_len."
                )
        self._corpus = corpus
        self._seq_len = seq_len
        self._seed = seed
        self._drawn = [0] * len(corpus.domains)
        self._epochs: dict[int, _Epoch] = {}

    @property
    def windows_drawn(self) -> int:
        """Windows taken so far, over all ranks and domains."""
        return sum(self._drawn)

    def next_step(self, global_batch: int, rank: int, world_size: int, accumulation: int) -> list[Batch]:
        """Take the next `global_batch` windows of the sequence and return the part of one rank.

        With micro = global_batch / (world_size * accumulation), row i of micro-batch a on rank r is window
        (a * world_size + r) * micro + i of the step. Call it on every rank with the same numbers; all advance alike.

        Returns `accumulation` batches of micro rows. Raises DataError when `global_batch` does not divide.
        """
        parts = world_size * accumulation
        if global_batch < 1 or global_batch % parts:
            raise DataError(
                f"the global batch is {global_batch} windows, but {world_size} ranks times {accumulation} "
                f"micro-batches must divide it. Use a multiple of {parts}, or other ranks or accumulation."
            )
        micro = global_batch // parts
        drawn = [self._draw() for _ in range(global_batch)]
        starts = [(a * world_size + rank) * micro for a in range(accumulation)]
        return [self._batch(drawn[start : start + micro]) for start in starts]

    def skip(self, windows: int) -> None:
        """Go on by that many windows without reading them."""
        weights = self._corpus.weights
        if all(float(weight).is_integer() for weight in weights):
            # So many windows on as the weights sum up to, each domain has had its weight of them, and what follows is
            # the same: a learner that joins a long run would else count for minutes.
            rounds, windows = divmod(windows, int(sum(weights)))
            self._drawn = [count + rounds * int(weight) for count, weight in zip(self._drawn, weights, strict=True)]
        for _ in range(windows):
            self._draw()

    def state_dict(self) -> dict[str, Any]:
        """The place in the sequence, as JSON-able values; equal on all ranks."""
        return {
            "drawn": list(self._drawn),
            "total": self.windows_drawn,
            "seed": self._seed,
            "seq_len": self._seq_len,
            "fingerprint": self._corpus.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place in `state`; the steps that follow equal those that followed it.

        Raises DataError when it belongs to another sequence (text, seed or seq_len differ) or is damaged.
        """
        if state.keys() != self.state_dict().keys() or not isinstance(state["drawn"], list):
            raise DataError(
                f"the state of the training stream is damaged: it holds {dict(state)}, not the entries "
                f"{', '.join(self.state_dict())}. Resume from another checkpoint."
            )
        if state["fingerprint"] != self._corpus.fingerprint:
            raise DataError(
                "the text has changed since this state was saved (its fingerprint was "
                f"{str(state['fingerprint'])[:12]}, now it is {self._corpus.fingerprint[:12]}): other files, domains, "
                "weights or split, or another version of the packages that the built-in domains read. Give the run "
                "the text it had, or start a new one."
            )
        for key, now in (("seed", self._seed), ("seq_len", self._seq_len)):
            if state[key] != now:
                raise DataError(
                    f"data.{key} is {now}, but this state was saved with {state[key]}, so its place is one in another "
                    f"sequence. Resume with data.{key}={state[key]}."
                )
        drawn = [int(count) for count in state["drawn"]]
        if len(drawn) != len(self._drawn) or min(drawn) < 0 or sum(drawn) != state["total"]:
            raise DataError(
                f"the state of the training stream is damaged: drawn {drawn}, total {state['total']}, for "
                f"{len(self._drawn)} domains. Resume from another checkpoint."
            )
        self._drawn = drawn

    def _draw(self) -> tuple[int, int]:
        """Advance by one window: its domain, and how many that domain gave before."""
        weights, number = self._corpus.weights, self.windows_drawn + 1
        total = sum(weights)
        # Whole numbers for whole weights, so ties are ties; dividing by the total would let rounding decide them.
        behind = [weight * number - total * count for weight, count in zip(weights, self._drawn, strict=True)]
        domain = behind.index(max(behind))
        self._drawn[domain] += 1
        return domain, self._drawn[domain] - 1

    def _batch(self, drawn: list[tuple[int, int]]) -> Batch:
        windows = torch.from_numpy(np.stack([self._window(domain, index) for domain, index in drawn]))
        return Batch(
            tokens=windows[:, :-1].contiguous(),
            labels=windows[:, 1:].contiguous(),
            domains=torch.tensor([domain for domain, _ in drawn], dtype=torch.int64),
        )

    def _window(self, domain: int, index: int) -> npt.NDArray[np.int64]:
        """The `index`-th window that a domain gives, int64 [S + 1]."""
        stream, size = self._corpus.train[domain], self._seq_len
        # A stream of a single window keeps one token back for the last label.
        blocks = max(1, len(stream) // size)
        epoch = self._epoch(domain, index // blocks, blocks)
        start = epoch.shift + int(epoch.order[index % blocks]) * size
        return np.take(stream, np.arange(start, start + size + 1), mode="wrap").astype(np.int64)

    def _epoch(self, domain: int, number: int, blocks: int) -> _Epoch:
        epoch = self._epochs.get(domain)
        if epoch is None or epoch.number != number:
            seeds = np.random.SeedSequence([self._seed % 2**64, domain, number])
            bits = np.random.PCG64(seeds).random_raw(blocks + 1)
            shift = int(bits[0]) % len(self._corpus.train[domain])
            epoch = _Epoch(number, shift, np.argsort(bits[1:], kind="stable"))
            self._epochs[domain] = epoch
        return epoch


def heldout_batches(corpus: Corpus, seq_len: int, rank: int, world_size: int, batch_size: int) -> list[Batch]:
    """The part of one rank of the held-out set, in batches of `batch_size` windows of `seq_len` tokens.

    Over all ranks, every token of each domain's held-out stream but the first is a label exactly once. Windows follow
    one another; they are dealt to ranks in turn. Where text ends, token 0 and IGNORED_LABEL pad. Every rank gets the
    same number of batches of one shape, rows that only pad included, because expert parallelism needs as many forward
    passes on each rank.
    """
    rows = [_heldout_windows(stream, seq_len) for stream in corpus.heldout]
    tokens = np.concatenate([tokens for tokens, _ in rows])
    labels = np.concatenate([labels for _, labels in rows])
    domains = np.repeat(np.arange(len(rows)), [len(tokens) for tokens, _ in rows])
    num_batches = -(-len(tokens) // (world_size * batch_size))
    missing = num_batches * world_size * batch_size - len(tokens)
    tokens = np.pad(tokens, ((0, missing), (0, 0)))[rank::world_size]
    labels = np.pad(labels, ((0, missing), (0, 0)), constant_values=IGNORED_LABEL)[rank::world_size]
    domains = np.pad(domains, (0, missing))[rank::world_size]
    return [
        Batch(*(torch.from_numpy(array[start : start + batch_size].copy()) for array in (tokens, labels, domains)))
        for start in range(0, num_batches * batch_size, batch_size)
    ]


def _heldout_windows(
    stream: npt.NDArray[np.uint16], seq_len: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens and labels of one stream, int64 [windows, S] each, the last window padded."""
    num_labels = max(0, len(stream) - 1)
    padding = -num_labels % seq_len
    tokens = np.pad(stream[:num_labels].astype(np.int64), (0, padding))
    labels = np.pad(stream[1:].astype(np.int64), (0, padding), constant_values=IGNORED_LABEL)
    return tokens.reshape(-1, seq_len), labels.reshape(-1, seq_len)
