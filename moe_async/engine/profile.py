"""Runs checkpoints over text to see what their experts specialise in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_async.comm import World
from moe_async.data import (
    BUILTIN_DOMAINS,
    IGNORED_LABEL,
    Corpus,
    Tokenizer,
    heldout_batches,
    load_corpus,
    make_tokenizer,
    whole_corpus,
)
from moe_async.engine.load_meta import load_meta
from moe_async.engine.open_checkpoint import OpenedCheckpoint, open_checkpoint
from moe_async.errors import DataError, LoadError
from moe_async.observe.probe import LabelledText, Probe, probe
from moe_async.observe.profile import Profile, profile
from moe_async.topology import Topology

if TYPE_CHECKING:
    from moe_async.recipe import Recipe

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CheckpointProfile:
    """A checkpoint over a text.

    Attributes:
        checkpoint: its folder.
        step: after which it was written.
        against: the folder of the other checkpoint; None without another.
        tokens: of the text, by domain.
        tokenizer: that made them.
        profile: what was found.
    """

    checkpoint: Path
    step: int
    against: Path | None
    tokens: dict[str, int]
    tokenizer: Tokenizer
    profile: Profile


def profile_checkpoint(
    path: Path,
    sources: Sequence[str] = (),
    max_bytes: int = 30_000,
    against: Path | None = None,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> CheckpointProfile:
    """Run a checkpoint over text, in this process with all experts, and analyse its routing.

    Args:
        path: a checkpoint's folder, or a run's (its newest checkpoint is taken).
        sources: ``[DOMAIN=]PATH`` each, a path or the name of a builtin domain; all of their text is used. Empty: the
            held-out text of the checkpoint's recipe.
        max_bytes: of text of each domain, at most.
        against: another checkpoint that is run over the same text, for the stability of routing.
        batch_size: sequences in a forward pass.
        progress: told the name of the checkpoint at work, how many sequences are done, and of how many.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        DataError: the text cannot be read.
        LoadError: the model has no experts, or the two checkpoints differ in architecture.
    """
    overrides = [f"data.heldout_bytes={max_bytes}"]
    if sources:
        overrides.append(f"data.source={json.dumps([_source(text) for text in sources])}")
    opened = open_checkpoint(path, overrides)
    _refuse_dense(opened)
    other = None if against is None else open_checkpoint(against)
    if other is not None:
        _refuse_dense(other)
    tokenizer = make_tokenizer(opened.recipe.data.tokenizer)
    corpus = whole_corpus(opened.recipe.data, tokenizer) if sources else _heldout(opened.recipe, tokenizer, max_bytes)
    text = _text(corpus, opened.recipe.data.seq_len)
    first = _probe(opened, corpus, text, batch_size, progress)
    second = None if other is None else _probe(other, corpus, text, batch_size, progress)
    return CheckpointProfile(
        checkpoint=opened.folder,
        step=opened.manifest.trainer["step"],
        against=None if other is None else other.folder,
        tokens={name: max(len(stream) - 1, 0) for name, stream in zip(corpus.domains, corpus.heldout, strict=True)},
        tokenizer=tokenizer,
        profile=profile(first, second),
    )


def _heldout(recipe: Recipe, tokenizer: Tokenizer, max_bytes: int) -> Corpus:
    try:
        return load_corpus(recipe.data, tokenizer)
    except DataError as error:
        raise DataError(
            f"{max_bytes} bytes of held-out text of each domain were asked for, which cannot be had: {error} Here, ask "
            "for more bytes (--bytes), or give text of your own (--data)."
        ) from error


def _source(text: str) -> dict[str, Any]:
    domain, equals, path = text.partition("=")
    if not equals or Path(text).exists():
        domain, path = "", text
    if not path:
        raise DataError(f"{text!r} names no text; give PATH or DOMAIN=PATH, such as code=src.")
    builtin = path in BUILTIN_DOMAINS and not Path(path).exists()
    return {"builtin" if builtin else "path": path} | ({"domain": domain} if domain else {})


def _refuse_dense(opened: OpenedCheckpoint) -> None:
    if not _moe_layers(opened.recipe):
        raise LoadError(f"{opened.folder} is of a model without experts; there is nothing to profile.")


def _moe_layers(recipe: Recipe) -> int:
    return len(recipe.moe.moe_layers(recipe.model.layers)) if recipe.moe else 0


def _text(corpus: Corpus, seq_len: int) -> LabelledText:
    windows = heldout_batches(corpus, seq_len, rank=0, world_size=1, batch_size=1)
    return LabelledText(
        tokens_BS=torch.cat([window.tokens for window in windows]),
        live_BS=torch.cat([window.labels for window in windows]) != IGNORED_LABEL,
        domains_B=torch.cat([window.domains for window in windows]),
    )


def _probe(
    opened: OpenedCheckpoint, corpus: Corpus, text: LabelledText, batch_size: int, progress: Progress | None
) -> Probe:
    experts = opened.recipe.moe.num_experts if opened.recipe.moe else 1
    meta = load_meta(opened.recipe, World(Topology(num_experts=experts)), corpus.domains)
    tell = None if progress is None else lambda done, number: progress(opened.folder.name, done, number)
    return probe(opened.model, meta, text, batch_size, tell)
