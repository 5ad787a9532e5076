"""The training sequence, its place, and the held-out set."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch

from moe_async.data import IGNORED_LABEL, Batch, ByteTokenizer, Corpus, TrainStream, heldout_batches
from moe_async.errors import DataError


def corpus_of(
    *streams: np.ndarray, weights: tuple[float, ...] | None = None, heldout: tuple[list[int], ...] = ()
) -> Corpus:
    return Corpus(
        domains=tuple("abcdefgh"[: len(streams)]),
        train=tuple(stream.astype(np.uint16) for stream in streams),
        heldout=tuple(np.asarray(stream, dtype=np.uint16) for stream in heldout or streams),
        weights=weights or (1.0,) * len(streams),
        train_bytes=tuple(map(len, streams)),
        heldout_bytes=tuple(map(len, streams)),
        tokenizer=ByteTokenizer(),
    )


@pytest.fixture
def corpus() -> Corpus:
    """Three domains of 200, 90 and 61 random tokens, weights 1 : 2 : 1."""
    numbers = np.random.default_rng(7)
    return corpus_of(*(numbers.integers(0, 257, size) for size in (200, 90, 61)), weights=(1.0, 2.0, 1.0))


def rows(batches: list[Batch]) -> list[tuple[int, ...]]:
    """Each window as its domain, its tokens and its last label."""
    return [
        (int(domain), *tokens.tolist(), int(labels[-1]))
        for batch in batches
        for domain, tokens, labels in zip(batch.domains, batch.tokens, batch.labels, strict=True)
    ]


def steps(stream: TrainStream, count: int, global_batch: int = 8) -> list[list[tuple[int, ...]]]:
    return [rows(stream.next_step(global_batch, 0, 1, 1)) for _ in range(count)]


def test_a_batch_is_int64_and_labels_are_the_next_tokens() -> None:
    corpus = corpus_of(np.arange(100))
    (batch,) = TrainStream(corpus, 10, seed=0).next_step(4, 0, 1, 1)
    assert batch.tokens.shape == batch.labels.shape == (4, 10) and batch.domains.shape == (4,)
    assert batch.tokens.dtype == batch.labels.dtype == batch.domains.dtype == torch.int64
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    torch.testing.assert_close(batch.labels, (batch.tokens + 1) % 100)


def test_domains_follow_the_weights_with_ties_to_the_first() -> None:
    stream = TrainStream(corpus_of(np.arange(50), np.arange(50), np.arange(50), weights=(1.0, 2.0, 1.0)), 8, seed=0)
    (batch,) = stream.next_step(8, 0, 1, 1)
    # Behind by weight * n - 4 * drawn: (1 2 1) takes 1, (2 0 2) takes 0, (-1 2 3) takes 2, (0 4 0) takes 1.
    assert batch.domains.tolist() == [1, 0, 2, 1, 1, 0, 2, 1]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.3, 0.1, 0.6), (5.0, 1.0, 1.0, 0.25)])
def test_no_domain_strays_from_its_share(weights: tuple[float, ...]) -> None:
    stream = TrainStream(corpus_of(*(np.arange(40) for _ in weights), weights=weights), 8, seed=0)
    drawn = np.zeros(len(weights))
    for number in range(1, 200):
        drawn[int(stream.next_step(1, 0, 1, 1)[0].domains)] += 1
        due = number * np.array(weights) / sum(weights)
        assert np.all(drawn - due < 1 + 1e-9) and np.all(due - drawn < len(weights) - 1 + 1e-9)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 1.0), (3.0, 7.0, 5.0, 1.0), (0.5, 0.25), (2.0, 0.3)])
@pytest.mark.parametrize(("before", "windows"), [(0, 0), (0, 3), (5, 16), (7, 103), (3, 64)])
def test_skipping_ends_where_drawing_does(weights: tuple[float, ...], before: int, windows: int) -> None:
    corpus = corpus_of(*(np.arange(40) for _ in weights), weights=weights)
    skipped, drawn = TrainStream(corpus, 8, seed=0), TrainStream(corpus, 8, seed=0)
    for stream in (skipped, drawn):
        steps(stream, before, 1)
    skipped.skip(windows)
    steps(drawn, windows, 1)
    assert skipped.state_dict() == drawn.state_dict()
    assert steps(skipped, 3) == steps(drawn, 3)


@pytest.mark.parametrize("length", [9, 10, 16, 17, 24, 100, 103])
def test_an_epoch_has_windows_that_do_not_overlap_and_leave_little_out(length: int) -> None:
    stream = TrainStream(corpus_of(np.arange(length)), 8, seed=3)
    blocks = length // 8
    epochs = [steps(stream, 1, blocks)[0] for _ in range(6)]
    for epoch in epochs:
        # Tokens are positions here, so a window is a run of them around the end of the stream.
        assert all(row[i + 1] == (row[i] + 1) % length for row in epoch for i in range(1, 9))
        positions = [token for row in epoch for token in row[1:-1]]
        assert len(set(positions)) == len(positions) == blocks * 8 > length - 8
    assert len({tuple(epoch) for epoch in epochs}) > 1
    if length == 103:
        assert len({min(row[1] % 8 for row in epoch) for epoch in epochs}) > 1
        assert len({tuple(sorted(epoch)) for epoch in epochs}) > 3


def test_seeds_and_domains_have_orders_of_their_own() -> None:
    corpus = corpus_of(np.arange(200), np.arange(200))
    sequences = [tuple(steps(TrainStream(corpus, 8, seed), 1, 20)[0]) for seed in (0, 0, 1, -1, 2**40)]
    assert sequences[0] == sequences[1]
    assert len(set(sequences)) == 4
    assert [row[1:] for row in sequences[0] if row[0] == 0] != [row[1:] for row in sequences[0] if row[0] == 1]


def test_the_sequence_is_the_same_on_every_machine_and_version() -> None:
    (batch,) = TrainStream(corpus_of(np.arange(40), np.arange(64)), 8, seed=1).next_step(6, 0, 1, 1)
    assert batch.domains.tolist() == [0, 1, 0, 1, 0, 1]
    # A golden: a change here means that no saved place can be resumed.
    assert batch.tokens[:, 0].tolist() == [15, 63, 31, 7, 39, 47]


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (4, 1), (2, 2), (1, 8), (8, 1), (2, 4)])
def test_every_cut_of_a_step_holds_the_same_windows_in_the_same_order(
    corpus: Corpus, world_size: int, accumulation: int
) -> None:
    whole = TrainStream(corpus, 8, seed=1)
    ranks = [TrainStream(corpus, 8, seed=1) for _ in range(world_size)]
    for _ in range(12):
        expected = rows(whole.next_step(16, 0, 1, 1))
        parts = [stream.next_step(16, rank, world_size, accumulation) for rank, stream in enumerate(ranks)]
        assert {len(part) for part in parts} == {accumulation}
        # Micro-batch by micro-batch, and in each one rank by rank.
        assert rows([part[a] for a in range(accumulation) for part in parts]) == expected
        assert len({json.dumps(stream.state_dict()) for stream in (whole, *ranks)}) == 1


def test_the_size_of_a_step_does_not_change_the_sequence(corpus: Corpus) -> None:
    by_six, by_nine = steps(TrainStream(corpus, 8, 1), 6, 6), steps(TrainStream(corpus, 8, 1), 4, 9)
    assert list(itertools.chain(*by_six)) == list(itertools.chain(*by_nine))


@pytest.mark.parametrize("taken", [0, 1, 5, 30])
def test_resuming_gives_the_steps_that_would_have_followed(corpus: Corpus, taken: int) -> None:
    whole = TrainStream(corpus, 8, seed=1)
    steps(whole, taken)
    state = json.loads(json.dumps(whole.state_dict()))
    assert state["total"] == whole.windows_drawn == 8 * taken == sum(state["drawn"])
    expected = steps(whole, 30)
    fresh, used = TrainStream(corpus, 8, seed=1), TrainStream(corpus, 8, seed=1)
    steps(used, 7)
    for stream in (fresh, used):
        stream.load_state_dict(state)
        assert steps(stream, 30) == expected


def test_a_state_of_another_sequence_is_refused(corpus: Corpus) -> None:
    state = TrainStream(corpus, 8, seed=1).state_dict()
    other = corpus_of(*(stream[:-1] for stream in corpus.train), weights=corpus.weights)
    with pytest.raises(DataError, match=r"the text has changed since .* Give the run the text it had"):
        TrainStream(other, 8, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match=r"data.seed is 2, .* saved with 1.*Resume with data.seed=1"):
        TrainStream(corpus, 8, seed=2).load_state_dict(state)
    with pytest.raises(DataError, match=r"data.seq_len is 9, .* saved with 8"):
        TrainStream(corpus, 9, seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    "damage", [{"drawn": [1, 1]}, {"drawn": [2, -1, 0], "total": 1}, {"total": 3}, {"drawn": None}]
)
def test_a_damaged_state_is_refused_and_changes_nothing(corpus: Corpus, damage: dict[str, object]) -> None:
    stream = TrainStream(corpus, 8, seed=1)
    before = stream.state_dict()
    with pytest.raises(DataError, match="damaged"):
        stream.load_state_dict(before | damage)
    with pytest.raises(DataError, match="damaged"):
        stream.load_state_dict({key: value for key, value in before.items() if key != "total"})
    assert stream.state_dict() == before


@pytest.mark.parametrize("given", [(10, 0, 4, 1), (12, 0, 2, 5), (0, 0, 1, 1)])
def test_a_batch_that_does_not_divide_is_refused(corpus: Corpus, given: tuple[int, int, int, int]) -> None:
    stream = TrainStream(corpus, 8, seed=1)
    with pytest.raises(DataError, match=rf"global batch is {given[0]} .* {given[2]} ranks times {given[3]} micro"):
        stream.next_step(*given)
    assert stream.windows_drawn == 0


def test_a_domain_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match="domain 'b' has 8 tokens to train on, less than one window of 9"):
        TrainStream(corpus_of(np.arange(9), np.arange(8)), 8, seed=0)


def test_held_out_windows_by_hand() -> None:
    corpus = corpus_of(np.arange(9), np.arange(9), heldout=([1, 2, 3, 4, 5, 6], [7, 8, 9]))
    first, second = heldout_batches(corpus, 3, rank=0, world_size=1, batch_size=2)
    none = IGNORED_LABEL
    assert first.tokens.tolist() == [[1, 2, 3], [4, 5, 0]] and first.labels.tolist() == [[2, 3, 4], [5, 6, none]]
    assert second.tokens.tolist() == [[7, 8, 0], [0, 0, 0]]
    assert second.labels.tolist() == [[8, 9, none], [none] * 3]
    assert first.domains.tolist() == [0, 0] and second.domains.tolist() == [1, 0]


@pytest.mark.parametrize(("world_size", "batch_size", "seq_len"), [(1, 4, 8), (4, 1, 8), (3, 5, 7), (4, 64, 16)])
def test_every_held_out_token_but_the_first_is_a_label_once(world_size: int, batch_size: int, seq_len: int) -> None:
    # Values name the place: no token stands twice in all streams.
    streams = (np.arange(100), np.arange(1000, 1041), np.arange(2000, 2009))
    corpus = corpus_of(*streams)
    ranks = [heldout_batches(corpus, seq_len, rank, world_size, batch_size) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    predicted: Counter[tuple[int, int]] = Counter()
    for batch in itertools.chain(*ranks):
        assert batch.tokens.shape == batch.labels.shape == (batch_size, seq_len)
        assert batch.tokens.dtype == batch.labels.dtype == batch.domains.dtype == torch.int64
        real = batch.labels != IGNORED_LABEL
        torch.testing.assert_close(batch.labels[real], batch.tokens[real] + 1)
        assert int(batch.tokens[~real].sum()) == 0
        domains = batch.domains[:, None].expand_as(real)
        predicted.update(zip(domains[real].tolist(), batch.labels[real].tolist(), strict=True))
    expected = {(domain, int(token)) for domain, stream in enumerate(streams) for token in stream[1:]}
    assert predicted == Counter(expected)


def test_held_out_work_is_dealt_evenly() -> None:
    corpus = corpus_of(np.arange(8 * 9 + 1))
    windows = [
        sum(int((batch.labels != IGNORED_LABEL).any(1).sum()) for batch in heldout_batches(corpus, 8, rank, 4, 2))
        for rank in range(4)
    ]
    assert windows == [3, 2, 2, 2]
