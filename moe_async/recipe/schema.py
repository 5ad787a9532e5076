"""The recipe as a whole: its sections in order, and the rules that compare one section with another.

Every such rule is a validator of the *later* section, so that it runs, and is reported, beside the errors of
unrelated sections.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from moe_async.errors import RecipeError
from moe_async.recipe.architecture import ModelSection
from moe_async.recipe.between import between_problems, between_warnings, via_problems
from moe_async.recipe.deepspeed_config import refused_options
from moe_async.recipe.messages import alternatives, nearest_divisors, nearest_multiples, refuse_all, statement
from moe_async.recipe.moe import MoeSection
from moe_async.recipe.section import Section
from moe_async.recipe.sync import SyncSection
from moe_async.recipe.text import DataSection
from moe_async.recipe.training import (
    LogSection,
    OptimSection,
    ParallelSection,
    TrainSection,
)

_USUAL_COEFFICIENT = {
    "switch": (0.001, 0.1),
    "gshard": (0.001, 0.1),
    "importance": (0.001, 0.1),
    "load": (0.001, 0.1),
    "z": (0.0001, 0.01),
    "sequence": (0.0001, 0.01),
    "device": (0.001, 0.1),
    "communication": (0.001, 0.1),
}
"""The usual range of each balance loss's coefficient."""


