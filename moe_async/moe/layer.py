"""The MoE layer: route, dispatch, merge.

Shape letters: B... leading shape, T tokens (all of B... in one row), D model width, K experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_async.comm import World
from moe_async.errors import TopologyError
from moe_async.moe.dispatch import Dispatcher, DroplessDispatcher
from moe_async.moe.experts import Experts
from moe_async.moe.feed_forward import FeedForward
from moe_async.moe.router import TopKRouter
from moe_async.ops.balance import RoutingSums, routing_sums
from moe_async.ops.ffn import Activation
from moe_async.ops.routing import WeightRule
from moe_async.topology import Topology


class MoEOutput(NamedTuple):
    """What a layer gives back.

    Attributes:
        hidden: the layer's output, in the shape and dtype of its input.
        routing: sums over this rank's live tokens, for balance losses and load statistics.
        selection: int64 [..., K], the experts each token took; hand it back as ``selection`` to replay the routing.
    """

    hidden: Tensor
    routing: RoutingSums
    selection: Tensor


class MoELayer(nn.Module):
    """A sparse Mixture-of-Experts feed-forward layer.

    Experts of a layer that has a `World` are shards, not replicas: train it under `moe_async.initialize`, not under
    DistributedDataParallel, which would overwrite every rank's experts with rank 0's.

    ``y = sum_{i in top-k} g_i(x) * E_i(x)``, plus the shared expert where there is one. In one process it holds all
    experts; with a `World` it holds its rank's shard, and every rank of the expert group must call it equally often.

    Args:
        dim: model width.
        num_experts: routed experts in all.
        top_k: experts per token.
        expert_dim: width of each expert; ``2 * dim`` by default.
        expert: ``swiglu`` or ``gelu``.
        weights: ``normalised`` (the chosen probabilities sum to 1) or ``raw``; top-1 is always raw.
        shared_dim: width of the shared expert, 0 for none.
        compute_dtype: dtype of experts and of tokens on the wire; None: the dtype of the parameters.
        world: groups and topology; None for one process with all experts.
        seed: of the initial weights, which do not depend on torch's global seed; give each layer of a model its own.
        output_scale: factor on the initial standard deviation of output projections (depth scaling).

    Raises:
        TopologyError: sizes do not fit.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        expert_dim: int | None = None,
        *,
        expert: Activation = "swiglu",
        weights: WeightRule = "normalised",
        shared_dim: int = 0,
        compute_dtype: torch.dtype | None = None,
        world: World | None = None,
        seed: int = 0,
        output_scale: float = 1.0,
    ) -> None:
        super().__init__()
        world = world or World(Topology(num_experts=num_experts))
        topology = world.topology
        if not 1 <= top_k <= num_experts:
            raise TopologyError(f"top_k is {top_k} with {num_experts} experts; it must be 1 to {num_experts}.")
        if topology.num_experts != num_experts:
            raise TopologyError(
                f"the layer has {num_experts} experts but the topology was made for {topology.num_experts}; "
                f"use Topology(..., num_experts={num_experts})."
            )
        hidden = expert_dim or 2 * dim
        std = (dim**-0.5, output_scale * hidden**-0.5)
        self.router = TopKRouter(dim, num_experts, top_k, weights, init_std=dim**-0.5)
        self.experts = Experts(dim, hidden, topology.experts_of(world.rank), expert, compute_dtype, std)
        shared_std = (dim**-0.5, output_scale * max(shared_dim, 1) ** -0.5)
        self.shared = FeedForward(dim, shared_dim, expert, shared_std) if shared_dim else None
        self.dispatch: Dispatcher = DroplessDispatcher(world.expert, topology.slots())
        if not self.router.weight.is_meta:
            self.reset_parameters(seed)

    def forward(self, x: Tensor, token_mask: Tensor | None = None, *, selection: Tensor | None = None) -> MoEOutput:
        """Route, send, compute, return and merge.

        Args:
            x: [..., D].
            token_mask: bool, x's leading shape; False: the token gets zero output and counts nowhere.
            selection: int64 [..., K], a recorded routing to replay.
        """
        if token_mask is not None:
            check_mask(token_mask, x)
            # A masked token may hold anything, also infinities: as zeros it keeps every gradient finite.
            x = torch.where(token_mask[..., None], x, 0)
        live_T = None if token_mask is None else token_mask.reshape(-1)
        x_TD = x.reshape(-1, x.shape[-1])
        replay_TK = None if selection is None else selection.reshape(-1, self.router.top_k)
        with torch.autocast(x.device.type, enabled=False):
            logits_TE, chosen = self.router(x_TD, replay_TK)
            merged_TD = self.dispatch(x_TD, chosen, self.experts, live_T)
            routing = routing_sums(logits_TE, chosen.probs_TE, chosen.experts_TK, live_T)
        hidden = merged_TD.to(x.dtype).view_as(x)
        if self.shared is not None:
            # Without biases the shared expert of a zero token is zero, as it must be for a masked one.
            hidden = hidden + self.shared(x).to(x.dtype)
        return MoEOutput(hidden, routing, chosen.experts_TK.view(*x.shape[:-1], self.router.top_k))

    def reset_parameters(self, seed: int, name: str = "moe") -> None:
        """Draw all initial weights from ``seed``, ``name`` and global expert ids: the same at every expert-parallel
        size."""
        self.router.reset_parameters(seed, f"{name}.router")
        self.experts.reset_parameters(seed, f"{name}.experts")
        if self.shared is not None:
            self.shared.reset_parameters(seed, f"{name}.shared")


def check_mask(token_mask: Tensor, x: Tensor) -> None:
    """Refuse a mask that is not bool or has not the leading shape of ``x``."""
    if token_mask.dtype != torch.bool or token_mask.shape != x.shape[:-1]:
        raise ValueError(
            f"token_mask is {token_mask.dtype} {tuple(token_mask.shape)}; it must be torch.bool with the leading "
            f"shape of x, {tuple(x.shape[:-1])} (True: the token counts)."
        )
