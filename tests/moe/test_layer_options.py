"""Every option of the MoE layer in one process: outputs, sums and gradients equal the naive layer."""

import copy
import functools
import math
import pickle

import pytest
import torch

from moe_async.errors import RecipeError, TopologyError
from moe_async.moe import MoELayer
from moe_async.ops.balance import (
    communication_loss,
    device_loss,
    gshard_loss,
    importance_loss,
    load_loss,
    sequence_loss,
    switch_loss,
    z_loss,
)
from moe_async.ops.noise import Noise
from moe_async.recipe.moe import CapacitySection
from tests.helpers.numerics import assert_close
from tests.helpers.reference import naive_expert
from tests.helpers.reference_routing import (
    NAIVE_LOSSES,
    alive,
    count,
    naive_capacity,
    naive_drop,
    naive_order,
    naive_output,
    naive_route,
    naive_top_k,
)

DIM, EXPERTS, TOKENS, VOCAB = 5, 6, 14, 11
CPU = torch.device("cpu")
MASK = torch.arange(TOKENS).view(2, -1) % 4 != 2
BIAS = [0.5, -0.25, 0.0, 0.25, -0.5, 0.125]
float64 = functools.partial(torch.tensor, dtype=torch.float64)

LOSSES = {
    "switch": switch_loss,
    "gshard": gshard_loss,
    "importance": importance_loss,
    "z": z_loss,
    "sequence": sequence_loss,
    "load": load_loss,
    "device": functools.partial(device_loss, num_experts=EXPERTS, device_groups=3),
    "communication": functools.partial(communication_loss, num_experts=EXPERTS, device_groups=3, reach=2),
}
MORE = {
    "device": {"num_experts": EXPERTS, "groups": 3},
    "communication": {"num_experts": EXPERTS, "groups": 3, "reach": 2},
}

