"""A decoder-only transformer whose feed-forward layers are dense or MoE.

Shape letters: B sequences, S positions, D model width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_async.model.attention import Attention, QkNorm, causal_mask, rotary_tables
from moe_async.moe import MoELayer
from moe_async.moe.feed_forward import FeedForward
from moe_async.ops.initialise import Init, normal_by_name_
from moe_async.ops.routing import CHOICE
from moe_async.ops.sums import RoutingSums

EMBEDDING_STD = 0.02

Recompute = Literal["none", "block", "reentrant"]


class ModelOutput(NamedTuple):
    """What a model gives back to `train_step`.

    Attributes:
        logits: next-token scores, [B, S, V].
        routing: the sums of each MoE layer, in layer order.
    """

    logits: Tensor
    routing: tuple[RoutingSums, ...]


@dataclass(frozen=True)
class TransformerShape:
    """Sizes shared by all blocks.

    Attributes:
        dim, layers, heads, kv_heads, head_dim, vocab_size: widths and counts.
        norm_eps: added to the mean square inside RMSNorm.
        rope_theta: base of the rotary frequencies.
        tie_embeddings: the output projection is the embedding.
        qk_norm: norms of queries and keys.
        init: how matrices begin.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_embeddings: bool = True
    qk_norm: QkNorm = "none"
    init: Init = Init()  # noqa: RUF009 (immutable)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and added to the residual stream."""

    def __init__(self, shape: TransformerShape, feed_forward: FeedForward | MoELayer) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(
            shape.dim, shape.heads, shape.kv_heads, shape.head_dim, shape.init, shape.qk_norm, shape.norm_eps
        )
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = feed_forward

    def forward(
        self,
        x_BSD: Tensor,
        cos: Tensor,
        sin: Tensor,
        tokens_BS: Tensor,
        token_mask: Tensor | None,
        visible: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """The residual stream after this block, then the routing sums' tensors if the layer is MoE.

        Flat, because a recomputed function must take and return plain tensors.
        """
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), (cos, sin), visible)
        normed = self.ffn_norm(x_BSD)
        if isinstance(self.ffn, MoELayer):
            hidden, routing, _ = self.ffn(normed, token_mask, tokens_BS)
            return (x_BSD + hidden, *routing)
        return (x_BSD + self.ffn(normed),)


class Transformer(nn.Module):
    """Decoder-only language model.

    Args:
        shape: sizes.
        make_feed_forward: makes the feed-forward layer of each index; decides which layers are MoE.
        autocast_dtype: dtype in which dense layers compute; None: the dtype of the parameters.
        recompute: ``none``; or keep only each block's input for the backward pass and compute the block again there.
            ``block`` keeps the choice of experts from the first pass too, so that a token never changes expert between
            the two. ``reentrant`` is torch's older way, which keeps nothing but the input and relies on the second pass
            choosing alike.
    """

    def __init__(
        self,
        shape: TransformerShape,
        make_feed_forward: Callable[[int], FeedForward | MoELayer],
        *,
        autocast_dtype: torch.dtype | None = None,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.shape = shape
        self.autocast_dtype = autocast_dtype
        self.recompute = recompute
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape, make_feed_forward(index)) for index in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.head = None if shape.tie_embeddings else nn.Linear(shape.dim, shape.vocab_size, bias=False)

    def forward(self, tokens_BS: Tensor, token_mask: Tensor | None = None) -> ModelOutput:
        """Scores of the next token at every position.

        Args:
            tokens_BS: int64 token ids.
            token_mask: bool [B, S]; False for padding, which no other token attends to, no expert sees and no
                statistic counts.
        """
        with self._autocast(tokens_BS.device):
            x_BSD = self.embedding(tokens_BS)
            tables = rotary_tables(tokens_BS.shape[1], self.shape.head_dim, self.shape.rope_theta, tokens_BS.device)
            visible = None if token_mask is None else causal_mask(token_mask)
            routing = []
            for block in self.layers:
                x_BSD, *sums = self._run(block, x_BSD, *tables, tokens_BS, token_mask, visible)
                if sums:
                    routing.append(RoutingSums(*sums))
            weight = self.embedding.weight if self.head is None else self.head.weight
            return ModelOutput(functional.linear(self.norm(x_BSD), weight), tuple(routing))

    def _run(self, block: nn.Module, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        if self.recompute == "none" or not torch.is_grad_enabled():
            outputs: tuple[Tensor, ...] = block(*inputs)
        elif self.recompute == "reentrant":
            outputs = checkpoint(block, *inputs, use_reentrant=True)
        else:
            outputs = checkpoint(block, *inputs, use_reentrant=False, context_fn=_keep_selection)
        return outputs

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)

    def reset_parameters(self, seed: int) -> None:
        """Draw all initial weights from ``seed`` and the parameters' names."""
        init = self.shape.init
        std = EMBEDDING_STD if init.std is None else init.std
        normal_by_name_(self.embedding.weight.data, std=std, seed=seed, name="embedding.weight", truncate=init.truncate)
        if self.head is not None:
            init.fill_(self.head.weight, self.shape.dim, seed, "head.weight")
        for norm in (module for module in self.modules() if isinstance(module, nn.RMSNorm)):
            nn.init.ones_(norm.weight)
        for index, block in enumerate(self.layers):
            assert isinstance(block, Block)
            block.attention.reset_parameters(seed, f"layers.{index}.attention")
            block.ffn.reset_parameters(seed, f"layers.{index}.ffn")


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator is CHOICE:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# Near-equal scores may come out in another order when they are computed again; the first choice is saved, [T, K] ids.
_keep_selection = functools.partial(create_selective_checkpoint_contexts, _policy)
