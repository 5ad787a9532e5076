"""Documents into token streams: one for training and one held out, for each domain."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from moe_async.data.documents import Document, cap_documents
from moe_async.data.sources import read_documents
from moe_async.data.tokenizer import Tokenizer, Tokens
from moe_async.errors import DataError

if TYPE_CHECKING:
    from moe_async.recipe import DataSection


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The text of a run, as tokens. All tuples run over domains, in the order of their first appearance.

    Attributes:
        domains: their names.
        train: training streams, uint16 [tokens], made read-only: documents as read, each with its end of document.
        heldout: held-out streams, the same.
        weights: the share of training windows a domain gets, relative to the sum.
        train_bytes, heldout_bytes: bytes of text in the streams; ends of documents do not count.
        tokenizer: what made the streams.
        fingerprint: sha256 (hex) over everything above: equal where and only where the text, the domains and their
            weights are.
    """

    domains: tuple[str, ...]
    train: tuple[Tokens, ...]
    heldout: tuple[Tokens, ...]
    weights: tuple[float, ...]
    train_bytes: tuple[int, ...]
    heldout_bytes: tuple[int, ...]
    tokenizer: Tokenizer
    fingerprint: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(repr((self.domains, self.weights, self.tokenizer.vocab_size)).encode())
        for stream in (*self.train, *self.heldout):
            stream.flags.writeable = False
            digest.update(len(stream).to_bytes(8, "little"))
            digest.update(stream.astype("<u2").tobytes())
        object.__setattr__(self, "fingerprint", digest.hexdigest())


@dataclasses.dataclass
class _DomainText:
    """What is gathered of one domain while the sources are read."""

    weight: float = 0.0
    train: list[Document] = dataclasses.field(default_factory=list)
    heldout: list[Document] = dataclasses.field(default_factory=list)


def load_corpus(section: DataSection, tokenizer: Tokenizer) -> Corpus:
    """Read all sources of a recipe's `data` section and split them by `is_held_out`.

    Entries of one domain are joined and their weights added. Of the held-out documents of a domain the first are used
    until their text reaches `section.heldout_bytes`; the last one is cut to fit. What is beyond is not used at all,
    never trained on.

    Raises DataError when a source cannot be read or is empty, and when a domain has less than one window of
    `section.seq_len` + 1 tokens to train on, or held out (its own figures would be missing).
    """
    texts: dict[str, _DomainText] = {}
    for number, entry in enumerate(section.source):
        text = texts.setdefault(entry.domain, _DomainText())
        text.weight += entry.weight
        before = len(text.train) + len(text.heldout)
        for document in read_documents(entry):
            (text.heldout if is_held_out(document.text, section.heldout) else text.train).append(document)
        if len(text.train) + len(text.heldout) == before:
            raise DataError(
                f"data.source entry {number} ({entry.builtin or entry.path}) holds no text; its files are empty or "
                "blank. Remove the entry, or give other files."
            )
    if not texts:
        raise DataError(
            "data.source is empty, so there is no text to train on. Add an entry such as {builtin: python}."
        )
    corpus = _assemble(texts, section.heldout_bytes, tokenizer)
    _check_enough(corpus, texts, section)
    return corpus


def whole_corpus(section: DataSection, tokenizer: Tokenizer) -> Corpus:
    """All text of a recipe's `data` section as held-out text, nothing to train on: for looking at a model.

    Of each domain the first documents are taken until their text reaches `section.heldout_bytes`.

    Raises DataError when a source cannot be read, or a domain has fewer than two tokens.
    """
    texts: dict[str, _DomainText] = {}
    for entry in section.source:
        text = texts.setdefault(entry.domain, _DomainText())
        text.weight += entry.weight
        text.heldout += read_documents(entry)
    corpus = _assemble(texts, section.heldout_bytes, tokenizer)
    for name, stream in zip(corpus.domains, corpus.heldout, strict=True):
        if len(stream) < 2:
            raise DataError(f"domain {name!r} has {len(stream)} tokens of text; give it files that are not empty.")
    return corpus


def is_held_out(text: bytes, share: float) -> bool:
    """Whether a document is held out: its sha256, as a number in [0, 1), is below `share`.

    It depends on the text alone. So equal texts fall on one side wherever they are read, a run with another seed,
    sources or order holds out the same documents, and raising the share keeps those already held out.
    """
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64 < share


def bits_per_byte(nll_nats_sum: float, num_bytes: int) -> float:
    """Bits per byte of text, from negative log-likelihoods summed over tokens (nats).

    Raises DataError when there are no bytes.
    """
    if num_bytes <= 0:
        raise DataError(f"bits per byte of {num_bytes} bytes of text; count the bytes of the text that was predicted.")
    return nll_nats_sum / math.log(2.0) / num_bytes


def _assemble(texts: dict[str, _DomainText], heldout_cap: int | None, tokenizer: Tokenizer) -> Corpus:
    train = [_stream(text.train, tokenizer) for text in texts.values()]
    heldout = [_stream(cap_documents(text.heldout, heldout_cap), tokenizer) for text in texts.values()]
    return Corpus(
        domains=tuple(texts),
        train=tuple(stream for stream, _ in train),
        heldout=tuple(stream for stream, _ in heldout),
        weights=tuple(float(text.weight) for text in texts.values()),
        train_bytes=tuple(size for _, size in train),
        heldout_bytes=tuple(size for _, size in heldout),
        tokenizer=tokenizer,
    )


def _stream(documents: Iterable[Document], tokenizer: Tokenizer) -> tuple[Tokens, int]:
    """The tokens of documents, each followed by the end of document, and the bytes of their text."""
    end = np.array([tokenizer.end_of_document], dtype=np.uint16)
    parts = [np.empty(0, dtype=np.uint16)]
    num_bytes = 0
    for document in documents:
        parts += [tokenizer.encode(document.text), end]
        num_bytes += len(document.text)
    return np.concatenate(parts), num_bytes


def _check_enough(corpus: Corpus, texts: dict[str, _DomainText], section: DataSection) -> None:
    """Raise DataError unless every domain has a window to train on and one held out."""
    window = section.seq_len + 1
    held = ", ".join(
        f"{name}: {len(text.heldout)} of {len(text.heldout) + len(text.train)} documents, {len(stream)} tokens"
        for (name, text), stream in zip(texts.items(), corpus.heldout, strict=True)
    )
    repair = (
        f"Raise data.heldout (now {section.heldout}) or data.heldout_bytes (now {section.heldout_bytes}), give more "
        "text, or lower data.seq_len, or document_bytes so that there are more documents to choose from."
    )
    if sum(map(len, corpus.heldout)) < window:
        raise DataError(
            f"the held-out set is too small: one window is {window} tokens (data.seq_len + 1), and the whole set "
            f"is shorter ({held}). {repair}"
        )
    for name, train, heldout in zip(corpus.domains, corpus.train, corpus.heldout, strict=True):
        if len(train) < window:
            raise DataError(
                f"domain {name!r} has {len(train)} tokens to train on, less than one window of {window} "
                f"(data.seq_len + 1). Give it more text, lower data.seq_len, or lower data.heldout (now "
                f"{section.heldout})."
            )
        if len(heldout) < window:
            raise DataError(
                f"the held-out set of domain {name!r} is too small: one window is {window} tokens (data.seq_len + 1), "
                f"so its own figure would be missing ({held}). {repair}"
            )
