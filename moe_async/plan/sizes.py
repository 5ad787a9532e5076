"""Sizes of a recipe's model: parameters by class and layer, bytes of its numbers.

Symbols: D model width, C width of a head, F hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_async.recipe import ModelSection, MoeSection, Recipe
from moe_async.recipe.routers import GroupsSection

BYTE_VOCABULARY = 257
"""Ids of the byte tokenizer, the vocabulary of a recipe that names none."""
_GATED = ("swiglu", "swiglu_clamped")


@dataclass(frozen=True)
class Widths:
    """Bytes of a number.

    Attributes:
        stored: of parameters, gradients, moments and the residual stream.
        dense: in which dense layers compute.
        expert: in which experts compute.
        wire: on which tokens travel to experts.
    """

    stored: int
    dense: int
    expert: int
    wire: int


@dataclass(frozen=True)
class ModelSizes:
    """A model's parameters.

    Attributes:
        model: its dense skeleton.
        moe: its experts; None for a dense model.
        moe_layers: indices of the layers that have experts.
        vocabulary: token ids.
        attention: parameters of one attention layer with its norms.
        dense_ffn: of one dense feed-forward layer with its norm; of the layers without experts.
        router: of one router with the norm before it.
        shared: of one shared expert with its gate.
        expert: of one expert.
        embedding: of the embedding.
        head: of the output layer apart from the embedding.
        tail: of the last norm.
    """

    model: ModelSection
    moe: MoeSection | None
    moe_layers: tuple[int, ...]
    vocabulary: int
    attention: int
    dense_ffn: int
    router: int
    shared: int
    expert: int
    embedding: int
    head: int
    tail: int

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.model.layers - len(self.moe_layers)

    @property
    def replicated(self) -> int:
        """Parameters that every rank has: all but the routed experts."""
        return (
            self.model.layers * self.attention
            + self.dense_layers * self.dense_ffn
            + len(self.moe_layers) * (self.router + self.shared)
            + self.embedding
            + self.head
            + self.tail
        )

    @property
    def experts(self) -> int:
        """Parameters of all routed experts of all layers."""
        return 0 if self.moe is None else len(self.moe_layers) * self.moe.num_experts * self.expert

    @property
    def total(self) -> int:
        """All parameters."""
        return self.replicated + self.experts

    @property
    def active(self) -> int:
        """Parameters that one token uses: of the experts, top_k of the router's choices."""
        if self.moe is None:
            return self.total
        return self.total - round(self.experts * (1 - self.moe.top_k / self.moe.choices))

    def experts_here(self, expert_parallel: int) -> int:
        """Parameters of the experts of one rank."""
        return self.experts // expert_parallel


def widths(recipe: Recipe) -> Widths:
    """Bytes of the numbers of a recipe's precision."""
    precision = recipe.train.precision
    stored = 8 if precision == "float64" else 4
    dense = 2 if precision == "bf16" else stored
    expert = 2 if precision in ("selective", "bf16") else stored
    wire = expert if recipe.moe is None or recipe.moe.wire == "compute" else max(expert, 4)
    return Widths(stored, dense, expert, wire)


def model_sizes(recipe: Recipe) -> ModelSizes:
    """Count the parameters of a recipe's model."""
    model, moe = recipe.model, recipe.moe
    dim = model.dim
    heads, kv_heads, width = head_sizes(model)
    norms = {"none": 0, "head": 2 * width, "full": (heads + kv_heads) * width}[model.qk_norm]
    attention = dim * (heads + 2 * kv_heads) * width + heads * width * dim + norms + dim
    vocabulary = model.vocab_size or BYTE_VOCABULARY
    router = shared = expert = 0
    if moe is not None:
        expert = ffn_parameters(moe.expert, dim, moe.expert_dim)
        if moe.expert_bias:
            expert += input_width(moe.expert, moe.expert_dim) + dim
        router = dim + moe.choices * dim
        router += moe.choices if getattr(moe.router, "bias", False) is True else 0
        router += moe.choices * dim if moe.router.kind == "noisy_topk" else 0
        shared = (ffn_parameters(moe.expert, dim, moe.shared_dim) if moe.shared_dim else 0) + dim * moe.shared_gate
    return ModelSizes(
        model=model,
        moe=moe,
        moe_layers=moe.moe_layers(model.layers) if moe else (),
        vocabulary=vocabulary,
        attention=attention,
        dense_ffn=ffn_parameters(model.ffn, dim, model.ffn_dim) + dim,
        router=router,
        shared=shared,
        expert=expert,
        embedding=vocabulary * dim,
        head=0 if model.tie_embeddings else vocabulary * dim,
        tail=dim,
    )