ROUTERS = {
    "topk": ({"kind": "topk"}, 2),
    "topk raw": ({"kind": "topk", "weights": "raw", "scale": 1.5}, 3),
    "topk 1": ({"kind": "topk"}, 1),
    "topk after, bias": ({"kind": "topk", "softmax": "after", "bias": True}, 2),
    "topk groups": ({"kind": "topk", "groups": {"number": 3, "keep": 2, "top": 1}}, 2),
    "switch": ({"kind": "switch", "jitter": 0.0}, 1),
    "gshard": ({"kind": "gshard"}, 2),
    "noisy_topk": ({"kind": "noisy_topk"}, 2),
    "expert_choice": ({"kind": "expert_choice", "sees_the_future": True}, 2),
    "sigmoid": ({"kind": "sigmoid_bias", "scale": 2.5, "groups": {"number": 3, "keep": 2}}, 2),
    "sqrt_softplus": ({"kind": "sigmoid_bias", "score": "sqrt_softplus", "weights": "raw"}, 2),
    "softmax with bias": ({"kind": "sigmoid_bias", "score": "softmax"}, 2),
    "hash": ({"kind": "hash", "score": "sigmoid", "scale": 2.0}, 2),
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(router=None, top_k=2, **options):
    """A layer in training, in float64; biases are not zero."""
    kind = (router or {}).get("kind")
    vocab = VOCAB if kind == "hash" else None
    layer = MoELayer(DIM, EXPERTS, top_k, 4, router=router, seed=3, vocab_size=vocab, **options).double()
    with torch.no_grad():
        layer.router.weight.mul_(2)
        for name, parameter in layer.named_parameters():
            if name.rpartition(".")[2] in ("bias", "noise_weight", "b_in", "b_out"):
                parameter.copy_(normal(*parameter.shape, seed=len(name)))
        if layer.router.bias_state is not None:
            layer.router.selection_bias[:EXPERTS] = torch.tensor(BIAS)
    return layer


def inputs(seed=0):
    return normal(2, TOKENS // 2, DIM, seed=seed)


def ids():
    return torch.randint(0, VOCAB, (2, TOKENS // 2), generator=torch.Generator().manual_seed(4))


def in_training(layer, *args, **kwargs):
    """The layer's output and the noise that it drew."""
    torch.manual_seed(6)
    noise = Noise.draw(0)
    torch.manual_seed(6)
    return layer(*args, **kwargs), noise


def naive_choice_of(layer, x, weights, mask=None, noise=None, routed_x=None):
    """What the naive router chooses; with the draws of ``noise`` in training."""
    section = layer.router.section.model_dump()
    bias, table = layer.router.bias_state, None
    if section["kind"] == "hash":
        table = layer.router.table.tolist()
    return naive_route(
        x if routed_x is None else routed_x,
        weights,
        section,
        layer.router.top_k,
        live=None if mask is None else mask.reshape(-1).tolist(),
        bias=None if bias is None else bias.bias_E.tolist(),
        table=table,
        ids=ids().reshape(-1).tolist(),
        uniform=None if noise is None else noise.uniform("second expert", (TOKENS,), CPU).tolist(),
        normal=None if noise is None else noise.normal("logits", (TOKENS, layer.router.weight.shape[0]), CPU),
    )


def twin_of(layer, x):
    weights = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    return weights, x.detach().reshape(TOKENS, DIM).clone().requires_grad_()


def assert_equal_layers(layer, output, x, expected, tokens, weights, x_ref, losses=(), dropped=None):
    """Outputs, sums and all gradients of the output and the balance losses.

    ``tokens`` are the naive choices before any drop.
    """
    routing, live = output.routing.total(), alive(tokens)
    choices = layer.router.weight.shape[0]
    assert routing.counts_E.tolist() == count([token.assignments for token in live], choices)
    assert routing.free_counts_E.tolist() == count([token.free for token in live], choices)
    assert routing.tokens.item() == len(live) and routing.bad_tokens.item() == 0
    assert routing.dropped_E.tolist() == ([0] * choices if dropped is None else dropped)
    assert_close(output.hidden, expected.view_as(output.hidden))
    direction = normal(TOKENS, DIM, seed=8)
    total, total_ref = (output.hidden.reshape(TOKENS, DIM) * direction).sum(), (expected * direction).sum()
    for name in losses:
        actual, wanted = LOSSES[name](routing), NAIVE_LOSSES[name](tokens, **MORE.get(name, {}))
        assert_close(actual, wanted, what=name)
        total, total_ref = total + 0.3 * actual, total_ref + 0.3 * wanted
    total.backward()
    total_ref.backward()
    assert_close(x.grad.view(TOKENS, DIM), x_ref.grad, what="x")
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == (weights[name].grad is None), name
        if parameter.grad is not None:
            assert_close(parameter.grad, weights[name].grad, what=name)


def compare(layer, mask, losses=(), **naive_options):
    """The layer as it is, training or not, against the naive one; without drops."""
    x = inputs().requires_grad_()
    kind = layer.router.section.kind
    output, noise = in_training(layer, x, mask, ids() if kind == "hash" else None)
    weights, x_ref = twin_of(layer, x)
    tokens = naive_choice_of(layer, x_ref, weights, mask, noise if layer.training else None)
    expected = naive_output(x_ref, tokens, weights, EXPERTS, layer.experts.kind, **naive_options)
    assert_equal_layers(layer, output, x, expected, tokens, weights, x_ref, losses)
    return output, tokens


# Every router


@pytest.mark.parametrize("mask", [None, MASK], ids=["all live", "masked"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_equals_the_naive_layer(name, training, mask):
    router, top_k = ROUTERS[name]
    layer = layer_of(router, top_k, shared_dim=3, device_groups=3).train(training)
    losses = [loss for loss in LOSSES if loss != "load" or (name == "noisy_topk" and training)]
    if name == "expert_choice":
        # A token's experts have no order here.
        losses.remove("gshard")
    if name == "noisy_topk" and not training:
        layer.router.noise_weight.requires_grad_(False)
    output, tokens = compare(layer, mask, losses)
    if name != "expert_choice":
        recorded = [
            [e if taken else -1 - e for e, taken in zip(token.experts, token.taken, strict=True)]
            for token in alive(tokens)
        ]
        flat = output.selection.reshape(TOKENS, -1)
        assert (flat if mask is None else flat[mask.reshape(-1)]).tolist() == recorded


def test_the_biased_routers_choose_other_experts_than_their_scores():
    for name in ("sigmoid", "sqrt_softplus", "softmax with bias"):
        routing = layer_of(*ROUTERS[name])(inputs()).routing.total()
        assert routing.counts_E.tolist() != routing.free_counts_E.tolist()


def test_rows_of_the_sums_are_the_sequences():
    layer, x = layer_of(ROUTERS["sigmoid"][0], device_groups=3), inputs()
    routing = layer(x, MASK).routing
    for row in range(2):
        alone = layer(x[row], MASK[row]).routing
        for name in routing._fields:
            assert_close(getattr(routing, name)[row], getattr(alone, name)[0], torch.float64, name)
    assert layer(x[:, :1]).routing.tokens.tolist() == [1, 1] and layer(x[0]).routing.tokens.tolist() == [7]
    assert layer(x.view(2, 1, 7, DIM)).routing.tokens.tolist() == [7, 7]


# Parts of the layer


@pytest.mark.parametrize("mask", [None, MASK], ids=["all live", "masked"])
@pytest.mark.parametrize(
    ("options", "naive"),
    [
        ({"zero_experts": 3, "top_k": 3, "device_groups": 3}, {}),
        ({"zero_experts": 2, "top_k": 1, "router": {"kind": "switch", "jitter": 0.0}}, {}),
        ({"zero_experts": 2, "router": {"kind": "sigmoid_bias", "score": "softmax"}, "device_groups": 3}, {}),
        ({"zero_experts": 2, "router": {"kind": "topk", "apply": "input"}}, {"apply": "input"}),
        ({"router": {"kind": "sigmoid_bias", "apply": "input"}, "top_k": 1, "shared_dim": 3}, {"apply": "input"}),
        ({"shared_dim": 3, "shared_gate": True}, {}),
        ({"expert": "swiglu_clamped", "expert_bias": True, "shared_dim": 3, "shared_gate": True}, {}),
        ({"expert": "swiglu_clamped", "shared_dim": 3}, {}),
        ({"expert": "relu2", "expert_bias": True, "zero_experts": 1, "shared_dim": 3}, {}),
        ({"expert": "gelu", "expert_bias": True, "router": {"kind": "topk", "apply": "input"}}, {"apply": "input"}),
    ],
    ids=str,
)
def test_parts_of_the_layer_equal_the_naive_layer(options, naive, mask):
    losses = ["switch", "gshard", "importance", "z", "sequence"]
    losses += ["device", "communication"] if "device_groups" in options else []
    layer = layer_of(**options)
    with torch.no_grad():
        # Far enough out for the limits of the clamped kind.
        layer.experts.w_in.mul_(4)
        if layer.shared is not None:
            layer.shared.w_in.mul_(30)
    output, _ = compare(layer, mask, losses, **naive)
    if options.get("zero_experts"):
        assert 0 < output.routing.total().counts_E[EXPERTS:].sum() < output.routing.total().counts_E.sum()


def test_the_shared_expert_is_of_the_kind_of_the_experts_without_biases():
    for kind in ("swiglu", "gelu", "relu2", "swiglu_clamped"):
        layer = layer_of(expert=kind, expert_bias=True, shared_dim=3)
        assert layer.shared.kind == kind and {name for name, _ in layer.shared.named_parameters()} == {"w_in", "w_out"}
    # gate 8 (limited to 7) and up 9 (limited to 7).
    layer = layer_of(expert="swiglu_clamped", shared_dim=1)
    with torch.no_grad():
        layer.experts.w_out.zero_()
        layer.shared.w_in.copy_(float64([[8.0, 0, 0, 0, 0], [9.0, 0, 0, 0, 0]]))
        layer.shared.w_out.fill_(1.0)
    hidden = layer(float64([[1.0, 0, 0, 0, 0]])).hidden
    assert_close(hidden, torch.full((1, DIM), 7 * 8 / (1 + math.exp(-1.702 * 7)), dtype=torch.float64))


def test_a_zero_expert_gives_the_token_back_by_hand():
    layer = MoELayer(2, 1, 1, 1, zero_experts=1, router={"kind": "switch"}).double().eval()
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[0.0, 0.0], [torch.log(torch.tensor(3.0)), 0.0]]))
    output = layer(float64([[1.0, 5.0]]))
    assert output.selection.tolist() == [[1]]
    assert_close(output.hidden, 0.75 * float64([[1.0, 5.0]]), torch.float32)


def test_weights_on_the_input_are_not_weights_on_the_output():
    x = inputs()
    outputs = [layer_of({"kind": "topk", "apply": apply})(x).hidden for apply in ("input", "output")]
    assert not torch.allclose(*outputs)


def test_experts_of_low_precision_take_weighted_inputs_too():
    layer = MoELayer(8, EXPERTS, 2, 8, router={"kind": "topk", "apply": "input"}, compute_dtype=torch.bfloat16)
    high = MoELayer(8, EXPERTS, 2, 8, router={"kind": "topk", "apply": "input"})
    x = normal(TOKENS, 8).float()
    assert layer(x).hidden.dtype == torch.float32
    assert_close(layer(x).hidden, high(x).hidden, torch.bfloat16)


# Capacity


def capacity_of(factor=0.5, **options):
    return CapacitySection(factor=factor, **options)


@pytest.mark.parametrize("policy", ["position", "probability", "random", "batch_prioritised"])
@pytest.mark.parametrize(("normalise", "mask"), [("before", MASK), ("after", None), ("after", MASK)])
@pytest.mark.parametrize(
    "options",
    [{"shared_dim": 3}, {"router": {"kind": "gshard"}}, {"zero_experts": 2, "top_k": 3}],
    ids=["topk", "gshard", "zero experts"],
)
def test_capacity_equals_the_naive_layer(policy, normalise, mask, options):
    layer = layer_of(**options, capacity=capacity_of(0.6, policy=policy, normalise=normalise))
    x = inputs().requires_grad_()
    output, noise = in_training(layer, x, mask)
    weights, x_ref = twin_of(layer, x)
    tokens = naive_choice_of(layer, x_ref, weights, mask, noise)
    top_k = layer.router.top_k
    draws = noise.uniform("drop", (TOKENS * top_k,), CPU).view(TOKENS, top_k).tolist()
    limit = naive_capacity(0.6, top_k, len(alive(tokens)), layer.router.weight.shape[0], 1)
    executed, dropped = naive_drop(tokens, naive_order(tokens, policy, draws), limit, EXPERTS, normalise)
    assert sum(dropped) > 0 and sum(dropped[EXPERTS:]) == 0
    expected = naive_output(x_ref, executed, weights, EXPERTS)
    losses = ["switch", "gshard", "importance", "z", "sequence"]
    assert_equal_layers(layer, output, x, expected, tokens, weights, x_ref, losses, dropped)
    choices = layer.router.weight.shape[0]
    recorded = [
        [
            e if now else -1 - choices - e if before else -1 - e
            for e, before, now in zip(was.experts, was.taken, token.taken, strict=True)
        ]
        for was, token in zip(alive(tokens), alive(executed), strict=True)
    ]
    flat = output.selection.reshape(TOKENS, -1)
    assert (flat if mask is None else flat[mask.reshape(-1)]).tolist() == recorded


def all_to_the_first(**options):
    """A top-1 layer whose router has expert 0 far ahead."""
    layer = layer_of({"kind": "topk"}, 1, **options)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0, 0] = 50.0
    x = inputs().abs() + 1
    return layer, x


def test_a_dropped_token_has_the_shared_expert_alone():
    layer, x = all_to_the_first(shared_dim=3, capacity=capacity_of(1.0))
    hidden = layer(x).hidden.reshape(TOKENS, DIM)
    flat = x.reshape(TOKENS, DIM)
    shared = torch.stack([naive_expert(row, layer.shared.w_in, layer.shared.w_out, "swiglu") for row in flat])
    # ceil(14 / 6) = 3 places.
    assert_close(hidden[3:], shared[3:])
    assert ((hidden[:3] - shared[:3]).norm(dim=-1) > 0).all()


def test_overload_shows_in_counts_and_loss_and_what_was_dropped():
    layer, x = all_to_the_first(capacity=capacity_of(1.0))
    output = layer(x)
    routing = output.routing.total()
    assert routing.counts_E.tolist() == [TOKENS, 0, 0, 0, 0, 0]
    assert routing.dropped_E.tolist() == [TOKENS - 3, 0, 0, 0, 0, 0] and routing.dropped.item() == TOKENS - 3
    assert output.routing.dropped.tolist() == [7 - 3, 7]
    # All the probability and all the assignments are of one expert.
    for loss in (switch_loss, gshard_loss, sequence_loss):
        assert_close(loss(routing), float64(float(EXPERTS)))
    assert output.selection.reshape(-1).tolist() == [0] * 3 + [-1 - EXPERTS] * (TOKENS - 3)
    assert torch.equal(output.hidden.reshape(TOKENS, DIM)[3:], torch.zeros(TOKENS - 3, DIM, dtype=torch.float64))


def test_evaluation_drops_nothing_unless_told_to():
    x = inputs()
    assert layer_of(capacity=capacity_of())(x).routing.dropped.sum() > 0
    whole = layer_of().eval()(x)
    dropless = layer_of(capacity=capacity_of()).eval()(x)
    assert torch.equal(dropless.hidden, whole.hidden) and (dropless.selection >= 0).all()
    for policy in ("position", "random"):
        limited = layer_of(capacity=capacity_of(None, eval_factor=0.5, policy=policy))
        assert limited(x).routing.dropped.sum() == 0
        # Without noise `random` is by position.
        by_position = layer_of(capacity=capacity_of(0.5, policy="position"))(x)
        assert torch.equal(limited.eval()(x).hidden, by_position.hidden)


def test_a_capacity_is_a_mapping_or_a_section():
    x, rule = inputs(), {"factor": 0.5, "policy": "probability", "minimum": 2}
    mapping, section = layer_of(capacity=rule), layer_of(capacity=CapacitySection(**rule))
    assert mapping.limit.rule == section.limit.rule == mapping.section.capacity
    assert mapping(x).routing.dropped.sum() > 0 and torch.equal(mapping(x).selection, section(x).selection)
    assert layer_of(capacity=None).limit is None


class OtherRanks:
    """A group whose other ranks have more tokens than this one."""

    size, calls = 2, 0

    def all_reduce(self, tensor, op):
        assert op == "max"
        self.calls += 1
        return tensor + 100


def test_the_capacity_follows_from_all_ranks_in_training_and_from_this_one_in_evaluation():
    x = inputs()
    layer = layer_of(capacity=capacity_of(0.5, eval_factor=0.5))
    alone = layer(x, MASK)
    assert alone.routing.dropped.sum() > 0
    layer.limit.everyone = OtherRanks()
    assert layer(x, MASK).routing.dropped.sum() == 0 and layer.limit.everyone.calls == 1
    # Nothing is asked of the others, who may not evaluate at all.
    assert torch.equal(layer.eval()(x, MASK).selection, alone.selection) and layer.limit.everyone.calls == 1


def test_evaluation_does_not_depend_on_the_other_tokens_of_the_batch():
    layer, x = layer_of(ROUTERS["sigmoid"][0], capacity=capacity_of()).eval(), inputs()
    alone = torch.stack([layer(row[None]).hidden[0] for row in x.reshape(TOKENS, DIM)])
    assert_close(layer(x).hidden.reshape(TOKENS, DIM), alone)


def test_the_least_capacity():
    layer, x = all_to_the_first(capacity=capacity_of(0.01, minimum=5))
    assert layer(x).routing.total().dropped_E[0] == TOKENS - 5


@pytest.mark.parametrize("normalise", ["before", "after"])
@pytest.mark.parametrize("policy", ["position", "probability", "batch_prioritised"])
def test_padding_changes_nothing(policy, normalise):
    options = {"shared_dim": 3, "device_groups": 3, "capacity": capacity_of(0.6, policy=policy, normalise=normalise)}
    layer, padded_layer = (layer_of(ROUTERS["sigmoid"][0], **options) for _ in range(2))
    x = normal(TOKENS, DIM).requires_grad_()
    padded = torch.cat([x[:5].detach(), torch.full((9, DIM), torch.nan), x[5:].detach()]).requires_grad_()
    mask = torch.ones(TOKENS + 9, dtype=torch.bool)
    mask[5:14] = False
    plain, output = layer(x), padded_layer(padded, mask)
    assert plain.routing.dropped.sum() > 0
    assert_close(output.hidden[mask], plain.hidden)
    assert torch.equal(output.hidden[~mask], torch.zeros(9, DIM, dtype=torch.float64))
    assert torch.equal(output.selection[mask], plain.selection)
    for name in plain.routing._fields:
        assert_close(getattr(output.routing, name), getattr(plain.routing, name), torch.float64, name)
    losses = [loss for name, loss in LOSSES.items() if name != "load"]
    for hidden, routing in ((plain.hidden, plain.routing), (output.hidden[mask], output.routing)):
        (hidden.square().sum() + sum(loss(routing.total()) for loss in losses)).backward()
    assert_close(padded.grad[mask], x.grad)
    assert torch.equal(padded.grad[~mask], torch.zeros(9, DIM, dtype=torch.float64))
    for parameter, other in zip(layer.parameters(), padded_layer.parameters(), strict=True):
        assert_close(other.grad, parameter.grad)


@pytest.mark.parametrize("name", ["gshard", "noisy_topk", "expert_choice", "hash"])
def test_padding_at_the_end_changes_nothing_for_other_routers(name):
    router, top_k = ROUTERS[name]
    layer, x, own = layer_of(router, top_k, device_groups=3).eval(), normal(TOKENS, DIM), ids().reshape(-1)
    padded, mask = torch.cat([x, torch.full((6, DIM), torch.inf)]), torch.arange(TOKENS + 6) < TOKENS
    given = (None, None) if name != "hash" else (own, torch.cat([own, own[:6]]))
    plain, output = layer(x, None, given[0]), layer(padded, mask, given[1])
    assert_close(output.hidden[mask], plain.hidden)
    assert not output.hidden[~mask].any()
    for field in plain.routing._fields:
        assert_close(getattr(output.routing, field), getattr(plain.routing, field), torch.float64, field)


# Noise


@pytest.mark.parametrize(
    ("option", "disturbed"),
    [
        ({"jitter": 0.25}, lambda x, noise: x * (0.75 + 0.5 * noise.uniform("jitter", (TOKENS, DIM), CPU).double())),
        ({"input_noise": 0.5}, lambda x, noise: x + 0.5 * noise.normal("input", (TOKENS, DIM), CPU)),
    ],
    ids=["jitter", "input noise"],
)
def test_the_routers_input_is_disturbed_in_training_alone(option, disturbed):
    layer, x = layer_of({"kind": "topk", **option}), inputs().requires_grad_()
    output, noise = in_training(layer, x)
    weights, x_ref = twin_of(layer, x)
    tokens = naive_choice_of(layer, x_ref, weights, routed_x=disturbed(x_ref, noise))
    expected = naive_output(x_ref, tokens, weights, EXPERTS)
    assert_equal_layers(layer, output, x, expected, tokens, weights, x_ref, ["switch", "z"])
    plain = layer_of({"kind": "topk"}).eval()(inputs())
    assert not torch.equal(output.hidden, plain.hidden)
    assert torch.equal(layer.eval()(inputs()).hidden, plain.hidden)


def test_a_switch_router_jitters_by_default():
    layer = layer_of({"kind": "switch"}, 1)
    first, second = (in_training(layer, inputs()) for _ in range(2))
    assert torch.equal(first[0].hidden, second[0].hidden)
    assert not torch.equal(layer(inputs()).hidden, first[0].hidden)
    assert not torch.equal(layer.eval()(inputs()).hidden, first[0].hidden)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all live", "masked"])
def test_expert_dropout_equals_the_naive_layer(mask):
    layer = layer_of(expert_dropout=0.25, expert_bias=True)
    x = inputs().requires_grad_()
    output, noise = in_training(layer, x, mask)
    weights, x_ref = twin_of(layer, x)
    tokens = naive_choice_of(layer, x_ref, weights, mask)
    sizes = count([token.experts for token in alive(tokens)], EXPERTS)
    factors = {
        e: (noise.uniform(f"expert {e}", (size, 4), CPU) >= 0.25).double() / 0.75 for e, size in enumerate(sizes)
    }
    expected = naive_output(x_ref, tokens, weights, EXPERTS, factors=factors)
    assert_equal_layers(layer, output, x, expected, tokens, weights, x_ref)
    plain = layer_of(expert_bias=True)(inputs(), mask).hidden
    assert not torch.equal(output.hidden, plain)
    assert torch.equal(layer.eval()(inputs(), mask).hidden, plain)


NOISY = [
    {"router": {"kind": "switch"}, "top_k": 1},
    {"router": {"kind": "topk", "jitter": 0.1}},
    {"router": {"kind": "topk", "input_noise": 0.1}},
    {"router": {"kind": "gshard"}},
    {"router": {"kind": "noisy_topk"}},
    {"expert_dropout": 0.5},
    {"capacity": capacity_of(0.5, policy="random", eval_factor=0.5)},
]


@pytest.mark.parametrize("options", NOISY, ids=str)
def test_evaluation_is_the_same_twice_and_draws_nothing(options):
    layer, x = layer_of(**options), inputs()
    state = torch.get_rng_state()
    trained = layer(x).hidden
    assert layer.draws_noise and not torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(layer(x).hidden, trained)
    layer.eval()
    state = torch.get_rng_state()
    first, second = layer(x), layer(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.hidden, second.hidden) and torch.equal(first.selection, second.selection)


def test_training_without_noise_draws_nothing():
    for router, top_k in (ROUTERS[name] for name in ("topk", "switch", "sigmoid", "expert_choice")):
        layer = layer_of(router, top_k, capacity=None if "future" in str(router) else capacity_of())
        state = torch.get_rng_state()
        layer(inputs())
        assert not layer.draws_noise and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("options", NOISY, ids=str)
def test_the_same_random_state_repeats_a_pass(options):
    layer, x = layer_of(**options), inputs()
    first, second = (in_training(layer, x)[0] for _ in range(2))
    assert torch.equal(first.hidden, second.hidden) and torch.equal(first.selection, second.selection)


# Replay


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_recorded_selection_is_replayed(name, training):
    router, top_k = ROUTERS[name]
    layer, x = layer_of(router, top_k, device_groups=3).train(training), inputs()
    given = ids() if name == "hash" else None
    first, _ = in_training(layer, x, MASK, given)
    again, _ = in_training(layer, x, MASK, given, selection=first.selection)
    assert torch.equal(again.hidden, first.hidden)
    assert torch.equal(again.selection[MASK], first.selection[MASK])
    if name == "gshard" and training:
        assert (first.selection < 0).any()
    assert_same_sums(again, first)


def assert_same_sums(actual, expected):
    for field in expected.routing._fields:
        assert_close(getattr(actual.routing, field), getattr(expected.routing, field), torch.float64, field)


@pytest.mark.parametrize("normalise", ["before", "after"])
@pytest.mark.parametrize("policy", ["position", "random"])
@pytest.mark.parametrize("options", [{}, {"router": {"kind": "gshard"}}, {"zero_experts": 2}], ids=str)
def test_a_replay_drops_what_was_dropped(policy, normalise, options):
    layer, x = layer_of(**options, capacity=capacity_of(0.5, policy=policy, normalise=normalise)), inputs()
    first, _ = in_training(layer, x, MASK)
    assert first.routing.dropped.sum() > 0
    # With other draws, and also in evaluation, where nothing would be dropped.
    for training in (True, False):
        again = layer.train(training)(x, MASK, selection=first.selection)
        assert torch.equal(again.selection[MASK], first.selection[MASK])
        assert_close(again.hidden, first.hidden)
        assert_same_sums(again, first)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("gshard", {}),
        ("noisy_topk", {}),
        ("expert_choice", {"rule": "raw"}),
        ("switch", {"rule": "raw"}),
        ("sigmoid", {"score": "sigmoid", "scale": 2.5, "bias": BIAS, "groups": (3, 2, 2)}),
        ("hash", {"score": "sigmoid", "scale": 2.0}),
    ],
)
def test_a_replay_takes_the_experts_it_is_given_with_weights_of_its_own_scores(name, rule):
    router, top_k = ROUTERS[name]
    layer, x = layer_of(router, top_k).eval(), inputs().requires_grad_()
    given = [[(t + 2 * j) % EXPERTS for j in range(top_k)] for t in range(TOKENS)]
    output = layer(x, None, ids(), torch.tensor(given).view(2, -1, top_k))
    assert output.selection.view(TOKENS, top_k).tolist() == given
    weights, x_ref = twin_of(layer, x)
    rows = zip(x_ref, given, strict=True)
    tokens = [naive_top_k(weights["router.weight"] @ row, top_k, experts=own, **rule) for row, own in rows]
    expected = naive_output(x_ref, tokens, weights, EXPERTS)
    assert_equal_layers(layer, output, x, expected, tokens, weights, x_ref, ["switch", "importance"])


