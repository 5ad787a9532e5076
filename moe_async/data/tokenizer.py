"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moe_async.errors import DataError

Tokens = npt.NDArray[np.uint16]
"""A stream of token ids, uint16 [length]."""


class Tokenizer(Protocol):
    """What the corpus needs of a tokenizer; ids fit in uint16."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end of document included."""

    @property
    def end_of_document(self) -> int:
        """The id that follows each document."""

    def encode(self, text: bytes | str) -> Tokens:
        """Token ids of a text, uint16 [tokens], without the end of document."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 is the end of a document.

    One token is one byte, so nats per token and bits per byte differ by a constant factor (and by the ends of
    documents), and any text can be encoded.
    """

    vocab_size: int = 257
    end_of_document: int = 256

    def encode(self, text: bytes | str) -> Tokens:
        """Token ids of a text, uint16 [bytes], without the end of document; a str is encoded as UTF-8."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids [tokens] (an array, or any integers).

        The end of document renders as nothing, and bytes that are not UTF-8 as U+FFFD, because a sample of a model
        may stop inside a character. Raises DataError for an id outside the vocabulary.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64).reshape(-1)
        outside = (array < 0) | (array >= self.vocab_size)
        if outside.any():
            raise DataError(
                f"token id {array[outside][0]} is outside the byte vocabulary; ids run from 0 to "
                f"{self.vocab_size - 1}. Decode with the tokenizer that the ids came from."
            )
        data: bytes = array[array != self.end_of_document].astype(np.uint8).tobytes()
        return data.decode("utf-8", errors="replace")


def make_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names. Raises DataError for a name that is not known."""
    if name == "bytes":
        return ByteTokenizer()
    raise DataError(f"data.tokenizer is {name!r}; the only tokenizer is 'bytes'. Use tokenizer: bytes.")