class Recipe(Section):
    """One complete training recipe."""

    name: str | None = Field(
        default=None,
        description="Name of the run; letters, digits, '-', '_' and '.'. Default: the file's name without its ending.",
    )
    model: ModelSection = Field(description="The dense skeleton of the transformer. Required.")
    moe: MoeSection | None = Field(default=None, description="The experts. Default: null, a dense model.")
    parallel: ParallelSection = Field(default=ParallelSection(), description="The layout over the ranks.")
    sync: SyncSection = Field(default=SyncSection(), description="How dense gradients meet.")
    optim: OptimSection = Field(description="The optimizer. Required.")
    data: DataSection = Field(description="The text. Required.")
    train: TrainSection = Field(description="Length, batch and precision. Required.")
    log: LogSection = Field(default=LogSection(), description="What a run writes.")
    deepspeed: dict[str, Any] = Field(
        default={}, description="Further DeepSpeed options, as in its JSON file. Default: none."
    )

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str | None) -> str | None:
        if value is None:
            return value
        clean = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "-" for char in value)
        clean = clean.lstrip("-.") or "run"
        if clean != value:
            raise ValueError(
                "it may hold letters, digits, '-', '_' and '.', and begins with a letter, a digit or '_'."
                f" Use name: {clean}."
            )
        return value

    @field_validator("moe")
    @classmethod
    def _moe_layers_exist(cls, value: MoeSection | None, info: ValidationInfo) -> MoeSection | None:
        if value is not None and "model" in info.data:
            try:
                value.moe_layers(info.data["model"].layers)
            except RecipeError as error:
                raise statement(str(error)) from error
        return value

    @field_validator("parallel")
    @classmethod
    def _fits_the_experts(cls, value: ParallelSection, info: ValidationInfo) -> ParallelSection:
        if "moe" in info.data:
            refuse_all(_layout_problems(value, info.data["moe"]), value)
        return value

    @field_validator("sync")
    @classmethod
    def _fits_model_and_ranks(cls, value: SyncSection, info: ValidationInfo) -> SyncSection:
        problems = []
        zero = info.data["parallel"].zero if "parallel" in info.data else 0
        if value.delay is not None and zero:
            problems.append(
                f"sync.inside is {{delay: {value.delay}}} but parallel.zero is {zero}; ZeRO 1 and"
                " 2 leave a rank with pieces of reduced gradients, and delayed ones are kept whole. Use zero: 0, or"
                " inside: blocking."
            )
        if value.between is not None and "moe" in info.data:
            has_experts = info.data["moe"] is not None
            problems += between_problems(value.between, value.learners, has_experts, zero, value.delay)
            problems += via_problems(value.between) if value.via == "all_reduce" else []
        elif value.learners > 1 and value.between is None:
            problems.append(
                f"sync.learners is {value.learners} but sync.between is null, so they would share nothing. Add a policy"
                " for each class of parameters to sync.between, or use learners: 1."
            )
        refuse_all(problems, value)
        return value

    @field_validator("optim")
    @classmethod
    def _muon_needs_whole_matrices(cls, value: OptimSection, info: ValidationInfo) -> OptimSection:
        if value.kind != "muon":
            return value
        problems = []
        if "parallel" in info.data and info.data["parallel"].zero:
            problems.append(
                f"optim.kind is muon but parallel.zero is {info.data['parallel'].zero}; Muon needs whole matrices,"
                " which ZeRO 1 and 2 cut into pieces. Use zero: 0, or kind: adamw."
            )
        between = info.data["sync"].between if "sync" in info.data else None
        if between is not None and between.sends_gradients:
            problems.append(
                f"optim.kind is muon but sync.between.dense.policy is {between.dense.policy}, where the optimizer is"
                " the syncer's, which moves flat vectors and knows no matrices. Use kind: adamw or sgd, or a policy"
                " that sends deltas."
            )
        refuse_all(problems, value)
        return value

    @field_validator("train")
    @classmethod
    def _fits_the_sections_before(cls, value: TrainSection, info: ValidationInfo) -> TrainSection:
        moe, parallel, optim = (info.data.get(name) for name in ("moe", "parallel", "optim"))
        problems = [] if optim is None else _schedule_problems(value, optim)
        if value.precision == "float64" and parallel is not None and parallel.zero:
            problems.append(
                f"train.precision is float64 but parallel.zero is {parallel.zero}; ZeRO 1 and 2 keep their own"
                " partition in float32. Use zero: 0."
            )
        if value.precision == "float64" and moe is not None and moe.products == "grouped":
            problems.append(
                "moe.products is grouped but train.precision is float64, for which torch has no grouped products. Use"
                " products: auto."
            )
        refuse_all(problems, value)
        return value

    @field_validator("deepspeed")
    @classmethod
    def _keeps_contracts(cls, value: dict[str, Any]) -> dict[str, Any]:
        problems = refused_options(value)
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            problems.append(f"deepspeed does not fit into a JSON file: {error}. Use numbers, text, lists and mappings.")
        refuse_all(problems, value)
        return value

    def warnings(self) -> list[str]:
        """Gives a sentence for each entry that is allowed but outside what is usual."""
        sentences = []
        for index, term in enumerate(self.moe.balance if self.moe else []):
            low, high = _USUAL_COEFFICIENT[term.loss]
            effect = "outweighs the language-model loss" if term.coefficient > high else "changes next to nothing"
            if term.coefficient and not low <= term.coefficient <= high:
                sentences.append(
                    f"moe.balance.{index}.coefficient is {term.coefficient:g} for {term.loss}; usual are {low:g} to"
                    f" {high:g}. Such a value {effect}."
                )
        if self.sync.between is not None:
            sentences += between_warnings(self.sync.between)
        limit = self.moe.capacity if self.moe else None
        if self.moe and limit and limit.eval_factor and (limit.policy != "position" or self.moe.top_k > 1):
            sentences.append(
                f"moe.capacity.eval_factor is {limit.eval_factor:g} with policy {limit.policy} and top_k"
                f" {self.moe.top_k}: whether a token is dropped then depends on later tokens too, so held-out figures"
                " are not those of a causal model. Leave eval_factor out."
            )
        if self.moe and self.moe.router.compute == "bfloat16":
            sentences.append(
                "moe.router.compute is bfloat16, in which many tokens go to other experts than their scores say. It"
                " exists to show that; use float32 for anything else."
            )
        return sentences

    def micro_batch_size(self, world_size: int) -> int:
        """Gives the number of sequences in one micro-batch on one of `world_size` ranks.

        Raises:
            RecipeError: if the global batch does not divide over ranks and micro-batches.
        """
        batch, accumulation = self.train.global_batch, self.train.accumulation
        share = world_size * accumulation
        if batch % share == 0:
            return batch // share
        repairs = [f"--set train.global_batch={near}" for near in nearest_multiples(batch, share)]
        if batch % world_size == 0:
            repairs += [
                f"--set train.accumulation={near}" for near in nearest_divisors(batch // world_size, accumulation)
            ]
        raise RecipeError(
            f"train.global_batch is {batch} but {_ranks(world_size)} with train.accumulation {accumulation} take"
            f" {share} equal micro-batches a step. Use {alternatives(repairs)}."
        )

    def check_world(self, world_size: int) -> None:
        """Checks that a launch with `world_size` ranks can train this recipe.

        Raises:
            RecipeError: if the expert-parallel size does not divide the ranks, or the batch does not divide over them.
        """
        problems = []
        if world_size % self.parallel.expert:
            experts = self.moe.num_experts if self.moe else 1
            allowed = [size for size in range(1, world_size + 1) if world_size % size == 0 and experts % size == 0]
            repairs = alternatives(f"--set parallel.expert={size}" for size in allowed)
            ranks = alternatives(nearest_multiples(world_size, self.parallel.expert))
            problems.append(
                f"parallel.expert is {self.parallel.expert} but the launch has {_ranks(world_size)}; expert groups"
                f" of that size must fill the launch. Use {repairs}, or launch {ranks} ranks."
            )
        try:
            self.micro_batch_size(world_size)
        except RecipeError as error:
            problems.append(str(error))
        if problems:
            raise RecipeError("\n".join(problems))


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _layout_problems(parallel: ParallelSection, moe: MoeSection | None) -> list[str]:
    """What keeps experts from being spread as the recipe says."""
    if moe is None:
        if parallel.expert == 1:
            return []
        return [
            f"parallel.expert is {parallel.expert} but moe is null; a dense model has no experts to spread."
            " Use expert: 1, or add a moe section."
        ]
    problems = []
    if moe.num_experts % parallel.expert:
        experts = alternatives(nearest_multiples(moe.num_experts, parallel.expert))
        ranks = alternatives(nearest_divisors(moe.num_experts, parallel.expert))
        problems.append(
            f"moe.num_experts is {moe.num_experts} but parallel.expert is {parallel.expert}; the experts"
            f" must divide evenly over the expert ranks. Use {experts} experts, or expert: {ranks}."
        )
    if moe.dispatcher == "local" and parallel.expert > 1:
        problems.append(
            f"moe.dispatcher is local but parallel.expert is {parallel.expert}, so most experts are elsewhere. Use"
            " dispatcher: auto, or expert: 1."
        )
    return problems


def _schedule_problems(train: TrainSection, optim: OptimSection) -> list[str]:
    """What keeps the learning rate's schedule from fitting into the steps."""
    schedule = optim.schedule
    if schedule.warmup >= train.steps:
        return [
            f"optim.schedule.warmup is {schedule.warmup} but train.steps is {train.steps}; warmup must end before"
            f" training does. Use warmup: {train.steps - 1} at most, or steps: {schedule.warmup + 1} at least."
        ]
    if schedule.kind == "wsd" and schedule.warmup + max(1, round(schedule.decay * train.steps)) > train.steps - 1:
        return [
            f"optim.schedule.warmup is {schedule.warmup} and decay takes {schedule.decay:g} of the"
            f" {train.steps} steps, so they overlap and the rate never reaches lr. Use decay:"
            f" {max(train.steps - 1 - schedule.warmup, 0) / train.steps:g} at most, or a shorter warmup."
        ]
    return []