def test_a_replay_leaves_out_what_was_not_executed():
    layer, x = layer_of(zero_experts=1), inputs()
    # Expert 3 with a place of its own, and expert 0 or the zero expert not executed.
    for other in (0, EXPERTS):
        recorded = torch.tensor([3, -1 - other]).expand(2, TOKENS // 2, 2)
        output = layer(x, selection=recorded)
        assert torch.equal(output.selection, recorded)
        assert output.routing.total().counts_E.tolist() == [0, 0, 0, TOKENS, 0, 0, 0]
        weights, x_ref = twin_of(layer, x)
        tokens = [naive_top_k(weights["router.weight"] @ row, 2, experts=[3, other]) for row in x_ref]
        for token in tokens:
            token.taken = [True, False]
        assert_close(output.hidden.view(TOKENS, DIM), naive_output(x_ref, tokens, weights, EXPERTS))


@pytest.mark.parametrize("dropped", [False, True], ids=["not taken", "dropped"])
@pytest.mark.parametrize("options", [{}, {"capacity": capacity_of(1.0, normalise="after")}], ids=["plain", "capacity"])
@pytest.mark.parametrize("shared_dim", [0, 3])
def test_nothing_executed_is_finite(options, shared_dim, dropped):
    layer = layer_of(shared_dim=shared_dim, expert_bias=True, device_groups=3, **options)
    x = inputs().requires_grad_()
    nothing = -1 - layer_of()(x).selection - (EXPERTS if dropped else 0)
    output = layer(x, selection=nothing)
    assert torch.equal(output.selection, nothing)
    routing = output.routing.total()
    assert routing.counts_E.sum() == routing.dropped.sum() == (2 * TOKENS if dropped else 0)
    values = [loss(output.routing.total()) for loss in LOSSES.values()]
    assert all(value.isfinite() for value in values)
    expected = layer.shared(x) if shared_dim else torch.zeros_like(x)
    assert_close(output.hidden, expected)
    (output.hidden.sum() + sum(values)).backward()
    assert x.grad.isfinite().all()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert not layer.experts.w_in.grad.any() and not layer.experts.b_out.grad.any()


# The router's parameters and buffers


@pytest.mark.parametrize("name", ROUTERS)
def test_a_frozen_router_gets_no_gradient(name):
    router, top_k = ROUTERS[name]
    layer, x = layer_of({**router, "freeze": True}, top_k), inputs().requires_grad_()
    output = layer(x, token_ids=ids())
    (output.hidden.square().sum() + switch_loss(output.routing.total())).backward()
    assert all(not p.requires_grad and p.grad is None for p in layer.router.parameters())
    assert layer.experts.w_in.grad.norm() > 0 and x.grad.norm() > 0
    assert all(p.requires_grad for p in layer_of(router, top_k).router.parameters())


@pytest.mark.parametrize("name", ["switch", "topk 1", "noisy_topk", "sigmoid", "hash", "expert_choice", "gshard"])
def test_the_router_learns_from_the_task_alone_and_from_the_loss_alone(name):
    router, top_k = ROUTERS[name]
    for part in (lambda out: out.hidden.square().sum(), lambda out: switch_loss(out.routing.total())):
        layer = layer_of(router, top_k)
        part(layer(inputs(), token_ids=ids())).backward()
        assert layer.router.weight.grad.norm() > 0


BUFFERS = ["selection_bias", "error_sum", "last_error"]


def biased_layer():
    layer = MoELayer(DIM, EXPERTS, 2, 4, router={"kind": "sigmoid_bias", "update": {"rule": "pid"}})
    for place, name in enumerate(BUFFERS):
        # Numbers that bfloat16 would round.
        getattr(layer.router, name).copy_(torch.arange(EXPERTS) / 3 + place)
    return layer


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64])
def test_the_selection_bias_stays_float32_with_its_value(cast):
    layer = biased_layer()
    before = {name: getattr(layer.router, name).clone() for name in BUFFERS}
    short = {torch.bfloat16: layer.bfloat16, torch.float16: layer.half, torch.float64: layer.double}[cast]
    for move in (lambda: layer.to(cast), short, lambda: layer.to("cpu", cast), lambda: copy.deepcopy(layer).to(cast)):
        moved = move()
        assert moved.experts.w_in.dtype == cast
        for name in BUFFERS:
            assert getattr(moved.router, name).dtype == torch.float32
            assert torch.equal(getattr(moved.router, name), before[name])
    assert layer.router.bias_state.bias_E is layer.router.selection_bias


