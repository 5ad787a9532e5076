"""Recipes: the schema, the YAML loader and the DeepSpeed JSON that follows from a recipe. Needs no torch."""

from moe_async.recipe.architecture import ModelSection
from moe_async.recipe.balance import BalanceTerm
from moe_async.recipe.between import BetweenSection
from moe_async.recipe.compare import state_differences
from moe_async.recipe.deepspeed_config import deepspeed_config
from moe_async.recipe.loader import dump_recipe, load_recipe, parse_recipe
from moe_async.recipe.moe import CapacitySection, EveryLayers, MoeSection
from moe_async.recipe.routers import RouterSection, TopKRouter
from moe_async.recipe.schema import Recipe
from moe_async.recipe.sync import DelaySection, SyncSection
from moe_async.recipe.text import DataSection, SourceEntry
from moe_async.recipe.training import (
    ClassSection,
    LogSection,
    OptimSection,
    ParallelSection,
    ScheduleSection,
    TrainSection,
)

__all__ = [
    "BalanceTerm",
    "BetweenSection",
    "CapacitySection",
    "ClassSection",
    "DataSection",
    "DelaySection",
    "EveryLayers",
    "LogSection",
    "ModelSection",
    "MoeSection",
    "OptimSection",
    "ParallelSection",
    "Recipe",
    "RouterSection",
    "ScheduleSection",
    "SourceEntry",
    "SyncSection",
    "TopKRouter",
    "TrainSection",
    "deepspeed_config",
    "dump_recipe",
    "load_recipe",
    "parse_recipe",
    "state_differences",
]
