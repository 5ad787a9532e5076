"""The MoE layer in one process: outputs, sums and every gradient equal the loop over tokens."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from moe_async.comm import World
from moe_async.errors import RecipeError, TopologyError
from moe_async.moe import MoELayer
from moe_async.moe.dispatchers import make_dispatcher
from moe_async.ops.balance import switch_loss, z_loss
from moe_async.topology import Topology
from tests.helpers.numerics import assert_all_close, assert_close
from tests.helpers.reference import naive_moe, naive_switch_loss, naive_z_loss

DIM, EXPERTS, TOKENS = 8, 4, 16


def layer_and_weights(dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = MoELayer(DIM, EXPERTS, **{"top_k": 2, "expert_dim": 12, "seed": 3, **options}).to(dtype)
    weights = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    return layer, weights


@pytest.mark.parametrize(
    ("top_k", "given", "rule"),
    [
        (1, None, "raw"),
        (1, "raw", "raw"),
        (2, None, "normalised"),
        *((k, rule, rule) for k in (2, 4) for rule in ("normalised", "raw")),
    ],
)
@pytest.mark.parametrize("kind", ["swiglu", "gelu", "relu2"])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_naive_loop(top_k, given, rule, kind, masked):
    router = None if given is None else {"kind": "topk", "weights": given}
    layer, weights = layer_and_weights(top_k=top_k, router=router, expert=kind, shared_dim=6)
    x = torch.randn(2, TOKENS // 2, DIM, dtype=torch.float64).requires_grad_()
    x_ref = x.detach().clone().requires_grad_()
    mask = (torch.arange(TOKENS).view(2, -1) % 3 != 0) if masked else None

    hidden, rows, _ = layer(x, mask)
    routing = rows.total()
    assert rows.counts_E.shape == (2, EXPERTS) and rows.z_sum.shape == rows.tokens.shape == (2,)
    flat_mask = None if mask is None else mask.reshape(-1)
    expected, naive = naive_moe(x_ref.reshape(TOKENS, DIM), weights, top_k, rule, kind, flat_mask)

    assert routing.counts_E.dtype == torch.int64 and routing.counts_E.tolist() == naive.counts
    assert routing.tokens.item() == naive.tokens and routing.dropped.item() == 0
    assert_close(hidden, expected.view_as(hidden))
    assert_close(routing.prob_sum_E, naive.prob_sum)
    assert_close(routing.z_sum, naive.z_sum)
    assert routing.entropy_sum.item() == pytest.approx(naive.entropy_sum, rel=1e-12)

    direction = torch.randn_like(hidden)
    loss = (hidden * direction).sum() + 0.3 * switch_loss(routing) + 0.1 * z_loss(routing)
    balance = 0.3 * naive_switch_loss(naive, top_k) + 0.1 * naive_z_loss(naive)
    loss_ref = (expected * direction.view(TOKENS, DIM)).sum() + balance
    assert_close(loss, loss_ref)
    loss.backward()
    loss_ref.backward()
    assert_close(x.grad, x_ref.grad)
    assert_all_close(
        {name: p.grad for name, p in layer.named_parameters()}, {name: w.grad for name, w in weights.items()}
    )


def test_hand_written_example():
    """Two experts that scale by 2 and by 3 (GELU is linear enough far from zero), router logits ln 3 and 0."""
    layer = MoELayer(1, 2, 1, expert_dim=1, expert="gelu").double()
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[torch.log(torch.tensor(3.0))], [0.0]]) / 10)
        layer.experts.w_in.fill_(1.0)
        layer.experts.w_out.copy_(torch.tensor([2.0, 3.0]).view(2, 1, 1))
    hidden, routing, selection = layer(torch.tensor([[10.0]], dtype=torch.float64))
    # softmax(ln 3, 0) = (3/4, 1/4): expert 0 with its raw probability; gelu(10) = 10.
    assert hidden.item() == pytest.approx(0.75 * 2 * 10, rel=1e-6)
    assert routing.total().counts_E.tolist() == [1, 0] and selection.tolist() == [[0]]


def test_top_1_router_learns_from_the_task_loss():
    layer, _ = layer_and_weights(top_k=1)
    layer(torch.randn(TOKENS, DIM, dtype=torch.float64)).hidden.sum().backward()
    assert layer.router.weight.grad.norm() > 0


def test_a_top_1_router_that_would_learn_nothing_is_refused():
    with pytest.raises(RecipeError, match=r"over one expert the weight is always 1.*Use weights: raw"):
        layer_and_weights(top_k=1, router={"kind": "topk", "weights": "normalised"})


def test_equal_scores_pick_the_lowest_index():
    layer, _ = layer_and_weights(top_k=2)
    with torch.no_grad():
        layer.router.weight.zero_()
    assert layer(torch.randn(5, DIM, dtype=torch.float64)).selection.tolist() == [[0, 1]] * 5


def test_unused_experts_get_zero_gradients_and_not_none():
    layer, _ = layer_and_weights(top_k=1)
    with torch.no_grad():
        layer.router.weight.zero_()
    layer(torch.randn(5, DIM, dtype=torch.float64)).hidden.sum().backward()
    grad = layer.experts.w_in.grad
    assert grad[0].norm() > 0 and torch.equal(grad[1:], torch.zeros_like(grad[1:]))


@pytest.mark.parametrize("tokens", [0, 1])
def test_fewer_tokens_than_experts(tokens):
    layer, _ = layer_and_weights(shared_dim=4)
    x = torch.randn(tokens, DIM, dtype=torch.float64, requires_grad=True)
    hidden, rows, _ = layer(x)
    routing = rows.total()
    (hidden.sum() + switch_loss(routing) + z_loss(routing)).backward()
    assert hidden.shape == x.shape and routing.counts_E.sum() == 2 * tokens
    for parameter in layer.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()


def test_masked_tokens_change_nothing():
    layer, _ = layer_and_weights(shared_dim=4)
    x = torch.randn(6, DIM, dtype=torch.float64)
    padded = torch.cat([x, torch.full((3, DIM), float("inf"), dtype=torch.float64)]).requires_grad_()
    mask = torch.arange(9) < 6
    plain, with_padding = layer(x), layer(padded, mask)
    assert torch.equal(with_padding.hidden[:6], plain.hidden)
    assert torch.equal(with_padding.hidden[6:], torch.zeros(3, DIM, dtype=torch.float64))
    for name in plain.routing._fields:
        assert_close(getattr(with_padding.routing, name), getattr(plain.routing, name), torch.float64, name)
    (with_padding.hidden[:6].sum() + z_loss(with_padding.routing.total())).backward()
    assert padded.grad.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())


def test_replayed_selection_is_taken():
    layer, _ = layer_and_weights()
    x = torch.randn(4, DIM, dtype=torch.float64)
    recorded = torch.tensor([[3, 2]] * 4)
    replayed = layer(x, selection=recorded)
    assert replayed.routing.total().counts_E.tolist() == [0, 0, 4, 4] and torch.equal(replayed.selection, recorded)
    first = layer(x)
    assert torch.equal(layer(x, selection=first.selection).hidden, first.hidden)


def test_dtypes_of_router_experts_and_sums():
    layer = MoELayer(DIM, EXPERTS, 2, compute_dtype=torch.bfloat16)
    seen = {}
    layer.experts.register_forward_hook(lambda module, inputs, output: seen.update(i=inputs[0].dtype, o=output.dtype))
    hidden, routing, _ = layer(torch.randn(6, DIM))
    assert seen == {"i": torch.bfloat16, "o": torch.bfloat16}
    assert hidden.dtype == torch.float32
    assert routing.prob_sum_E.dtype == routing.z_sum.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, _ = layer.router(torch.randn(6, DIM, dtype=torch.bfloat16))
        assert logits.dtype == torch.float32 and layer(torch.randn(6, DIM)).routing.prob_sum_E.dtype == torch.float32


def test_bfloat16_experts_stay_near_float32():
    layer = MoELayer(DIM, EXPERTS, 2, seed=1)
    low = MoELayer(DIM, EXPERTS, 2, seed=1, compute_dtype=torch.bfloat16)
    x = torch.randn(TOKENS, DIM)
    x_low = x.clone().requires_grad_()
    x.requires_grad_()
    high_out, low_out = layer(x), low(x_low)
    assert torch.equal(high_out.selection, low_out.selection)
    assert_close(low_out.hidden, high_out.hidden, torch.bfloat16)
    high_out.hidden.sum().backward()
    low_out.hidden.sum().backward()
    assert functional.cosine_similarity(x.grad.flatten(), x_low.grad.flatten(), dim=0) > 0.999


def test_router_cast_to_bfloat16_is_refused():
    layer = MoELayer(DIM, EXPERTS, 2).to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"router's weight is torch\.bfloat16"):
        layer(torch.randn(2, DIM, dtype=torch.bfloat16))


def test_bad_arguments():
    layer, _ = layer_and_weights()
    x = torch.randn(3, DIM, dtype=torch.float64)
    with pytest.raises(RecipeError, match=r"top_k is 5; it must be from 1 to moe\.num_experts, which is 4.*top_k: 4"):
        MoELayer(DIM, EXPERTS, 5)
    for mask in (torch.ones(3), torch.ones(3, 1, dtype=torch.bool), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"token_mask is torch\..*it must be torch\.bool with the leading shape"):
            layer(x, mask)


def test_routes_the_same_twice():
    layer = MoELayer(DIM, EXPERTS, 2)
    x = torch.randn(64, DIM)
    assert torch.equal(layer(x).hidden, layer(x).hidden)


def test_a_layer_fits_its_world():
    with pytest.raises(
        TopologyError, match=r"the layer has 6 experts but the topology was made for 4; .*num_experts=6"
    ):
        MoELayer(DIM, 6, 2, world=World(Topology(1, 1, EXPERTS)))
    with pytest.raises(TopologyError, match=r"dispatcher is local but the expert group has 2 ranks.*dispatcher: auto"):
        make_dispatcher("local", False, SimpleNamespace(size=2), 2)


def test_a_state_dict_knows_its_experts():
    def shard(rank):
        return MoELayer(DIM, EXPERTS, 2, world=World(Topology(2, 2, EXPERTS), rank=rank))

    first, second = shard(0), shard(1)
    first.load_state_dict(shard(0).state_dict())
    with pytest.raises(ValueError, match=r"holds the experts \[0, 1\] but the layer holds \[2, 3\]"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_input_dtype_comes_back(dtype):
    layer = MoELayer(DIM, EXPERTS, 2, shared_dim=4)
    x = torch.randn(5, DIM, dtype=dtype)
    assert layer(x).hidden.dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).hidden.dtype == dtype
