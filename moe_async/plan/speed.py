"""Operations and time of a step, from stated peak rates.

Time is a sum of parts that wait for one another, as in the engine: nothing is overlapped but delayed reductions and
rounds between learners. Matrix products and links reach a stated share of their peak rates; values between products
are read and written at the memory's rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_async.plan.activations import Load, activations
from moe_async.plan.hardware import Accelerator
from moe_async.plan.layout import Layout
from moe_async.plan.memory import rows_of
from moe_async.plan.sizes import (
    ModelSizes,
    dense_matrices,
    expert_matrices,
    ffn_parameters,
    head_sizes,
    real_choices,
    widths,
)
from moe_async.plan.traffic import counts_first, forward_passes, transfers
from moe_async.recipe import Recipe

PRODUCTS_REACH = 0.5
"""Share of the peak rate that matrix products reach, unless told otherwise."""
LINKS_REACH = 0.7
"""Share of their rate that links reach."""
_ROUTER = 4
"""Bytes of a number in the router, float32 at least."""
_PASSES_OVER_VALUES = 3
"""How often a value that is kept for the backward pass travels to or from memory: written, and read in each pass."""
_OPTIMIZER_PASSES = 7
"""Reads and writes of an optimizer for each parameter: weight, gradient and two moments, all but the gradient twice."""

_MUON_ITERATIONS = 5
"""Of Newton and Schulz in `torch.optim.Muon`."""


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of a forward pass for one token; a multiplication and an addition are two.

    Attributes:
        blocks: of the dense parts of all blocks, attention over half of the sequence on average among them.
        experts: of the routed experts.
        router: of the routers.
        head: of the output layer.
    """

    blocks: float
    experts: float
    router: float
    head: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.blocks + self.experts + self.router + self.head


@dataclass(frozen=True)
class StepTime:
    """An expected step.

    Attributes:
        parts: seconds by what takes them.
        hidden: seconds that run beside it.
        mfu: model FLOPs utilisation: operations of one forward and one backward pass over what the accelerators could
            do in bfloat16 in the time; what is computed again is not counted.
        tokens_per_second: over all learners.
    """

    parts: dict[str, float]
    hidden: dict[str, float]
    mfu: float
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.parts.values())


def operations(recipe: Recipe, sizes: ModelSizes) -> Operations:
    """What a token costs."""
    model, moe = sizes.model, sizes.moe
    heads, kv_heads, width = head_sizes(model)
    attention = 2 * model.dim * (2 * heads + 2 * kv_heads) * width + 2 * recipe.data.seq_len * heads * width
    blocks = model.layers * attention + sizes.dense_layers * 2 * ffn_parameters(model.ffn, model.dim, model.ffn_dim)
    experts = router = 0.0
    if moe is not None:
        layers, real = len(sizes.moe_layers), real_choices(moe)
        experts = layers * 2 * real * ffn_parameters(moe.expert, model.dim, moe.expert_dim)
        blocks += layers * 2 * ffn_parameters(moe.expert, model.dim, moe.shared_dim) if moe.shared_dim else 0
        router = layers * 2.0 * moe.choices * model.dim
    return Operations(blocks, experts, router, 2.0 * sizes.vocabulary * model.dim)


def step_time(
    recipe: Recipe,
    sizes: ModelSizes,
    layout: Layout,
    accelerator: Accelerator,
    skew: float = 1.0,
    products_reach: float = PRODUCTS_REACH,
    links_reach: float = LINKS_REACH,
) -> StepTime:
    """How long a step takes on the busiest rank, for which the others wait.

    Args:
        recipe: the recipe.
        sizes: of its model.
        layout: how it lies.
        accelerator: of each rank.
        skew: load of the busiest rank over the mean, in each layer.
        products_reach: share of the peak rate that matrix products reach.
        links_reach: share of their stated rates that links reach.
    """
    width, cost = widths(recipe), operations(recipe, sizes)
    tokens = layout.micro_batch * layout.accumulation * recipe.data.seq_len
    rows = rows_of(recipe, layout, skew)
    # A backward pass costs two forward passes.
    again = forward_passes(recipe, layout.recompute, layout.accumulation) + 2
    head = 3 + counts_first(recipe, layout.accumulation)
    dense = tokens * (cost.blocks * again + cost.head * head) / accelerator.peak(width.dense)
    router = tokens * cost.router * again / accelerator.peak(max(width.stored, _ROUTER))
    experts = tokens * cost.experts * again * rows / accelerator.peak(width.expert)
    load = Load(layout.micro_batch, recipe.data.seq_len, rows, layout.expert)
    kept = activations(sizes, width, load, "none").kept * layout.accumulation
    part = sizes.replicated + sizes.experts_here(layout.expert)
    if layout.zero:
        part = round(sizes.replicated / layout.ranks + sizes.experts_here(layout.expert) / layout.replicas)
    parts = {
        "dense products": (dense + router) / products_reach,
        "expert products": experts / products_reach,
        "other operations": kept * (_PASSES_OVER_VALUES + again - 3) / accelerator.bandwidth,
        "optimizer": part * width.stored * _OPTIMIZER_PASSES / accelerator.bandwidth,
    }
    if recipe.optim.kind == "muon":
        parts["optimizer"] += _orthogonalisation(sizes, layout) / accelerator.bf16 / products_reach
    hidden: dict[str, float] = {}
    for name, transfer in transfers(recipe, sizes, layout, accelerator).items():
        uneven = name == "tokens to experts" and sizes.moe is not None and sizes.moe.dispatcher != "all_gather"
        seconds = transfer.seconds(accelerator, links_reach) * (rows if uneven else 1.0)
        (parts if transfer.exposed else hidden)[name] = seconds
    total = sum(parts.values())
    all_tokens = tokens * layout.gpus
    return StepTime(
        parts=parts,
        hidden=hidden,
        mfu=3 * cost.total * all_tokens / (total * layout.gpus * accelerator.bf16),
        tokens_per_second=all_tokens / total,
    )


def _orthogonalisation(sizes: ModelSizes, layout: Layout) -> float:
    """Operations of Muon's Newton-Schulz iterations on a rank, which makes all of its matrices' updates itself."""
    total = 0.0
    for number, rows, columns in (*dense_matrices(sizes), *expert_matrices(sizes, layout.expert)):
        short, long = sorted((rows, columns))
        # X X^T, its square, and their product with X.
        total += number * _MUON_ITERATIONS * (4 * short * short * long + 2 * short**3)
    return total
