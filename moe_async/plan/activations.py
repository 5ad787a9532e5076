"""Bytes that a forward pass keeps for the backward pass, and what lives beside them at the worst moments.

The formulas follow the code of this package operation by operation; `tests/plan` measures small models and holds them
to within 10 %. They count what torch's unfused operations keep, so a fused norm on an accelerator keeps less.

Symbols: T tokens of a micro-batch on one rank, D model width, F hidden width, K experts per token, E choices of the
router, V vocabulary, R rows that the experts of a rank get.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_async.plan.sizes import ModelSizes, Widths, ffn_parameters, head_sizes, input_width, journeys, real_choices

_ID = 8
"""Bytes of a token id or an expert id."""
_STATISTIC = 4
"""Bytes of a number of the router's statistics, which are float32 at least."""


@dataclass(frozen=True)
class Load:
    """What one micro-batch brings to one rank.

    Attributes:
        sequences: of the micro-batch.
        length: tokens of a sequence.
        rows: rows that this rank's experts get in one layer, over those that an even load would bring: 1 is even.
        expert_parallel: ranks of an expert group.
    """

    sequences: int
    length: int
    rows: float = 1.0
    expert_parallel: int = 1

    @property
    def tokens(self) -> int:
        """T."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank, beside weights, gradients and moments.

    Attributes:
        kept: from the forward to the backward pass, weights that were cast for the computation among them.
        cast_weights: those of them.
        at_loss: besides, when the loss's gradient is computed.
        in_head: besides, when the output layer's gradient is computed, or that of the norm before it.
        in_block: besides, when the last block's gradient is computed; less than nothing where more was freed before.
        in_embedding: besides, when the embedding's gradient is computed, at the very end.
        dispatch: of the rows of one layer in flight between ranks, part of ``in_block``.
        one_block: what the largest block keeps, and its gradients at work.
    """

    kept: int
    cast_weights: int
    at_loss: int
    in_head: int
    in_block: int
    in_embedding: int
    dispatch: int
    one_block: int

    @property
    def temporary(self) -> int:
        """Besides what is kept, at the worst moment."""
        return max(self.at_loss, self.in_head, self.in_block, self.in_embedding)

    @property
    def peak(self) -> int:
        """All of it at the worst moment."""
        return self.kept + self.temporary


@dataclass(frozen=True)
class _Kept:
    """Bytes that a part of the model keeps: of tokens and of cast weights."""

    tokens: float
    weights: int = 0

    def __add__(self, other: _Kept) -> _Kept:
        return _Kept(self.tokens + other.tokens, self.weights + other.weights)

    def times(self, number: int) -> _Kept:
        return _Kept(self.tokens * number, self.weights * number)

    @property
    def bytes(self) -> int:
        return round(self.tokens) + self.weights


def activations(sizes: ModelSizes, width: Widths, load: Load, recompute: str) -> Activations:
    """What one micro-batch needs on one rank.

    Args:
        sizes: of the model.
        width: bytes of its numbers.
        load: the micro-batch.
        recompute: ``none``, ``block`` or ``reentrant``, as in ``train.recompute``.
    """
    tokens = load.tokens
    attention = _attention(sizes, width, load)
    dense = attention + _dense_ffn(sizes, width, load)
    expert = attention + _moe(sizes, width, load) if sizes.moe_layers else dense
    blocks = dense.times(sizes.dense_layers) + expert.times(len(sizes.moe_layers))
    last = expert if sizes.model.layers - 1 in sizes.moe_layers else dense
    largest = max((dense if sizes.dense_layers else last, expert), key=lambda one: one.bytes)
    tail = _tail(sizes, width, load)
    kept, block_again = blocks, 0
    if recompute != "none":
        kept = _inputs(sizes, width, load, recompute)
        block_again = largest.bytes
    held_logits = tokens * sizes.vocabulary * width.dense
    log_probs = tokens * sizes.vocabulary * max(width.dense, _STATISTIC)
    everything = kept + tail
    # The embedding's ids.
    total = everything.bytes + tokens * _ID
    at_loss = held_logits + 3 * log_probs
    head = sizes.vocabulary * sizes.model.dim
    # Made in the type of the computation, then cast when the cast weight and the logits' gradient are free again.
    head_gradient = max(held_logits + head * width.dense, head * width.stored)
    # Tied, the gradient of the head waits for that of the embedding.
    waiting = head * width.stored if sizes.model.tie_embeddings else 0
    in_norm = tokens * sizes.model.dim * (3 * width.stored + (width.dense if width.dense < width.stored else 0))
    in_head = held_logits + max(head_gradient, waiting + in_norm)
    in_flight = _in_flight(sizes, width, load)
    gradients = _gradients(sizes, width, load)
    in_block = held_logits + waiting - tail.bytes + block_again + in_flight + gradients
    # Tied, both gradients and their sum; all else is free by then.
    in_embedding = held_logits + (3 if sizes.model.tie_embeddings else 1) * head * width.stored - total
    return Activations(
        total, everything.weights, at_loss, in_head, in_block, in_embedding, in_flight, largest.bytes + gradients
    )