def test_the_selection_bias_is_in_the_state_dict():
    layer, other = biased_layer(), MoELayer(DIM, EXPERTS, 2, 4, router={"kind": "sigmoid_bias"})
    state = layer.state_dict()
    assert {f"router.{name}" for name in BUFFERS} <= set(state)
    other.load_state_dict(state)
    low = {name: v.bfloat16() if v.is_floating_point() else v for name, v in state.items()}
    for name in BUFFERS:
        assert torch.equal(getattr(other.router, name), getattr(layer.router, name))
    for assign in (False, True):
        other = MoELayer(DIM, EXPERTS, 2, 4, router={"kind": "sigmoid_bias"})
        other.load_state_dict(low, assign=assign)
        for name in BUFFERS:
            assert getattr(other.router, name).dtype == torch.float32
            assert torch.equal(getattr(other.router, name), low[f"router.{name}"].float())
        assert other.router.bias_state.bias_E is other.router.selection_bias
    assert not any("selection_bias" in name for name in layer_of().state_dict())


def test_the_selection_bias_is_float32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        layer = MoELayer(DIM, EXPERTS, 2, 4, router={"kind": "sigmoid_bias"})
        layer.router.update_bias(torch.arange(EXPERTS), 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.router.weight.dtype == torch.float64 and layer.router.selection_bias.any()
    assert {getattr(layer.router, name).dtype for name in BUFFERS} == {torch.float32}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_layer_made_on_meta_is_filled_like_any_other(name):
    router, top_k = ROUTERS[name]
    options = {"router": router, "expert_bias": True, "shared_dim": 3, "shared_gate": True, "vocab_size": VOCAB}
    with torch.device("meta"):
        layer = MoELayer(DIM, EXPERTS, top_k, 4, **options)
    layer.to_empty(device="cpu")
    buffers = dict(layer.router.named_buffers())
    assert all(not value.is_meta for value in buffers.values())
    with torch.no_grad():
        for value in [*layer.parameters(), *buffers.values()]:
            value.fill_(7)
    layer.reset_parameters(5)
    direct = MoELayer(DIM, EXPERTS, top_k, 4, seed=5, **options)
    for values in (layer.named_parameters(), layer.named_buffers()):
        for key, value in values:
            assert torch.equal(value, {**dict(direct.named_parameters()), **dict(direct.named_buffers())}[key]), key
    if router["kind"] == "sigmoid_bias":
        assert all(
            getattr(layer.router, buffer).tolist() == [0.0] * EXPERTS
            and getattr(layer.router, buffer).dtype == torch.float32
            for buffer in BUFFERS
        )


def test_the_hash_table_follows_from_the_seed_and_is_in_the_state_dict():
    layers = [MoELayer(DIM, EXPERTS, 2, 4, router={"kind": "hash"}, vocab_size=50, seed=seed) for seed in (1, 1, 2)]
    tables = [layer.router.table for layer in layers]
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])
    assert tables[0].shape == (50, 2) and (tables[0][:, 0] != tables[0][:, 1]).all()
    assert layers[0].to(torch.float64).router.table.dtype == torch.int64
    # A layer that goes on from another's state routes as that one did, whatever its own seed.
    layers[2].load_state_dict(layers[1].state_dict())
    assert torch.equal(layers[2].router.table, tables[1])
    x, own = normal(9, DIM).float(), torch.arange(9)
    assert torch.equal(layers[2](x, token_ids=own).hidden, layers[1](x, token_ids=own).hidden)


