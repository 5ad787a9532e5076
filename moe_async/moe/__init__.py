"""The MoE layer: router, experts, the dispatch of tokens to them, and the exchange between ranks."""

from moe_async.moe.layer import MoELayer, MoEOutput

__all__ = ["MoELayer", "MoEOutput"]