def _attention(sizes: ModelSizes, width: Widths, load: Load) -> _Kept:
    """The norm before it and the attention itself."""
    heads, kv_heads, head = head_sizes(sizes.model)
    dim = sizes.model.dim
    queries, keys = heads * head, kv_heads * head
    per_token = _norm(dim, width) + dim * width.dense
    # The stacked projections (as the values' storage), rotated queries and keys, the output in both layouts.
    per_token += (4 * queries + 3 * keys) * width.dense + heads * _STATISTIC
    if sizes.model.qk_norm != "none":
        # Normalised values before their weights, and what they were made of where it had to be widened.
        per_token += (queries + keys) * width.stored * (1 if width.dense == width.stored else 2)
    weights = dim * (2 * queries + 2 * keys)
    return _Kept(load.tokens * per_token, weights * width.dense if width.dense < width.stored else 0)


def _norm(dim: int, width: Widths) -> int:
    """A norm's input, its normalised values and their root, for one token."""
    return 2 * dim * width.stored + width.stored


def _dense_ffn(sizes: ModelSizes, width: Widths, load: Load) -> _Kept:
    model = sizes.model
    per_token = _norm(model.dim, width) + model.dim * width.dense + _hidden(model.ffn, model.ffn_dim) * width.dense
    cast = ffn_parameters(model.ffn, model.dim, model.ffn_dim) * width.dense if width.dense < width.stored else 0
    return _Kept(load.tokens * per_token, cast)


def _hidden(kind: str, hidden: int) -> int:
    """Hidden values that a feed-forward network keeps for one token."""
    # Gate and up projection, the gate's activation, the product; clamped, its parts too.
    return {"swiglu": 4, "swiglu_clamped": 7, "gelu": 2, "relu2": 2}[kind] * hidden


def _moe(sizes: ModelSizes, width: Widths, load: Load) -> _Kept:
    moe, dim = sizes.moe, sizes.model.dim
    assert moe is not None
    top_k = moe.top_k
    router = _norm(dim, width) + dim * width.stored
    router += 3 * moe.choices * max(width.stored, _STATISTIC) + top_k * (2 * _ID + 2 * width.stored)
    per_row = dim * width.expert + _hidden(moe.expert, moe.expert_dim) * width.expert
    if moe.expert_dropout:
        per_row += moe.expert_dim * width.expert
    weights = 0
    if width.expert < width.stored:
        local = moe.num_experts // load.expert_parallel
        weights += local * ffn_parameters(moe.expert, dim, moe.expert_dim) * width.expert
    shared = 0
    if moe.shared_dim:
        shared = _hidden(moe.expert, moe.shared_dim) * width.dense + (
            dim * width.dense if width.dense < width.stored else 0
        )
        shared += dim * width.dense if moe.shared_gate else 0
        if width.dense < width.stored:
            weights += ffn_parameters(moe.expert, dim, moe.shared_dim) * width.dense
    merged = sum(_merged_rows(sizes, load)) * dim * width.stored
    return _Kept(load.tokens * (router + shared) + merged + _rows(sizes, load) * per_row, weights)