@pytest.mark.parametrize(
    "options",
    [
        *({"router": router, "top_k": top_k} for router, top_k in ROUTERS.values()),
        *NOISY,
        {"zero_experts": 2, "shared_dim": 3, "shared_gate": True, "expert_bias": True, "device_groups": 2},
        {"wire": "float32", "dispatcher": "all_to_all", "deduplicate": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_layer_is_a_layer_of_its_own(options, copied):
    layer = layer_of(**options)
    before = {name: value.clone() for name, value in layer.state_dict().items() if torch.is_tensor(value)}
    twin = copied(layer)
    assert twin.section == layer.section and str(twin) == str(layer) and twin.training
    results = []
    for each in (layer, twin):
        x = inputs().requires_grad_()
        output, _ = in_training(each, x, MASK, ids())
        (output.hidden.square().sum() + switch_loss(output.routing.total())).backward()
        results.append((output.hidden, output.selection, x.grad, *(p.grad for p in each.parameters())))
    for value, expected in zip(*results, strict=True):
        assert (value is None) == (expected is None) and (value is None or torch.equal(value, expected))
    # Nothing is shared: what the copy learns is its own.
    with torch.no_grad():
        for value in (*twin.parameters(), *twin.buffers()):
            value.add_(1)
    for name, value in before.items():
        assert torch.equal(layer.state_dict()[name], value), name


# What is refused


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused_with_their_token(value):
    layer, x = layer_of(), inputs()
    x[1, 3, 2] = x[1, 5, 0] = value
    with pytest.raises(ValueError, match=r"2 of 14 tokens of x hold values that are not finite, the first at \[1, 3\]"):
        layer(x)
    with pytest.raises(ValueError, match=r"the first at \[3\]"):
        layer(x[1])
    layer.check_finite = False
    assert layer(x).routing.bad_tokens.tolist() == [0, 2]


@pytest.mark.parametrize("name", ROUTERS)
def test_masked_tokens_may_hold_anything(name):
    router, top_k = ROUTERS[name]
    layer, x = layer_of(router, top_k, shared_dim=3, shared_gate=True, expert_bias=True), inputs()
    clean, _ = in_training(layer, x, MASK, ids())
    x[0, 2], x[0, 6, 1], x[1, 3] = torch.nan, torch.inf, -torch.inf
    x.requires_grad_()
    output, _ = in_training(layer, x, MASK, ids())
    assert torch.equal(output.hidden, clean.hidden) and not output.hidden[~MASK].any()
    (output.hidden.sum() + sum(LOSSES[loss](output.routing.total()) for loss in ("switch", "z"))).backward()
    assert not x.grad[~MASK].any() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("anything", [-1, -5, VOCAB, 2**40])
def test_ids_of_masked_tokens_may_be_anything(anything):
    layer, x = layer_of(*ROUTERS["hash"]), inputs()
    clean = layer(x, MASK, ids())
    output = layer(x, MASK, ids().where(MASK, anything))
    assert torch.equal(output.hidden, clean.hidden)
    assert torch.equal(output.selection[MASK], clean.selection[MASK])
    assert_same_sums(output, clean)


@pytest.mark.parametrize("bad", [ids()[:1], ids().int(), ids().double(), ids()[..., None], ids().T], ids=str)
def test_token_ids_that_do_not_fit_are_refused(bad):
    with pytest.raises(
        ValueError, match=r"token_ids is .* it must be torch\.int64 with the leading shape of x, \(2, 7\)"
    ):
        layer_of(*ROUTERS["hash"])(inputs(), token_ids=bad)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s[:1],
        lambda s: s.int(),
        lambda s: s.double(),
        lambda s: s[:, 0],
        lambda s: s[..., :1],
        lambda s: s[..., :0],
        lambda s: torch.cat([s, s], dim=-1),
        lambda s: s[0, 0, 0],
    ],
)
def test_selections_that_do_not_fit_are_refused(change):
    recorded = layer_of()(inputs()).selection
    with pytest.raises(
        ValueError, match=r"selection is .* it must be torch\.int64 with the leading shape of x, \(2, 7\)"
    ):
        layer_of()(inputs(), selection=change(recorded))


@pytest.mark.parametrize("zero_experts", [0, 2])
@pytest.mark.parametrize("router", [ROUTERS["topk"][0], ROUTERS["sigmoid"][0], ROUTERS["expert_choice"][0]], ids=str)
def test_selections_of_experts_that_do_not_exist_are_refused(router, zero_experts):
    if zero_experts:
        router = {"kind": "topk"}
    layer, choices = layer_of(router, zero_experts=zero_experts), EXPERTS + zero_experts
    recorded = layer(inputs()).selection
    for expert in (choices, choices + 1, 10 * choices, -1 - 2 * choices, -(2**40)):
        recorded[1, 3, 1] = expert
        with pytest.raises(ValueError, match=rf"the selection holds {expert} but there are {choices} experts"):
            layer(inputs(), selection=recorded)
    for expert in (choices - 1, -1, -choices, -1 - choices, -2 * choices):
        recorded[1, 3, 1] = expert
        assert torch.equal(layer(inputs(), selection=recorded).selection, recorded)


def test_expert_choice_takes_selections_of_any_width():
    layer = layer_of(*ROUTERS["expert_choice"])
    for width in (1, 2, 5):
        recorded = torch.arange(width).expand(2, TOKENS // 2, width)
        assert torch.equal(layer(inputs(), selection=recorded).selection, recorded)


def test_a_hash_router_needs_ids_and_their_number():
    with pytest.raises(ValueError, match="the hash router chooses by token id; call the layer with token_ids"):
        layer_of(*ROUTERS["hash"])(inputs())
    with pytest.raises(TopologyError, match="say how many with vocab_size"):
        MoELayer(DIM, EXPERTS, 2, router={"kind": "hash"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": {"kind": "switch"}}, r"kind is switch but moe\.top_k is 2"),
        ({"router": {"kind": "gshard"}, "top_k": 1}, r"kind is gshard but moe\.top_k is 1"),
        ({"router": {"kind": "noisy_topk"}, "top_k": 1}, r"its softmax over the one expert taken is always 1"),
        (
            {"router": {"kind": "topk", "weights": "normalised"}, "top_k": 1},
            r"moe\.top_k is 1 but the weights of moe\.router are normalised",
        ),
        ({"router": {"kind": "gshard"}, "zero_experts": 1}, r"zero_experts is 1 but moe\.router\.kind is gshard"),
        (
            {"router": {"kind": "hash"}, "zero_experts": 1, "vocab_size": 9},
            r"only switch, topk and sigmoid_bias choose",
        ),
        ({"router": {"kind": "topk", "groups": {"number": 4, "keep": 1}}}, r"number is 4 but moe\.num_experts is 6"),
        ({"router": {"kind": "topk", "groups": {"number": 6, "keep": 1}}}, r"top is 2 but a group has 1 experts"),
        (
            {"router": {"kind": "topk", "groups": {"number": 6, "keep": 1, "top": 1}}},
            r"leaves 1 experts, but moe\.top_k is 2",
        ),
        ({"router": {"kind": "topk", "groups": {"number": 3, "keep": 1}}, "zero_experts": 1}, r"are in no group"),
        (
            {"router": {"kind": "sigmoid_bias", "update": {"experts_per_token": 3.0}}, "zero_experts": 1},
            r"experts_per_token is 3 with moe\.top_k 2 and 1 zero experts",
        ),
        (
            {"device_groups": 4},
            r"^device_groups is 4; it must divide moe\.num_experts, which is 6.*device_groups: 3 or 6",
        ),
        ({"device_groups": 1}, r"^device_groups is 1; it must be 2 or more"),
        ({"top_k": 7}, r"^top_k is 7; it must be from 1 to moe\.num_experts, which is 6"),
        ({"top_k": 0}, r"^top_k is 0; it must be 1 or more"),
        ({"expert_dim": -1}, r"^expert_dim is -1; it must be greater than 0"),
        ({"shared_gate": True}, r"^shared_gate is true; there is no shared expert, because shared_dim is 0"),
        ({"shared_dim": -1}, r"^shared_dim is -1; it must be 0 or more"),
        ({"expert_dropout": 1.0}, r"^expert_dropout is 1\.0; it must be less than 1"),
        ({"capacity": {"factor": 0}}, r"^capacity\.factor is 0; it must be greater than 0"),
        ({"capacity": {"factr": 1.0}}, r"capacity\.factr is not a known key\. Did you mean factor\?"),
        ({"capacity": 1.25}, r"^capacity is 1\.25; it must be a mapping of keys to values"),
        (
            {"capacity": {"factor": 1.0}, "router": ROUTERS["expert_choice"][0]},
            r"moe\.capacity is set but moe\.router\.kind is expert_choice",
        ),
        (
            {"capacity": {"factor": 1.0, "normalise": "after"}, "router": {"kind": "topk", "weights": "raw"}},
            r"moe\.capacity\.normalise is after but moe\.router\.weights is raw",
        ),
        ({"expert": "silu"}, r"^expert is 'silu'; it must be one of 'swiglu', 'gelu', 'relu2' or 'swiglu_clamped'"),
        ({"dispatcher": "global"}, r"^dispatcher is 'global'; it must be one of 'auto', 'local'"),
        ({"wire": "float16"}, r"^wire is 'float16'; it must be one of 'compute' or 'float32'. Did you mean float32\?"),
        ({"products": "fast"}, r"^products is 'fast'; it must be one of 'auto', 'loop' or 'grouped'"),
        ({"deduplicate": True, "dispatcher": "all_gather"}, r"^deduplicate is true; moe\.dispatcher is all_gather"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        MoELayer(DIM, EXPERTS, **{"top_k": 2, **options})


def test_all_wrong_options_are_named_at_once():
    with pytest.raises(RecipeError) as caught:
        MoELayer(DIM, EXPERTS, 7, shared_gate=True, device_groups=4, wire="float16", router={"kind": "best"})
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["top_k", "router.kind", "shared_gate", "device_groups", "wire"]


def test_a_router_that_does_not_exist_is_refused():
    with pytest.raises(RecipeError, match="it must be one of switch"):
        layer_of({"kind": "best"})
    with pytest.raises(RecipeError, match="sees_the_future: true"):
        layer_of({"kind": "expert_choice"})
