"""Where text is cut."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest

from moe_async.data.documents import Document, cap_documents, cut_pieces


def pieces(text: bytes, document_bytes: int) -> list[bytes]:
    return list(cut_pieces(io.BytesIO(text), document_bytes))


def test_a_short_text_is_one_piece() -> None:
    assert pieces(b"one\n\ntwo", 8) == [b"one\n\ntwo"]
    assert pieces(b"", 8) == []


def test_a_piece_ends_at_the_first_blank_line_after_its_size() -> None:
    assert pieces(b"a\n\nbbbb\nc\n\nd\n\ne", 7) == [b"a\n\nbbbb\nc\n\n", b"d\n\ne"]


def test_lines_of_spaces_and_carriage_returns_are_blank() -> None:
    assert pieces(b"aaaa\r\n \t\r\nbbbb", 5) == [b"aaaa\r\n \t\r\n", b"bbbb"]


def test_without_a_blank_line_the_first_newline_ends_a_piece() -> None:
    assert pieces(b"aaaaaa\nbbbb\ncc", 5) == [b"aaaaaa\n", b"bbbb\ncc"[:5], b"cc"]


def test_without_a_newline_the_cut_falls_between_characters() -> None:
    assert pieces("ééééé".encode(), 3) == ["é".encode()] * 4 + ["é".encode()]
    assert pieces("éé".encode(), 1) == [b"\xc3", b"\xa9", b"\xc3", b"\xa9"]


@pytest.mark.parametrize("document_bytes", [1, 2, 7, 64, 1000])
def test_pieces_join_to_the_text_and_are_bounded(document_bytes: int) -> None:
    letters = np.random.default_rng(document_bytes).choice(list("abé\n "), 3000, p=[0.3, 0.3, 0.2, 0.1, 0.1])
    text = "".join(letters).encode()
    cut = pieces(text, document_bytes)
    assert b"".join(cut) == text
    assert max(map(len, cut)) <= 2 * document_bytes
    # An é is two bytes, so a piece of one byte cannot hold it.
    if document_bytes > 1:
        assert all(piece.decode() for piece in cut)


def documents(*texts: str) -> list[Document]:
    return [Document(text.encode(), "d", "o") for text in texts]


def test_the_cap_cuts_the_last_document_and_reads_no_further() -> None:
    source = iter(documents("aaaa", "bbbb", "cccc"))
    assert [document.text for document in cap_documents(source, 6)] == [b"aaaa", b"bb"]
    assert next(source).text == b"cccc"


def test_the_cap_keeps_characters_whole() -> None:
    assert [document.text for document in cap_documents(documents("aé", "b"), 2)] == [b"a"]
    assert list(cap_documents(documents("é"), 1)) == []


def test_the_cap_stops_at_a_document_that_fits_exactly() -> None:
    endless = (document for _ in itertools.count() for document in documents("abc"))
    assert sum(len(document.text) for document in cap_documents(endless, 9)) == 9
    assert list(cap_documents(documents("abc"), 0)) == []
    assert len(list(cap_documents(documents("abc", "d"), None))) == 2
