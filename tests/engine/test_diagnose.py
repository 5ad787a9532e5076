"""The place where numbers stop being finite is named, on every rank alike."""

import torch
from torch import nn

from moe_async.comm import World, make_world
from moe_async.engine.diagnose import find_non_finite
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.step import next_token_loss_sum
from moe_async.model import ModelOutput, build_model
from moe_async.topology import Topology
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks


def batch(seed=0):
    tokens = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(seed))
    return MicroBatch(tokens, (tokens + 1) % 32)


def loss(output, micro_batch):
    return next_token_loss_sum(output.logits, micro_batch.targets())


def model_of():
    model = build_model(small_recipe(moe={**SMALL["moe"], "layers": "all"}))
    for layer in model.layers:
        layer.ffn.check_finite = False
    return model


def test_a_healthy_model_has_no_such_place():
    model = model_of()
    before = [p.detach().clone() for p in model.parameters()]
    assert find_non_finite(model, [batch(), batch(1)], loss, World()) == ""
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not any(module._forward_hooks for module in model.modules())


def test_the_first_module_in_the_order_of_execution_is_named():
    model = model_of()
    with torch.no_grad():
        model.layers[1].ffn.experts.w_out[2] = torch.inf
        model.norm.weight[0] = torch.nan
    assert find_non_finite(model, [batch()], loss, World()) == "the output of layers.1.ffn.experts"
    with torch.no_grad():
        model.layers[0].attention.qkv.weight[0, 0] = torch.nan
    assert find_non_finite(model, [batch()], loss, World()) == "the output of layers.0.attention.qkv"


class RootAtZero(nn.Module):
    """Its value is finite; its gradient is not."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(32, 32)
        self.second = nn.Parameter(torch.zeros(32))

    def forward(self, tokens, token_mask=None):
        return ModelOutput(self.first(tokens) + self.second.sqrt(), ())


def test_a_gradient_is_named_by_its_parameter():
    assert find_non_finite(RootAtZero(), [batch()], loss, World()) == "the gradient of second"


def test_a_loss_is_named():
    def infinite(output, micro_batch):
        return loss(output, micro_batch) * torch.inf

    assert find_non_finite(model_of(), [batch()], infinite, World()) == "the loss"


def one_rank_is_ill(rank):
    world = make_world(Topology(2, 2, 4))
    model = build_model(small_recipe(parallel={"expert": 2, "zero": 0}), world)
    model.layers[1].ffn.check_finite = False
    if rank == 1:
        with torch.no_grad():
            model.layers[0].attention.out.weight[0, 0] = torch.inf
    return find_non_finite(model, [batch(rank)], loss, world)


def test_all_ranks_name_the_same():
    assert run_ranks(2, one_rank_is_ill) == ["the output of layers.0.attention.out"] * 2
