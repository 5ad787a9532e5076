"""The decoder: against the loop over tokens and heads, causality, masks, and recomputation."""

import functools

import pytest
import torch

from moe_async.model import build_model
from moe_async.moe import MoELayer
from moe_async.ops.balance import switch_loss, z_loss
from moe_async.ops.routing import highest_k
from tests.helpers.numerics import assert_all_close, assert_close
from tests.helpers.reference import naive_switch_loss, naive_transformer, naive_z_loss
from tests.helpers.small import SMALL, small_recipe

ROWS, LENGTH, VOCAB = 2, 6, 32
SHAPE = {"layers": 2, "heads": 4, "kv_heads": 2, "top_k": 2}
float64 = functools.partial(torch.tensor, dtype=torch.float64)


def tokens_of(rows=ROWS, length=LENGTH, seed=0):
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def model_of(**changes):
    """A dense and an MoE layer, with norms that are not all ones."""
    model = build_model(small_recipe(**changes))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def training(**changes):
    """The `train` section of the small recipe with entries replaced."""
    return {**SMALL["train"], **changes}


def objective(output):
    """A loss that reaches every output: logits in a fixed direction, and both balance losses."""
    logits = output.logits.flatten()
    direction = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).to(logits.dtype)
    totals = [sums.total() for sums in output.routing]
    balance = sum(sums.tokens * (0.5 * switch_loss(sums) + 0.1 * z_loss(sums)) for sums in totals)
    return (logits * direction).sum() + balance


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("masked", [False, True], ids=["all live", "masked"])
def test_equals_the_naive_transformer_including_gradients(masked):
    model, tokens = model_of(), tokens_of()
    mask = None
    if masked:
        mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
        mask[1, 3:] = False
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    output = model(tokens, mask)
    expected, (routing,) = naive_transformer(tokens, weights, mask=mask, **SHAPE)

    assert_close(output.logits, expected)
    (rows,) = output.routing
    sums = rows.total()
    assert rows.counts_E.shape == (ROWS, 4)
    assert sums.counts_E.tolist() == routing.counts and sums.tokens.item() == routing.tokens
    assert_close(sums.prob_sum_E, routing.prob_sum)
    assert_close(sums.entropy_sum, float64(routing.entropy_sum))
    direction = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    loss = (output.logits * direction).sum() + switch_loss(sums) + z_loss(sums)
    twin = (expected * direction).sum() + naive_switch_loss(routing, 2) + naive_z_loss(routing)
    assert_close(loss, twin)
    loss.backward()
    twin.backward()
    assert_all_close(gradients(model), {name: weight.grad for name, weight in weights.items()})


def test_by_hand_when_every_sublayer_gives_zeros():
    model = build_model(small_recipe())
    with torch.no_grad():
        for block in model.layers:
            block.attention.out.weight.zero_()
        model.layers[0].ffn.w_out.zero_()
        model.layers[1].ffn.experts.w_out.zero_()
        model.embedding.weight.zero_()
        model.embedding.weight[3, :2] = float64([3.0, 4.0])
    logits = model(torch.tensor([[3, 0]])).logits
    # The mean square of (3, 4, 0 ... 0) over 8 features is 25 / 8, and (3, 4) (3, 4) is 25.
    assert_close(logits[0, 0, 3], float64(25 / (25 / 8 + 1e-5) ** 0.5))
    assert torch.equal(logits[0, 1], torch.zeros(VOCAB, dtype=torch.float64))
    assert logits.count_nonzero() == 1


@pytest.mark.parametrize("changed", [1, 3, 5])
def test_later_tokens_change_no_earlier_logits(changed):
    model, tokens = model_of(), tokens_of()
    other = tokens.clone()
    other[:, changed:] = (other[:, changed:] + 1) % VOCAB
    before, after = model(tokens).logits, model(other).logits
    assert_close(after[:, :changed], before[:, :changed])
    assert (after[:, changed] - before[:, changed]).norm() > 0


def test_padding_behind_the_end_changes_nothing():
    model, tokens = model_of(), tokens_of()
    padded = torch.cat([tokens, torch.zeros(ROWS, 3, dtype=torch.int64)], dim=1)
    mask = torch.arange(LENGTH + 3).expand(ROWS, -1) < LENGTH
    plain, with_padding = model(tokens), model(padded, mask)
    assert_close(with_padding.logits[:, :LENGTH], plain.logits)
    for name, value in plain.routing[0]._asdict().items():
        assert_close(getattr(with_padding.routing[0], name), value, torch.float64, name)


