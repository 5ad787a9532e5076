"""A document, and the two ways in which text is made shorter: cut into pieces, and capped.

Sizes are bytes of UTF-8. No cut falls inside a character.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO

_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_LONGEST_CHARACTER = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One text that is held out, or trained on, as a whole.

    `text` is UTF-8, `domain` the name its figures are reported under, `origin` where it was read (a path, for JSON
    Lines with the line number), for people only.
    """

    text: bytes
    domain: str
    origin: str


def cut_pieces(stream: BinaryIO, document_bytes: int) -> Iterator[bytes]:
    """Yield the content of `stream` in pieces of about `document_bytes` bytes; joined, they are the content again.

    A piece ends at the first blank line after `document_bytes`, looked for in the `document_bytes` bytes that follow;
    else at the first newline there, else at `document_bytes` itself. So a piece is at most twice `document_bytes`
    long, and no more than that is in memory. `stream` must be a buffered reader: a short read means its end.
    """
    buffer = b""
    while True:
        buffer += stream.read(2 * document_bytes - len(buffer))
        if len(buffer) <= document_bytes:
            break
        at = _cut_at(buffer, document_bytes)
        yield buffer[:at]
        buffer = buffer[at:]
    if buffer:
        yield buffer


def cap_documents(documents: Iterable[Document], max_bytes: int | None) -> Iterator[Document]:
    """Yield documents until they add up to `max_bytes` (None: all); the last one is cut to fit.

    Nothing is read from `documents` past the one that reaches the cap. The sum falls short of the cap by at most
    three bytes, where the cut would split a character.
    """
    if max_bytes is None:
        yield from documents
        return
    room = max_bytes
    if room <= 0:
        return
    for document in documents:
        if len(document.text) >= room:
            text = document.text[: _character_start(document.text, room)]
            if text:
                yield dataclasses.replace(document, text=text)
            return
        room -= len(document.text)
        yield document


def _cut_at(buffer: bytes, document_bytes: int) -> int:
    """The length of the first piece of a buffer longer than `document_bytes`, at least 1."""
    blank = _BLANK_LINE.search(buffer, max(0, document_bytes - 2))
    if blank is not None:
        return blank.end()
    newline = buffer.find(b"\n", document_bytes - 1)
    if newline >= 0:
        return newline + 1
    return _character_start(buffer, document_bytes) or document_bytes


def _character_start(text: bytes, at: int) -> int:
    """The last character boundary at or before `at`; `at` itself where the bytes are not UTF-8."""
    if at >= len(text):
        return len(text)
    for start in range(at, max(-1, at - _LONGEST_CHARACTER), -1):
        if text[start] & 0b1100_0000 != 0b1000_0000:
            return start
    return at
