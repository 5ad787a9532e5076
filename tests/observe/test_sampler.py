"""Paths of sampled tokens are what the layers say of those tokens."""

from __future__ import annotations

import torch
from torch import nn

from moe_async import MoELayer
from moe_async.observe.paths import NO_EXPERT
from moe_async.observe.sampler import PathSampler

SEQUENCES, LENGTH = 3, 11


class Stack(nn.Module):
    """Layers one after another, with what they gave."""

    def __init__(self, **options):
        super().__init__()
        self.layers = nn.ModuleList(MoELayer(8, 5, 2, expert_dim=4, seed=seed, **options) for seed in range(2))
        self.selections = []

    def forward(self, x):
        self.selections = []
        for layer in self.layers:
            output = layer(x)
            x = x + output.hidden
            self.selections.append(output.selection)


def sampled(model, tokens=7, top_k=2, **others):
    sampler = PathSampler(list(model.layers), top_k, tokens)
    ids = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH)
    sampler.want()
    torch.manual_seed(0)
    model(torch.randn(SEQUENCES, LENGTH, 8))
    return sampler, sampler.paths(4, ids, **others)


def test_paths_are_the_selection_of_their_tokens():
    model = Stack()
    sampler, paths = sampled(model, domains_B=torch.tensor([5, 6, 7]))
    assert len(paths) == 7 and (paths.step == 4).all()
    assert len(set(paths.token.tolist())) == 7
    for index, place in enumerate(paths.token.tolist()):
        row, position = divmod(place, LENGTH)
        assert paths.domain[index] == 5 + row
        for layer, selection in enumerate(model.selections):
            assert paths.experts[index, layer].tolist() == selection[row, position].tolist()
    # Once taken, nothing more until it is wanted.
    model(torch.randn(SEQUENCES, LENGTH, 8))
    assert sampler.paths(5, torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64)) is None


def test_each_sample_begins_elsewhere():
    model = Stack()
    sampler, first = sampled(model)
    sampler.want()
    model(torch.randn(SEQUENCES, LENGTH, 8))
    second = sampler.paths(5, torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH))
    assert set(first.token.tolist()) != set(second.token.tolist())


def test_evaluation_is_not_sampled():
    model = Stack()
    sampler = PathSampler(list(model.layers), 2)
    sampler.want()
    model.eval()(torch.randn(SEQUENCES, LENGTH, 8))
    ids = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64)
    assert sampler.paths(1, ids) is None
    model.train()(torch.randn(SEQUENCES, LENGTH, 8))
    assert sampler.paths(1, ids) is not None


def test_masked_tokens_have_no_path():
    mask = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
    mask[1:] = False
    _, paths = sampled(Stack(), mask_BS=mask)
    assert 0 < len(paths) < 7 and (paths.token < LENGTH).all()


def test_what_was_dropped_is_no_part_of_a_path():
    model = Stack(capacity={"factor": 0.5})
    _, paths = sampled(model, tokens=33)
    for index, place in enumerate(paths.token.tolist()):
        wanted = [expert if expert >= 0 else NO_EXPERT for expert in model.selections[0].view(-1, 2)[place].tolist()]
        assert paths.experts[index, 0].tolist() == wanted
    assert (paths.experts == NO_EXPERT).any()


def test_a_closed_sampler_takes_nothing():
    model = Stack()
    sampler, _ = sampled(model)
    sampler.close()
    sampler.want()
    model(torch.randn(SEQUENCES, LENGTH, 8))
    assert sampler.paths(1, torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64)) is None