def test_one_routing_for_each_moe_layer_in_order():
    moe = SMALL["moe"] | {"layers": [2, 0]}
    model = model_of(model=SMALL["model"] | {"layers": 3}, moe=moe)
    routed = []
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.register_forward_hook(lambda module, inputs, output: routed.append(output.routing))
    output = model(tokens_of())
    assert len(output.routing) == 2
    for actual, expected in zip(output.routing, routed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert model_of(moe=None)(tokens_of()).routing == ()


def test_an_untied_head_with_the_weights_of_the_embedding_is_the_tied_one():
    tied, untied = model_of(), model_of(model=SMALL["model"] | {"tie_embeddings": False})
    assert tied.head is None and "head.weight" not in dict(tied.named_parameters())
    assert not torch.equal(untied.head.weight, untied.embedding.weight)
    with torch.no_grad():
        untied.head.weight.copy_(untied.embedding.weight)
    outputs = [model(tokens_of()) for model in (tied, untied)]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    for output in outputs:
        objective(output).backward()
    # The tied weight gets the sum of what its two uses get.
    expected = gradients(untied)
    expected["embedding.weight"] = expected["embedding.weight"] + expected.pop("head.weight")
    assert_all_close(gradients(tied), expected)


@pytest.mark.parametrize("masked", [False, True], ids=["all live", "masked"])
@pytest.mark.parametrize("precision", ["float64", "float32", "selective", "bf16"])
@pytest.mark.parametrize("recomputed", ["block", "reentrant"])
def test_recomputation_gives_the_same_numbers(recomputed, precision, masked):
    mask = torch.arange(LENGTH).expand(ROWS, -1) < 4 if masked else None
    outputs, grads = [], []
    for recompute in ("none", recomputed):
        model = model_of(train=training(precision=precision, recompute=recompute))
        output = model(tokens_of(), mask)
        objective(output).backward()
        outputs.append(output)
        grads.append(gradients(model))
    plain, again = outputs
    assert torch.equal(again.logits, plain.logits)
    for name, value in plain.routing[0]._asdict().items():
        assert torch.equal(getattr(again.routing[0], name), value), name
    assert again.routing[0].counts_E.sum().item() == 2 * ROWS * (4 if masked else LENGTH)
    assert_all_close(*reversed(grads))


@pytest.mark.parametrize(
    ("recompute", "expected"), [("none", [0, 1]), ("block", [0, 1, 1, 0]), ("reentrant", [0, 1, 1, 0])]
)
def test_only_recomputation_runs_each_block_twice_and_only_for_a_gradient(recompute, expected):
    model, calls = model_of(train=training(recompute=recompute)), []
    for index, block in enumerate(model.layers):
        block.ffn_norm.register_forward_hook(lambda module, inputs, output, index=index: calls.append(index))
    output = model(tokens_of())
    assert calls == [0, 1]
    objective(output).backward()
    assert calls == expected
    calls.clear()
    with torch.no_grad():
        model(tokens_of())
    assert calls == [0, 1]


def test_recomputation_keeps_the_selection_of_the_first_pass():
    """The router's input is negated in the recomputation, so its scores would choose other experts."""
    model = model_of(train=training(recompute="block"))
    router = model.layers[1].ffn.router
    logits, selections = [], []

    def negate_second(module, inputs):
        # The same operator in both passes: torch compares them.
        return (inputs[0] * (-1.0 if logits else 1.0), *inputs[1:])

    def record(module, inputs, output):
        logits.append(output[0].detach().clone())
        selections.append(output[1].experts_TK.clone())

    router.register_forward_pre_hook(negate_second)
    router.register_forward_hook(record)
    output = model(tokens_of())
    objective(output).backward()

    assert len(logits) == 2
    assert_close(logits[1], -logits[0])
    assert torch.equal(selections[0], highest_k(logits[0], 2))
    assert not torch.equal(highest_k(logits[1], 2), selections[0])
    assert torch.equal(selections[1], selections[0])
    # Which is also what the experts' gradients say.
    counts = output.routing[0].total().counts_E
    assert counts.tolist() == torch.bincount(selections[0].flatten(), minlength=4).tolist()
    grad = model.layers[1].ffn.experts.w_out.grad
    assert ((grad.flatten(1).norm(dim=1) > 0) == (counts > 0)).all()


def test_every_parameter_gets_a_gradient_also_without_live_tokens():
    for recompute in ("none", "block", "reentrant"):
        model = model_of(train=training(recompute=recompute))
        output = model(tokens_of(), torch.zeros(ROWS, LENGTH, dtype=torch.bool))
        objective(output).backward()
        for name, grad in gradients(model).items():
            assert grad is not None and grad.isfinite().all(), name


def test_evaluation_leaves_the_model_as_it_was():
    model = model_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    first, second = model(tokens_of()), model(tokens_of())
    assert torch.equal(first.logits, second.logits)
    assert sorted(before) == sorted(model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
