"""The sections that say how the model is trained: `parallel`, `optim`, `train` and `log`.

Each key states its meaning, unit and default. Rules inside one section live here; rules that compare sections live
in `schema`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from moe_async.recipe.messages import alternatives, nearest_divisors, nearest_multiples, statement
from moe_async.recipe.section import Section


class ParallelSection(Section):
    """How parameters and optimizer state are laid out over the ranks."""

    expert: int = Field(
        default=1,
        ge=1,
        description="Expert-parallel size: ranks that together hold every expert once; must divide moe.num_experts"
        " and the number of ranks. Default: 1.",
    )
    zero: Literal[0, 1, 2] = Field(
        default=1,
        description="ZeRO stage: 0 replicates the optimizer state, 1 partitions it, 2 partitions gradients too."
        " Default: 1.",
    )

    @field_validator("zero", mode="before")
    @classmethod
    def _zero_is_a_number(cls, value: object) -> object:
        # Literal compares with ==, by which true is 1.
        if isinstance(value, (bool, float)):
            raise ValueError("it must be 0, 1 or 2. Write the stage as a whole number.")
        return value


class ScheduleSection(Section):
    """How the learning rate changes over the steps."""

    kind: Literal["constant", "cosine", "wsd"] = Field(
        default="cosine",
        description="Shape after warmup: constant; cosine falls along half a cosine; wsd stays level, then falls."
        " Default: cosine.",
    )
    warmup: int = Field(default=0, ge=0, description="Steps of linear warmup; fewer than train.steps. Default: 0.")
    final: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Learning rate at the end, as a fraction of optim.lr. Default: 0.1.",
    )
    decay: float = Field(default=0.2, gt=0, le=1, description="Share of the steps in which wsd falls. Default: 0.2.")


class ClassSection(Section):
    """How the optimizer treats one class of parameters."""

    lr_scale: float = Field(
        default=1.0, ge=0, description="Factor on the learning rate of this class; 0 freezes it. Default: 1."
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="Weight decay of this class. Default: null, optim.weight_decay."
    )


class OptimSection(Section):
    """The optimizer, its clipping and its learning-rate schedule."""

    kind: Literal["adamw", "sgd", "muon"] = Field(
        default="adamw",
        description="Optimizer. muon: torch.optim.Muon for each matrix of experts and dense layers on its own, AdamW"
        " for all else; needs parallel.zero 0. Default: adamw.",
    )
    lr: float = Field(gt=0, description="Highest learning rate. Required.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95),
        strict=False,  # YAML has lists and no tuples
        description="adamw: decay rates of the first and second moment, a list of two. Default: [0.9, 0.95].",
    )
    eps: float = Field(default=1e-8, gt=0, description="adamw: added to the denominator. Default: 1e-8.")
    momentum: float = Field(
        default=None,
        validate_default=True,
        ge=0,
        lt=1,
        description="sgd and muon: momentum. Default: 0 for sgd, 0.95 for muon.",
    )
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="Weight decay of all but norms: adamw apart from the gradient (decoupled), sgd added to it."
        " Default: 0.1.",
    )
    clip: float = Field(default=1.0, ge=0, description="Largest global gradient norm; 0 means no clipping. Default: 1.")
    schedule: ScheduleSection = Field(
        default=ScheduleSection(),
        description="How the learning rate changes. Default: cosine without warmup.",
    )
    dense: ClassSection = Field(default=ClassSection(), description="Attention, embeddings, norms, dense networks.")
    router: ClassSection = Field(default=ClassSection(), description="Routers.")
    expert: ClassSection = Field(default=ClassSection(), description="Routed experts.")

    @field_validator("momentum", mode="before")
    @classmethod
    def _fill_momentum(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            return 0.95 if info.data.get("kind") == "muon" else 0.0
        return value


class TrainSection(Section):
    """How long, in which batches and in which precision the model trains."""

    steps: int = Field(ge=1, description="Number of optimizer steps. Required.")
    global_batch: int = Field(
        ge=1, description="Sequences per optimizer step, over all ranks and micro-batches. Required."
    )
    accumulation: int = Field(default=1, ge=1, description="Micro-batches per optimizer step on each rank. Default: 1.")
    precision: Literal["selective", "bf16", "float32", "float64"] = Field(
        default="selective",
        description="selective: experts compute in bfloat16, all else in float32; bf16: dense layers compute in"
        " bfloat16 too; float32 and float64: everything. The router computes in float32 or more. Default: selective.",
    )
    recompute: Literal["none", "block", "reentrant"] = Field(
        default="none",
        description="block: the backward pass computes each layer's activations again, to save memory; reentrant: the"
        " same in torch's older way, which keeps less and cannot hold on to the choice of experts. Default: none.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of parameters and of random choices. Default: 0.")
    max_bad_steps: int = Field(
        default=20,
        ge=1,
        description="Steps in a row whose loss or gradient is not finite, each of which is skipped, before the run"
        " stops and names the layer. Default: 20.",
    )
    eval_every: int = Field(
        default=0,
        ge=0,
        description="Steps between evaluations; 0: only at the start and the end. Default: 0.",
    )
    checkpoint_every: int = Field(
        default=0, ge=0, description="Steps between checkpoints; 0: only at the end. Default: 0."
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="Number of newest checkpoints kept. Default: 2.")

    @field_validator("accumulation")
    @classmethod
    def _accumulation_divides(cls, value: int, info: ValidationInfo) -> int:
        batch = info.data.get("global_batch", value)
        if batch % value:
            accumulations = alternatives(nearest_divisors(batch, value))
            batches = alternatives(nearest_multiples(batch, value))
            raise statement(
                f"train.accumulation is {value} but train.global_batch is {batch}; the micro-batches of a step must be"
                f" equal. Use accumulation: {accumulations}, or global_batch: {batches}."
            )
        return value


class LogSection(Section):
    """What a run writes, and how often."""

    dir: str = Field(default="runs", min_length=1, description="Folder that holds the run folders. Default: runs.")
    every: int = Field(default=10, ge=1, description="Steps between log lines. Default: 10.")
    load_every: int = Field(
        default=1,
        ge=0,
        description="Steps between those whose loads of experts are recorded in expert_load; 0: none is. Default: 1.",
    )
    tensorboard: bool = Field(default=False, description="Whether to write TensorBoard scalars. Default: false.")
    sample_tokens: int = Field(
        default=160,
        ge=0,
        description="Tokens of text generated for each prompt at the end; 0: none. Default: 160.",
    )
    prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        default=["The ", "def ", "#include <", "Returns the "],
        description="Beginnings of the generated texts. Default: four, one for each builtin domain.",
    )
