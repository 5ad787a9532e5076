"""Every way for tokens to travel gives the numbers of one process, and sends the bytes that its formula says."""

import pytest
import torch

from moe_async.comm import World, make_world
from moe_async.errors import TopologyError
from moe_async.moe import MoELayer
from moe_async.moe.classes import classify
from moe_async.moe.dispatchers import make_dispatcher
from moe_async.ops.balance import switch_loss
from moe_async.recipe import CapacitySection
from moe_async.topology import Topology
from tests.helpers.numerics import assert_close
from tests.helpers.spawn import run_ranks

DIM, EXPERTS, HIDDEN, VOCAB = 8, 8, 6, 16
# Sequences of each rank: unequal, one rank without any.
ROWS, LENGTH = [2, 0, 3, 1], 4
PLACEMENT = (3, 1, 4, 0, 5, 7, 2, 6)

WAYS = [
    {"dispatcher": "all_to_all"},
    {"dispatcher": "all_to_all", "deduplicate": True},
    {"dispatcher": "all_gather"},
]
LAYERS = {
    "plain": {"top_k": 3},
    "switch with jitter": {"top_k": 1, "router": {"kind": "switch", "jitter": 0.5}},
    "input": {"top_k": 2, "router": {"kind": "sigmoid_bias", "weights": "raw", "apply": "input"}},
    "gshard": {"top_k": 2, "router": {"kind": "gshard"}},
    "noisy": {"top_k": 2, "router": {"kind": "noisy_topk"}},
    "expert choice": {"top_k": 2, "router": {"kind": "expert_choice", "sees_the_future": True}},
    "hash": {"top_k": 2, "router": {"kind": "hash"}, "vocab_size": VOCAB},
    "zero experts and groups": {"top_k": 3, "zero_experts": 4, "device_groups": 4},
    "biases, dropout": {"top_k": 2, "expert": "swiglu_clamped", "expert_bias": True, "expert_dropout": 0.4},
    "capacity": {"top_k": 2, "capacity": CapacitySection(factor=0.7, policy="random", normalise="after")},
}


def inputs(rank):
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(ROWS[rank], LENGTH, DIM, generator=generator, dtype=torch.float64)
    direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    mask = torch.ones(x.shape[:-1], dtype=torch.bool)
    mask[1:, 2:] = False
    ids = torch.randint(0, VOCAB, x.shape[:-1], generator=generator)
    return x.requires_grad_(), direction, mask, ids


def run(layer, rank):
    """One pass of a layer over a rank's tokens; every rank has the same random state."""
    x, direction, mask, ids = inputs(rank)
    torch.manual_seed(5)
    hidden, routing, selection = layer(x, mask, ids)
    whole = routing.total()
    ((hidden * direction).sum() + 0.3 * switch_loss(whole)).backward()
    return {
        "hidden": hidden.detach(),
        "x_grad": x.grad,
        "selection": selection,
        "routing": [v.detach() for v in routing],
    }


def on_ranks(rank, world_size, expert_parallel, placement):
    world = make_world(Topology(world_size, expert_parallel, EXPERTS, placement))
    results = {}
    for name, options in LAYERS.items():
        for way in WAYS:
            layer = MoELayer(DIM, EXPERTS, expert_dim=HIDDEN, world=world, seed=7, **options, **way).double()
            result = run(layer, rank)
            result["grads"] = {}
            classes = classify(layer)
            for key, parameter in layer.named_parameters():
                group = world.expert_data if classes[key] == "expert" else world.everyone
                result["grads"][key] = group.all_reduce(parameter.grad)
            result["experts"] = layer.experts.expert_ids
            results[name, str(way)] = result
    return results


class Most:
    """Stands for all ranks of the reference, of which the first has most tokens but the third in a world of four."""

    def __init__(self, world_size):
        self.most = max(int(inputs(rank)[2].sum()) for rank in range(world_size))

    def all_reduce(self, tensor, op):
        assert op == "max" and int(tensor) <= self.most
        return torch.tensor(self.most)


def one_process(world_size, options):
    """Each rank's tokens through a layer that holds all experts."""
    results, grads = [], {}
    for rank in range(world_size):
        world = World(Topology(world_size, 1, EXPERTS), rank=rank)
        layer = MoELayer(DIM, EXPERTS, expert_dim=HIDDEN, world=world, seed=7, **options).double()
        layer.dispatch.group = type(layer.dispatch.group)(ranks=(rank,))
        if layer.limit is not None:
            layer.limit.everyone = Most(world_size)
        results.append(run(layer, rank))
        for key, parameter in layer.named_parameters():
            grads[key] = grads.get(key, 0) + parameter.grad
    return results, grads


