"""The MoE layer gives the same numbers at every expert-parallel size: real processes, gloo, float64."""

import pytest
import torch

from moe_async.comm import make_world
from moe_async.moe import MoELayer
from moe_async.moe.classes import classify
from moe_async.ops.balance import switch_loss, z_loss
from moe_async.topology import Topology
from tests.helpers.numerics import assert_all_close, assert_close
from tests.helpers.reference import naive_moe, naive_switch_loss, naive_z_loss
from tests.helpers.spawn import RankFailure, run_ranks

DIM, EXPERTS, TOP_K, HIDDEN = 8, 8, 2, 6
PLACEMENT = (3, 1, 4, 0, 5, 7, 2, 6)

# Tokens of each rank: unequal, one rank without any, fewer tokens than experts.
UNEQUAL = [5, 0, 9, 2]


def inputs(rank, tokens):
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, DIM, generator=generator, dtype=torch.float64)
    return x, torch.randn(tokens, DIM, generator=generator, dtype=torch.float64)


def objective(hidden, direction, switch, z):
    return (hidden * direction).sum() + 0.3 * switch + 0.1 * z


def run_layer(rank, world_size, expert_parallel, tokens, placement, skew):
    world = make_world(Topology(world_size, expert_parallel, EXPERTS, placement))
    layer = MoELayer(DIM, EXPERTS, TOP_K, HIDDEN, world=world, seed=7).double()
    if skew:
        skew_router(layer.router.weight)
    x, direction = inputs(rank, tokens[rank])
    x.requires_grad_()
    hidden, rows, _ = layer(x)
    routing = rows.total()
    objective(hidden, direction, switch_loss(routing), z_loss(routing)).backward()
    classes = classify(layer)
    grads = {}
    for name, parameter in layer.named_parameters():
        group = world.expert_data if classes[name] == "expert" else world.everyone
        assert parameter.grad is not None, name
        grads[name] = group.all_reduce(parameter.grad) / world.size
    return {
        "hidden": hidden.detach(), "x_grad": x.grad, "grads": grads, "counts": routing.counts_E,
        "experts": layer.experts.expert_ids, "weights": {name: p.detach() for name, p in layer.named_parameters()},
    }  # fmt: skip


def skew_router(weight):
    """Only experts 0 and 1 are ever chosen, so most ranks receive nothing."""
    with torch.no_grad():
        weight.zero_()


def reference(world_size, tokens, skew):
    """All experts in one process, looping over every rank's tokens; gradients of the mean over ranks."""
    layer = MoELayer(DIM, EXPERTS, TOP_K, HIDDEN, seed=7).double()
    if skew:
        skew_router(layer.router.weight)
    weights = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    ranks, total = [], 0
    for rank in range(world_size):
        x, direction = inputs(rank, tokens[rank])
        x.requires_grad_()
        hidden, routing = naive_moe(x, weights, TOP_K)
        total = total + objective(hidden, direction, naive_switch_loss(routing, TOP_K), naive_z_loss(routing))
        ranks.append((x, hidden.detach(), routing.counts))
    total.backward()
    return ranks, {name: w.grad / world_size for name, w in weights.items()}, weights


@pytest.mark.parametrize("skew", [False, True], ids=["routed", "two experts only"])
@pytest.mark.parametrize(
    ("world_size", "expert_parallel", "placement"),
    [(1, 1, ()), (2, 1, ()), (2, 2, ()), (4, 2, ()), (4, 4, ()), (4, 2, PLACEMENT)],
    ids=["W1-EP1", "W2-EP1", "W2-EP2", "W4-EP2", "W4-EP4", "W4-EP2-placed"],
)
def test_same_numbers_at_every_expert_parallel_size(world_size, expert_parallel, placement, skew):
    tokens = UNEQUAL[:world_size]
    results = run_ranks(world_size, run_layer, world_size, expert_parallel, tokens, placement, skew)
    ranks, grads, weights = reference(world_size, tokens, skew)
    for result, (x, hidden, counts) in zip(results, ranks, strict=True):
        assert_close(result["hidden"], hidden)
        assert_close(result["x_grad"], x.grad if x.grad is not None else torch.zeros_like(x))
        assert result["counts"].tolist() == counts
        for name, grad in result["grads"].items():
            ids = list(result["experts"]) if "experts" in name else slice(None)
            assert_close(grad, grads[name][ids], what=name)
            # The same initial model at every size: bit for bit, by global expert id.
            assert torch.equal(result["weights"][name], weights[name][ids]), name


def run_dtype(rank, compute_dtype):
    world = make_world(Topology(2, 2, EXPERTS))
    layer = MoELayer(DIM, EXPERTS, TOP_K, HIDDEN, world=world, compute_dtype=compute_dtype)
    import torch.distributed as dist

    torch.manual_seed(rank)
    sent, plain = [], dist.all_to_all_single

    def spy(output, tensor, *args, **kwargs):
        sent.append((tensor.dtype, tensor.numel() * tensor.element_size()))
        return plain(output, tensor, *args, **kwargs)

    dist.all_to_all_single = spy
    layer(torch.randn(10, DIM, requires_grad=True)).hidden.sum().backward()
    dist.all_to_all_single = plain
    return sent


def test_bfloat16_halves_the_bytes_on_the_wire():
    low, high = run_ranks(2, run_dtype, torch.bfloat16)[0], run_ranks(2, run_dtype, None)[0]
    assert [dtype for dtype, _ in low] == [torch.int64] + [torch.bfloat16] * 4
    assert [dtype for dtype, _ in high] == [torch.int64] + [torch.float32] * 4
    for (_, low_bytes), (_, high_bytes) in zip(low[1:], high[1:], strict=True):
        assert high_bytes == 2 * low_bytes
    assert high[1][1] == 10 * TOP_K * DIM * 4


def raise_on_rank_1(rank):
    if rank == 1:
        raise ValueError("planned")
    make_world(Topology(2, 2, 2)).everyone.barrier()


def wait_forever(rank):
    if rank == 0:
        make_world(Topology(2, 2, 2))


def test_spawn_helper_tells_who_failed_and_who_hung():
    with pytest.raises(RankFailure, match=r"rank 1 raised[\s\S]*ValueError: planned"):
        run_ranks(2, raise_on_rank_1)
    with pytest.raises(RankFailure, match="hung"):
        run_ranks(2, wait_forever, timeout=6)


def test_all_close_helper_sees_a_scale_error():
    with pytest.raises(AssertionError, match="w:"):
        assert_all_close({"w": torch.ones(2)}, {"w": torch.full((2,), 1.001)})