def _rows(sizes: ModelSizes, load: Load) -> float:
    """R: rows that the experts of this rank get in one layer."""
    assert sizes.moe is not None
    moe = sizes.moe
    return load.tokens * real_choices(moe) * load.rows


def _merged_rows(sizes: ModelSizes, load: Load) -> tuple[float, float]:
    """Rows that are kept where experts' outputs are merged, in the type of the weights: as they came, and by token."""
    moe, tokens = sizes.moe, load.tokens
    assert moe is not None
    rows = _rows(sizes, load)
    together = min(moe.top_k, moe.num_experts // load.expert_parallel)
    if load.expert_parallel > 1 and moe.dispatcher == "all_gather":
        # Each rank merges what its experts made of the tokens of all ranks.
        return rows, tokens * load.expert_parallel * together
    if load.expert_parallel > 1 and moe.deduplicate:
        # Once where the experts are, and once more where the tokens are, there without weights that need a gradient.
        pairs = tokens * journeys(moe, load.expert_parallel)
        return rows + pairs, pairs * together
    return tokens * real_choices(moe), tokens * moe.top_k


def _tail(sizes: ModelSizes, width: Widths, load: Load) -> _Kept:
    """The last norm and the input of the output layer."""
    dim = sizes.model.dim
    cast = sizes.vocabulary * dim * width.dense if width.dense < width.stored else 0
    return _Kept(load.tokens * (_norm(dim, width) + dim * width.dense), cast)


def _inputs(sizes: ModelSizes, width: Widths, load: Load, recompute: str) -> _Kept:
    """What is kept of recomputed blocks: their inputs, and the choice of experts where it is kept."""
    chosen = sizes.moe.top_k * _ID if sizes.moe is not None and recompute == "block" else 0
    per_token = sizes.model.layers * sizes.model.dim * width.stored + len(sizes.moe_layers) * chosen
    return _Kept(load.tokens * per_token)


def _in_flight(sizes: ModelSizes, width: Widths, load: Load) -> int:
    """Rows of one layer on their way: sent, received, and received in the order of the experts; those in the order of
    the experts are kept anyway where tokens travel once."""
    moe, tokens = sizes.moe, load.tokens
    if moe is None or not sizes.moe_layers or load.expert_parallel == 1:
        return 0
    if moe.dispatcher == "all_gather":
        rows = 2.0 * tokens * load.expert_parallel
    elif moe.deduplicate:
        rows = 2.0 * tokens * journeys(moe, load.expert_parallel)
    else:
        rows = tokens * moe.top_k + 2 * _rows(sizes, load)
    return round(rows * sizes.model.dim * width.wire)


def _gradients(sizes: ModelSizes, width: Widths, load: Load) -> int:
    """Gradients at work inside the last block, before they are added to those that are stored."""
    dim, tokens, moe = sizes.model.dim, load.tokens, sizes.moe
    stream = tokens * dim * width.stored
    if moe is None or sizes.model.layers - 1 not in sizes.moe_layers:
        return round(stream + tokens * _hidden_gradients(sizes.model.ffn, sizes.model.ffn_dim) * width.dense)
    shared = tokens * _hidden_gradients(moe.expert, moe.shared_dim) * width.dense
    # The product with the weights has a gradient for both of its factors.
    merging = round(2 * _merged_rows(sizes, load)[1] * dim * width.stored)
    if width.expert == width.stored:
        return round(stream + max(merging, shared))
    # Later the first matrices' gradients are cast, when the rows' values and the cast weights are free again.
    local = moe.num_experts // load.expert_parallel
    first = local * input_width(moe.expert, moe.expert_dim) * dim
    freed = local * ffn_parameters(moe.expert, dim, moe.expert_dim) * width.expert
    freed += round(sum(_merged_rows(sizes, load)) * dim * width.stored)
    freed += round(_rows(sizes, load) * _hidden(moe.expert, moe.expert_dim) * width.expert)
    return round(stream + max(merging, shared, first * (width.expert + width.stored) - freed))


def _hidden_gradients(kind: str, hidden: int) -> int:
    """Gradients of hidden values at work for one token, over what was freed before them."""
    return {"swiglu": 2, "swiglu_clamped": 4, "gelu": 1, "relu2": 3}[kind] * hidden