@pytest.mark.parametrize(
    ("world_size", "expert_parallel", "placement"),
    [(2, 2, ()), (4, 4, ()), (4, 2, PLACEMENT)],
    ids=["W2-EP2", "W4-EP4", "W4-EP2-placed"],
)
def test_every_dispatcher_gives_the_numbers_of_one_process(world_size, expert_parallel, placement):
    by_rank = run_ranks(world_size, on_ranks, world_size, expert_parallel, placement, timeout=120)
    for name, options in LAYERS.items():
        expected, grads = one_process(world_size, options)
        for rank, results in enumerate(by_rank):
            for way in WAYS:
                result, what = results[name, str(way)], f"{name} {way}"
                assert torch.equal(result["selection"], expected[rank]["selection"]), what
                for key in ("hidden", "x_grad"):
                    assert_close(result[key], expected[rank][key], what=f"{what} {key}")
                for value, wanted in zip(result["routing"], expected[rank]["routing"], strict=True):
                    assert_close(value, wanted, torch.float64, what)
                for key, grad in result["grads"].items():
                    ids = list(result["experts"]) if "experts" in key else slice(None)
                    assert_close(grad, grads[key][ids], what=f"{what} {key}")


TOKENS, TOP_K = 6, 3


def count_bytes(rank, wire):
    world = make_world(Topology(2, 2, EXPERTS))
    seen = {}
    for way in WAYS:
        layer = MoELayer(
            DIM, EXPERTS, TOP_K, HIDDEN, world=world, compute_dtype=torch.bfloat16, wire=wire, **way
        )  # fmt: skip
        layer.check_finite = False
        torch.manual_seed(rank)
        x = torch.randn(TOKENS + rank, DIM, requires_grad=True)
        before = world.expert.meter.bytes_sent
        output = layer(x)
        forward = world.expert.meter.bytes_sent - before
        output.hidden.sum().backward()
        seen[str(way)] = (forward, world.expert.meter.bytes_sent - before - forward, output.selection)
    return seen


@pytest.mark.parametrize(("wire", "size"), [("compute", 2), ("float32", 4)])
def test_bytes_on_the_wire_equal_the_formulas(wire, size):
    by_rank = run_ranks(2, count_bytes, wire)
    local = EXPERTS // 2
    for rank in range(2):
        other = 1 - rank
        tokens, others = TOKENS + rank, TOKENS + other

        def away(owner, there, way):
            """Pairs of token and expert, and of token and rank, that go from one rank to the other."""
            chosen = by_rank[owner][str(way)][2] // local == there
            return int(chosen.sum()), int(chosen.any(-1).sum())

        plain, dedup, gather = WAYS
        sent, received = away(rank, other, plain)[0], away(other, rank, plain)[0]
        rows = (sent + received) * DIM * size
        assert by_rank[rank][str(plain)][:2] == (8 * local + rows, rows)
        sent, received = away(rank, other, dedup)[1], away(other, rank, dedup)[1]
        assert by_rank[rank][str(dedup)][:2] == (
            16 + (sent + received) * DIM * size + sent * TOP_K * (8 + 4),
            (sent + received) * DIM * size + received * TOP_K * 4,
        )
        longest = TOKENS + 1
        assert by_rank[rank][str(gather)][:2] == (
            16 + longest * (DIM * size + TOP_K * (8 + 4)) + others * DIM * size,
            others * (DIM * size + TOP_K * 4) + tokens * DIM * size,
        )
        assert away(rank, other, dedup)[1] < away(rank, other, plain)[0]


def close_in_bfloat16(rank):
    world = make_world(Topology(2, 2, EXPERTS))
    outputs = []
    for way in [*WAYS, {"wire": "float32"}]:
        layer = MoELayer(DIM, EXPERTS, TOP_K, world=world, compute_dtype=torch.bfloat16, seed=1, **way)
        x = torch.randn(20, DIM, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        hidden = layer(x).hidden
        hidden.square().sum().backward()
        outputs.append((hidden.detach(), x.grad, layer.router.weight.grad))
    return outputs


def test_bfloat16_rows_stay_near_float32_ones():
    for outputs in run_ranks(2, close_in_bfloat16):
        for result in outputs[:-1]:
            for value, wanted in zip(result, outputs[-1], strict=True):
                scale = wanted.abs().max()
                assert_close(value / scale, wanted / scale, torch.bfloat16)


def local_for_two(rank):
    world = make_world(Topology(2, 2, EXPERTS))
    with pytest.raises(TopologyError, match="dispatcher is local but the expert group has 2 ranks"):
        make_dispatcher("local", False, world.expert, 4)


def test_local_needs_all_experts_here():
    run_ranks(2, local_for_two)


def refuse_together(rank):
    layer = MoELayer(DIM, EXPERTS, 2, world=make_world(Topology(2, 2, EXPERTS)))
    x = torch.randn(3, DIM)
    if rank == 1:
        x[2, 0] = float("inf")
    expected = r"1 of 3 tokens of x hold values that are not finite, the first at \[2\]" if rank else "another rank"
    with pytest.raises(ValueError, match=expected):
        layer(x)


def test_an_input_that_is_not_finite_is_refused_on_all_ranks_alike():
    run_ranks(2, refuse_together)