def dense_matrices(sizes: ModelSizes) -> list[tuple[int, int, int]]:
    """The hidden matrices of dense layers and shared experts, as Muon cuts them: how many, rows and columns."""
    model, moe = sizes.model, sizes.moe
    heads, kv_heads, width = head_sizes(model)
    layers, dim = model.layers, model.dim
    found = [(layers, heads * width, dim), (2 * layers, kv_heads * width, dim), (layers, dim, heads * width)]
    found += _ffn_matrices(sizes.dense_layers, model.ffn, dim, model.ffn_dim)
    if moe is not None and moe.shared_dim:
        found += _ffn_matrices(len(sizes.moe_layers), moe.expert, dim, moe.shared_dim)
    return found


def expert_matrices(sizes: ModelSizes, expert_parallel: int) -> list[tuple[int, int, int]]:
    """The matrices of the experts of one rank: how many, rows and columns."""
    if sizes.moe is None:
        return []
    local = len(sizes.moe_layers) * sizes.moe.num_experts // expert_parallel
    return _ffn_matrices(local, sizes.moe.expert, sizes.model.dim, sizes.moe.expert_dim)


def _ffn_matrices(number: int, kind: str, dim: int, hidden: int) -> list[tuple[int, int, int]]:
    inputs = 2 if kind in _GATED else 1
    return [(inputs * number, hidden, dim), (number, dim, hidden)]


def head_sizes(model: ModelSection) -> tuple[int, int, int]:
    """Query heads, key and value heads, and their width."""
    return model.heads, model.kv_heads or model.heads, model.head_dim or model.dim // model.heads


def input_width(kind: str, hidden: int) -> int:
    """Rows of the first matrix: gated kinds stack their gate above their up projection."""
    return 2 * hidden if kind in _GATED else hidden


def ffn_parameters(kind: str, dim: int, hidden: int) -> int:
    """Parameters of a feed-forward network without biases."""
    return input_width(kind, hidden) * dim + hidden * dim


def real_choices(moe: MoeSection) -> float:
    """Experts that a token takes on average; zero experts are none."""
    return moe.top_k * moe.num_experts / moe.choices


def journeys(moe: MoeSection, ranks: int) -> float:
    """Ranks of an expert group that hold one of a token's experts, on average over even choices; its own is among
    them. Group-limited routing reaches fewer."""
    local = moe.num_experts // ranks
    reached = ranks * (1 - _missed(moe.choices, local, moe.top_k))
    groups: GroupsSection | None = getattr(moe.router, "groups", None)
    if groups is None:
        return reached
    if ranks % groups.number == 0:
        # A token chooses among the ranks of the groups that it keeps.
        kept = ranks * groups.keep // groups.number
        return min(reached, kept * (1 - _missed(moe.choices * groups.keep // groups.number, local, moe.top_k)))
    together = max(groups.number // ranks, 1)
    return min(reached, ranks * (1 - _missed(groups.number, together, groups.keep)))


def _missed(number: int, marked: int, drawn: int) -> float:
    """Chance that none of some marked things is among those drawn, each once."""
    return math.comb(number - marked, drawn) / math.comb(number, drawn)
