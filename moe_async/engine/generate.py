"""Sampling a few lines of text from a model, to be looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_async.data import Tokenizer
from moe_async.model import ModelOutput


@torch.no_grad()
def generate(
    forward: Callable[[Tensor, Tensor | None], ModelOutput],
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    new_tokens: int,
    *,
    context: int,
    temperature: float = 0.7,
    seed: int = 0,
    device: torch.device | None = None,
) -> list[str]:
    """Continue each prompt by up to ``new_tokens`` sampled tokens; the texts without their prompts.

    Every rank of an expert group calls it with the same arguments: each forward pass is an all-to-all. The sample
    depends on ``seed`` alone and draws from no global random state. It ends at an end-of-document token.

    Args:
        forward: the model in evaluation mode, ``(tokens, token_mask) -> ModelOutput``.
        tokenizer: turns text into ids and back.
        prompts: beginnings; none may be empty.
        new_tokens: how far to go.
        context: the model sees at most this many of the latest tokens.
        temperature: divides the logits; lower is more repetitive.
        seed: of the sampling.
        device: of the model; the CPU by default.
    """
    generator = torch.Generator().manual_seed(seed)
    texts = [[int(token) for token in tokenizer.encode(prompt)] for prompt in prompts]
    lengths = [len(text) for text in texts]
    for _ in range(new_tokens if prompts else 0):
        logits = _next_logits(forward, texts, context, device or torch.device("cpu"))
        # A vocabulary that was rounded up has ids that stand for nothing.
        logits[:, tokenizer.vocab_size :] = -torch.inf
        chosen = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        for text, token in zip(texts, chosen.flatten().tolist(), strict=True):
            text.append(token)
    return [tokenizer.decode(_until_end(text[n:], tokenizer)) for text, n in zip(texts, lengths, strict=True)]


def _next_logits(
    forward: Callable[[Tensor, Tensor | None], ModelOutput], texts: list[list[int]], context: int, device: torch.device
) -> Tensor:
    """Scores of each text's next token, float32 on the CPU; shorter texts are padded behind their end."""
    recent = [text[-context:] for text in texts]
    longest = max(len(text) for text in recent)
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in recent], device=device)
    ends = torch.tensor([len(text) for text in recent], device=device)
    live = torch.arange(longest, device=device) < ends[:, None]
    logits = forward(tokens, None if live.all() else live).logits
    return logits[torch.arange(len(recent), device=device), ends - 1].float().cpu()


def _until_end(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    end = tokenizer.end_of_document
    return ids[: ids.index(end)] if end in ids else ids
