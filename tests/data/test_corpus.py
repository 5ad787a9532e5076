"""From sources to token streams: the split, the caps, and what too little text says."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_async.data import ByteTokenizer, Corpus, bits_per_byte, is_held_out, load_corpus
from moe_async.errors import DataError
from moe_async.recipe import DataSection

TOKENIZER = ByteTokenizer()
END = TOKENIZER.end_of_document


def entry(path: Path | str, domain: str | None = None, **fields: Any) -> Any:
    given = {"builtin": None, "field": None, "weight": 1.0, "max_bytes": None, "document_bytes": 16384}
    return SimpleNamespace(**(given | {"path": str(path), "domain": domain or Path(path).stem} | fields))


def section(*source: Any, **fields: Any) -> Any:
    given = {"seq_len": 8, "heldout": 0.5, "heldout_bytes": None, "tokenizer": "bytes", "seed": 0}
    return SimpleNamespace(**(given | {"source": list(source)} | fields))


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def numbered(name: str, count: int) -> list[str]:
    return [f"{name} number {n}" for n in range(count)]


def load(*source: Any, **fields: Any) -> Corpus:
    return load_corpus(section(*source, **fields), TOKENIZER)


def refused(*source: Any, **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(*source, **fields)
    return str(caught.value)


def texts_of(stream: np.ndarray) -> list[str]:
    """The documents of a stream; it must end with the end of document."""
    assert stream.dtype == np.uint16 and stream[-1] == END
    return [TOKENIZER.decode(part[part != END]) for part in np.split(stream, np.flatnonzero(stream == END) + 1)][:-1]


@pytest.fixture
def tales(tmp_path: Path) -> Path:
    return write(tmp_path / "tales.jsonl", numbered("tale", 40))


def test_every_document_is_on_the_side_its_hash_says(tales: Path) -> None:
    corpus = load(entry(tales))
    low = [t for t in numbered("tale", 40) if int(hashlib.sha256(t.encode()).hexdigest()[:16], 16) < 2**63]
    assert corpus.domains == ("tales",)
    assert texts_of(corpus.heldout[0]) == low
    assert texts_of(corpus.train[0]) == [t for t in numbered("tale", 40) if t not in low]
    assert (corpus.train_bytes[0], corpus.heldout_bytes[0]) == (
        sum(len(t) for t in numbered("tale", 40) if t not in low),
        sum(map(len, low)),
    )


def test_the_share_is_met_and_a_larger_one_keeps_what_was_held_out() -> None:
    texts = [text.encode() for text in numbered("text", 4000)]
    few, many = ({t for t in texts if is_held_out(t, share)} for share in (0.05, 0.2))
    assert few < many
    # Four standard deviations of a binomial.
    assert abs(len(few) - 200) < 56 and abs(len(many) - 800) < 102
    assert not any(is_held_out(t, 0.0) for t in texts) and all(is_held_out(t, 1.0) for t in texts)


def test_equal_texts_fall_on_one_side(tmp_path: Path, tales: Path) -> None:
    again = write(tmp_path / "again.jsonl", numbered("tale", 40))
    corpus = load(entry(tales, "a"), entry(again, "b"))
    assert set(texts_of(corpus.train[0])) == set(texts_of(corpus.train[1]))
    assert set(texts_of(corpus.train[0])).isdisjoint(texts_of(corpus.heldout[1]))


def test_entries_of_one_domain_are_joined_and_their_weights_added(tmp_path: Path, tales: Path) -> None:
    songs, more = (write(tmp_path / f"{name}.jsonl", numbered(name, 30)) for name in ("songs", "more"))
    corpus = load(entry(tales, "t", weight=1.5), entry(songs, "s", weight=1.0), entry(more, "t", weight=2.0))
    assert corpus.domains == ("t", "s")
    assert corpus.weights == (3.5, 1.0)
    assert [text.split()[0] for text in texts_of(corpus.train[0])] == sorted(
        (text.split()[0] for text in texts_of(corpus.train[0])), reverse=True
    )
    assert {text.split()[0] for text in texts_of(corpus.train[0])} == {"tale", "more"}


def test_the_cap_on_held_out_text_is_exact_and_moves_nothing_into_training(tales: Path) -> None:
    whole, capped = load(entry(tales)), load(entry(tales), heldout_bytes=50)
    assert capped.heldout_bytes == (50,)
    assert "".join(texts_of(capped.heldout[0])) == "".join(texts_of(whole.heldout[0]))[:50]
    np.testing.assert_array_equal(capped.train[0], whole.train[0])
    assert load(entry(tales), heldout_bytes=10**9).heldout_bytes == whole.heldout_bytes


def test_the_fingerprint_tells_every_change(tmp_path: Path, tales: Path) -> None:
    given = load(entry(tales)).fingerprint
    assert load(entry(tales), seed=5).fingerprint == given
    others = [
        load(entry(tales, "named")).fingerprint,
        load(entry(tales, weight=2.0)).fingerprint,
        load(entry(tales), heldout=0.4).fingerprint,
        load(entry(tales), heldout_bytes=60).fingerprint,
        load(entry(write(tales, [*numbered("tale", 39), "tale number 40"]))).fingerprint,
    ]
    assert len({given, *others}) == 6
    assert len(given) == 64


def test_a_corpus_cannot_be_changed(tales: Path) -> None:
    corpus = load(entry(tales))
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0][0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        corpus.weights = (2.0,)  # type: ignore[misc]


def test_the_section_of_a_recipe_is_taken_as_it_is(tales: Path) -> None:
    data = DataSection.model_validate({"source": {"path": str(tales), "field": "text"}, "seq_len": 8, "heldout": 0.5})
    assert load_corpus(data, TOKENIZER).fingerprint == load(entry(tales)).fingerprint


def test_a_source_without_text_is_refused(tmp_path: Path, tales: Path) -> None:
    (tmp_path / "blank.txt").write_text("\n\n")
    message = refused(entry(tales), entry(tmp_path / "blank.txt"))
    assert "entry 1" in message and "blank.txt" in message and "no text" in message
    assert "data.source is empty" in refused()


def test_a_domain_too_short_to_train_on_is_named(tmp_path: Path, tales: Path) -> None:
    tiny = write(tmp_path / "tiny.jsonl", numbered("tale", 3))
    message = refused(entry(tales), entry(tiny), seq_len=60)
    for part in ("domain 'tiny'", "tokens to train on", "one window of 61", "data.seq_len"):
        assert part in message


def test_a_held_out_set_too_small_says_what_to_change(tales: Path) -> None:
    for fields in ({"heldout": 0.0}, {"heldout_bytes": 5}):
        message = refused(entry(tales), **fields)
        for part in ("held-out set is too small", "9 tokens", "tales: ", "of 40 documents", "Raise data.heldout"):
            assert part in message
    assert "0 of 40 documents, 0 tokens" in refused(entry(tales), heldout=0.0)
    assert "data.heldout_bytes (now 5)" in refused(entry(tales), heldout_bytes=5)
    assert "document_bytes" in refused(entry(tales), heldout=0.0)


def test_a_domain_whose_held_out_part_is_too_small_is_named(tmp_path: Path, tales: Path) -> None:
    trained = [text for text in numbered("song", 30) if not is_held_out(text.encode(), 0.5)]
    message = refused(entry(tales), entry(write(tmp_path / "songs.jsonl", trained)))
    assert "held-out set of domain 'songs' is too small" in message
    assert f"songs: 0 of {len(trained)} documents, 0 tokens" in message and "its own figure" in message


def test_bits_per_byte_converts_nats() -> None:
    assert bits_per_byte(math.log(2.0) * 24, 3) == pytest.approx(8.0)
    assert bits_per_byte(1000 * math.log(256), 1000) == pytest.approx(8.0)
    with pytest.raises(DataError, match="0 bytes"):
        bits_per_byte(1.0, 0)
