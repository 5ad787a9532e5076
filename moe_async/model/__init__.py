"""The decoder: attention, transformer blocks of dense and MoE layers, and its construction from a recipe."""

from moe_async.model.build import build_model
from moe_async.model.transformer import ModelOutput, Transformer

__all__ = ["ModelOutput", "Transformer", "build_model"]
