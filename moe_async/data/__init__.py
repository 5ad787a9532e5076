"""Text in, batches out: sources, byte tokenizer, corpus, resumable training stream, held-out set, trigram yardstick.

Only the names of `batches` need torch; they are imported when asked for, so that tools can read text without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moe_async.data.builtin import BUILTIN_DOMAINS, builtin_documents
from moe_async.data.corpus import Corpus, bits_per_byte, is_held_out, load_corpus, whole_corpus
from moe_async.data.documents import Document
from moe_async.data.ngram import TrigramModel
from moe_async.data.sources import read_documents
from moe_async.data.tokenizer import ByteTokenizer, Tokenizer, Tokens, make_tokenizer

if TYPE_CHECKING:
    from moe_async.data.batches import IGNORED_LABEL, Batch, TrainStream, heldout_batches

__all__ = [
    "BUILTIN_DOMAINS",
    "IGNORED_LABEL",
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "Tokenizer",
    "Tokens",
    "TrainStream",
    "TrigramModel",
    "bits_per_byte",
    "builtin_documents",
    "heldout_batches",
    "is_held_out",
    "load_corpus",
    "make_tokenizer",
    "read_documents",
    "whole_corpus",
]
_NEED_TORCH = frozenset({"IGNORED_LABEL", "Batch", "TrainStream", "heldout_batches"})


def __getattr__(name: str) -> Any:
    """The names of `batches`, imported at first use."""
    if name in _NEED_TORCH:
        return getattr(importlib.import_module("moe_async.data.batches"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
