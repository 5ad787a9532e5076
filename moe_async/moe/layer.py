"""The MoE layer: route, drop what does not fit, dispatch, merge.

Shape letters: B... leading shape, T tokens (all of B... in one row), D model width, K experts per token, E choices of
the router (experts, then zero experts).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from moe_async.comm import World
from moe_async.moe.checks import check_leading_shape, check_mask, check_selection, check_sizes, refuse_non_finite
from moe_async.moe.dispatch import Assignments, Dispatcher
from moe_async.moe.dispatchers import DispatchKind, make_dispatcher
from moe_async.moe.experts import Experts
from moe_async.moe.feed_forward import FeedForward
from moe_async.moe.limit import CapacityLimit, without
from moe_async.moe.router import Router
from moe_async.ops.ffn import Activation
from moe_async.ops.initialise import Init
from moe_async.ops.noise import Noise
from moe_async.ops.routing import Recorded, Selection, read_record, record
from moe_async.ops.sums import RoutingSums, routing_sums
from moe_async.recipe.moe import CapacitySection, parse_moe
from moe_async.recipe.routers import RouterSection
from moe_async.topology import Topology


class MoEOutput(NamedTuple):
    """What a layer gives back.

    Attributes:
        hidden: the layer's output, in the shape and dtype of its input.
        routing: sums over this rank's live tokens, one row per sequence, for balance losses and load statistics;
            ``routing.total()`` adds them up.
        selection: int64 [..., K], the experts each token took; ``-1 - e`` where expert e was not taken after all (by
            GShard's draw, or an empty place of expert choice, which has as many places as its most taken token), and
            ``-1 - E - e`` where it was full. Hand it back as ``selection`` to replay the routing.
    """

    hidden: Tensor
    routing: RoutingSums
    selection: Tensor


class MoELayer(nn.Module):
    """A sparse Mixture-of-Experts feed-forward layer.

    Experts of a layer that has a `World` are shards, not replicas: train it under `moe_async.initialize`, not under
    DistributedDataParallel, which would overwrite every rank's experts with rank 0's.

    ``y = sum_{i in chosen} g_i(x) * E_i(x)``, plus the shared expert where there is one. In one process it holds all
    experts; with a `World` it holds its rank's shard, and every rank of the expert group must call it equally often
    (with a capacity, in training, every rank of the learner).

    Args:
        dim: model width.
        num_experts: routed experts in all.
        top_k: experts per token.
        expert_dim: width of each expert; ``2 * dim`` by default.
        expert: ``swiglu``, ``gelu``, ``relu2`` or ``swiglu_clamped``.
        router: kind and options of the router, as the recipe's ``moe.router``: a mapping with ``kind``, or its class.
        zero_experts: further choices behind the experts, which give a token back as it is, times the weight.
        expert_bias: whether both matrices of an expert have a bias.
        expert_dropout: share of an expert's hidden values zeroed in training.
        shared_dim: width of the shared expert, 0 for none.
        shared_gate: whether a sigmoid of the token multiplies the shared expert.
        capacity: limit of tokens per expert, as the recipe's ``moe.capacity``; None: nothing is dropped.
        device_groups: equal groups of experts whose load the losses device and communication are about; 0: none.
        dispatcher: ``auto``, ``local``, ``all_to_all`` or ``all_gather``.
        deduplicate: with ``all_to_all``, a token with several experts on one rank travels there once.
        wire: dtype of the numbers that travel: ``compute``, that of the experts, or ``float32``.
        products: ``auto``, ``loop`` or ``grouped`` matrix products.
        compile: whether the experts run under ``torch.compile``.
        compute_dtype: dtype of experts; None: the dtype of the parameters.
        world: groups and topology; None for one process with all experts.
        vocab_size: token ids, needed by the hash router.
        seed: of the initial weights, which do not depend on torch's global seed; give each layer of a model its own.
        init: how the matrices begin.

    Raises:
        RecipeError: an option is not valid, or does not fit another.
        TopologyError: the layer does not fit its world.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        expert_dim: int | None = None,
        *,
        expert: Activation = "swiglu",
        router: RouterSection | Mapping[str, Any] | None = None,
        zero_experts: int = 0,
        expert_bias: bool = False,
        expert_dropout: float = 0.0,
        shared_dim: int = 0,
        shared_gate: bool = False,
        capacity: CapacitySection | Mapping[str, Any] | None = None,
        device_groups: int = 0,
        dispatcher: DispatchKind = "auto",
        deduplicate: bool = False,
        wire: Literal["compute", "float32"] = "compute",
        products: Literal["auto", "loop", "grouped"] = "auto",
        compile: bool = False,
        compute_dtype: torch.dtype | None = None,
        world: World | None = None,
        vocab_size: int | None = None,
        seed: int = 0,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        section = parse_moe(
            {
                "num_experts": num_experts,
                "zero_experts": zero_experts,
                "top_k": top_k,
                "router": router,
                "expert_dim": 2 * dim if expert_dim is None else expert_dim,
                "expert": expert,
                "expert_bias": expert_bias,
                "expert_dropout": expert_dropout,
                "shared_dim": shared_dim,
                "shared_gate": shared_gate,
                "capacity": capacity,
                "device_groups": device_groups or None,
                "dispatcher": dispatcher,
                "deduplicate": deduplicate,
                "wire": wire,
                "products": products,
                "compile": compile,
            }
        )
        world, init = world or World(Topology(num_experts=num_experts)), init or Init()
        check_sizes(section, vocab_size, world.topology)
        self.section = section
        self.zero_experts, self.device_groups, self.wire = zero_experts, device_groups, wire
        self.check_finite = True
        self._rank = world.rank
        self.limit = None
        if section.capacity is not None:
            self.limit = CapacityLimit(section.capacity, num_experts, top_k, world.everyone)
        self.router = Router(
            dim,
            num_experts,
            top_k,
            section.router,
            zero_experts=zero_experts,
            vocab_size=vocab_size,
            init=init,
        )
        self.experts = Experts(
            dim,
            section.expert_dim,
            world.topology.experts_of(world.rank),
            expert,
            compute_dtype,
            init,
            bias=expert_bias,
            dropout=expert_dropout,
            products=products,
            compile=compile,
        )
        self.shared = FeedForward(dim, shared_dim, expert, init) if shared_dim else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if shared_gate else None
        self.dispatch: Dispatcher = make_dispatcher(
            dispatcher, deduplicate, world.expert, world.topology.experts_per_rank
        )
        slots = world.topology.slots()
        self._slots = None if slots == tuple(range(num_experts)) else slots
        if not self.router.weight.is_meta:
            self.reset_parameters(seed)

    @property
    def draws_noise(self) -> bool:
        """Whether a forward pass in training draws random numbers."""
        router = self.router.section
        return bool(
            router.jitter
            or router.input_noise
            or router.kind in ("gshard", "noisy_topk")
            or self.experts.dropout
            or (self.limit is not None and self.limit.rule.policy == "random")
        )

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        selection: Tensor | None = None,
    ) -> MoEOutput:
        """Route, send, compute, return and merge.

        Args:
            x: [..., D]; the dimension before the last is the sequence.
            token_mask: bool, x's leading shape; False: the token gets zero output and counts nowhere.
            token_ids: int64, x's leading shape; for the hash router.
            selection: int64 [..., K], a recorded routing to replay.

        Raises:
            ValueError: a mask, ids or selection of the wrong shape; or, on all ranks of the expert group alike, values
                of x that are not finite (`check_finite`; `moe_async.initialize` turns it off, because the training step
                skips such a step and names the layer).
        """
        if token_mask is not None:
            check_mask(token_mask, x)
            # A masked token may hold anything, also infinities: as zeros it keeps every gradient finite.
            x = torch.where(token_mask[..., None], x, 0)
        check_leading_shape(x, token_ids=token_ids)
        if selection is not None:
            check_selection(selection, x, self.section)
        if self.check_finite:
            refuse_non_finite(x, self.dispatch.group)
        live_T = None if token_mask is None else token_mask.reshape(-1)
        x_TD = x.reshape(-1, x.shape[-1])
        noise = Noise.draw(self._rank) if self.training and self.draws_noise else None
        with torch.autocast(x.device.type, enabled=False):
            recorded = None
            if selection is not None:
                choices = self.router.weight.shape[0]
                recorded = read_record(selection.reshape(-1, selection.shape[-1]), choices)
            logits_TE, chosen = self.router(
                x_TD,
                recorded,
                live_T=live_T,
                token_ids_T=None if token_ids is None else _live_ids(token_ids, token_mask).reshape(-1),
                noise=noise,
            )
            executed, full_TK = self._limited(chosen, recorded, live_T, noise)
            merged_TD = self._run_experts(x_TD, executed, live_T, noise)
            routing = routing_sums(
                logits_TE,
                chosen,
                sequences=x.shape[:-2].numel() if x.dim() > 2 else 1,
                live_T=live_T,
                full_TK=full_TK,
                num_zero=self.zero_experts,
                device_groups=self.device_groups,
            )
        hidden = merged_TD.to(x.dtype).view_as(x)
        if self.shared is not None:
            # Without biases the shared expert of a zero token is zero, as it must be for a masked one.
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = shared * torch.sigmoid(self.shared_gate(x.to(self.shared_gate.weight.dtype)))
            hidden = hidden + shared.to(x.dtype)
        return MoEOutput(hidden, routing, record(chosen, full_TK).view(*x.shape[:-1], chosen.experts_TK.shape[-1]))

    def _limited(
        self, chosen: Selection, recorded: Recorded | None, live_T: Tensor | None, noise: Noise | None
    ) -> tuple[Selection, Tensor | None]:
        """The selection that is executed, and what was dropped; a replay drops what was dropped then."""
        full_TK = None if recorded is None else recorded.full_TK
        if recorded is None and self.limit is not None:
            full_TK = self.limit.full(chosen, live_T, noise, self.training)
        if full_TK is None:
            return chosen, None
        return without(chosen, full_TK, "before" if self.limit is None else self.limit.rule.normalise), full_TK

    def _run_experts(self, x_TD: Tensor, executed: Selection, live_T: Tensor | None, noise: Noise | None) -> Tensor:
        """The weighted sum of the chosen experts' outputs, [T, D] in the dtype of the weights."""
        experts_TK, sent_TK = executed.experts_TK, executed.taken_TK
        if live_T is not None:
            sent_TK = live_T[:, None].expand_as(experts_TK) if sent_TK is None else sent_TK & live_T[:, None]
        own_T1 = None
        if self.zero_experts:
            zero_TK = experts_TK >= self.router.num_experts
            given_TK = zero_TK if sent_TK is None else zero_TK & sent_TK
            own_T1 = torch.where(given_TK, executed.weights_TK, 0).sum(dim=-1, keepdim=True)
            sent_TK = ~zero_TK if sent_TK is None else sent_TK & ~zero_TK
            experts_TK = torch.where(zero_TK, 0, experts_TK)
        if self._slots is not None:
            experts_TK = torch.tensor(self._slots, device=experts_TK.device)[experts_TK]
        assignments = Assignments(
            experts_TK, executed.weights_TK, sent_TK, weigh_input=self.router.section.apply == "input"
        )
        wire = self.experts.row_dtype
        if self.wire == "float32":
            wire = torch.promote_types(wire, torch.float32)
        run = partial(self.experts, noise=noise, sources=self.dispatch.group.ranks)
        merged_TD = self.dispatch(x_TD, assignments, run, wire)
        return merged_TD if own_T1 is None else merged_TD + own_T1 * x_TD

    def reset_parameters(self, seed: int, name: str = "moe") -> None:
        """Draw all initial weights from ``seed``, ``name`` and global expert ids: the same at every expert-parallel
        size."""
        self.router.reset_parameters(seed, f"{name}.router")
        self.experts.reset_parameters(seed, f"{name}.experts")
        if self.shared is not None:
            self.shared.reset_parameters(seed, f"{name}.shared")
        if self.shared_gate is not None:
            gate = self.shared_gate.weight
            self.router.init.fill_(gate, gate.shape[1], seed, f"{name}.shared_gate.weight")


def _live_ids(token_ids: Tensor, token_mask: Tensor | None) -> Tensor:
    """Token ids, 0 for masked tokens, whose id may be none at all."""
    return token_ids if token_mask is None else torch.where(token_mask, token_ids, 0)
