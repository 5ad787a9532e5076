"""Bytes to ids and back."""

from __future__ import annotations

import numpy as np
import pytest

from moe_async.data import ByteTokenizer, make_tokenizer
from moe_async.errors import DataError


def test_ids_are_the_bytes() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("aé")
    assert ids.dtype == np.uint16
    assert ids.tolist() == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


def test_text_survives_the_round_trip() -> None:
    tokenizer = ByteTokenizer()
    text = "".join(map(chr, np.random.default_rng(0).integers(1, 0xD7FF, 500)))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text.encode()).tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.decode(tokenizer.encode("")) == ""


def test_decode_shows_no_end_of_document_and_marks_broken_characters() -> None:
    assert ByteTokenizer().decode([97, 256, 98, 0xC3]) == "ab\ufffd"


@pytest.mark.parametrize("outside", [257, -1])
def test_decode_refuses_ids_outside_the_vocabulary(outside: int) -> None:
    with pytest.raises(DataError, match=f"token id {outside} .* 0 to 256"):
        ByteTokenizer().decode([97, outside])


def test_tokenizers_go_by_name() -> None:
    assert make_tokenizer("bytes").vocab_size == 257
    with pytest.raises(DataError, match=r"data.tokenizer is 'bpe'.*bytes"):
        make_tokenizer("bpe")
