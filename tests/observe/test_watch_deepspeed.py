"""record_load on ``deepspeed.moe.layer.MoE`` writes what counting by hand gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import moe_async
from moe_async.errors import LoadError
from moe_async.observe import read_load
from tests.helpers.spawn import run_ranks

TOKENS, DIM, EXPERTS, STEPS = 24, 8, 4, 2


class Model(nn.Module):
    """Two of its layers one after another, which keep what they took."""

    def __init__(self, ep_size=1, **options):
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        options = {"top2_2nd_expert_sampling": False, "min_capacity": 1, **options}
        self.layers = nn.ModuleList(
            MoE(DIM, nn.Linear(DIM, DIM), num_experts=EXPERTS, ep_size=ep_size, **options) for _ in range(2)
        )
        for layer in self.layers:
            layer.set_deepspeed_parallelism()
        self.taken = []

    def forward(self, x, used_token=None):
        self.taken = []
        for layer in self.layers:
            self.taken.append(x.detach())
            out, _, _ = layer(x, used_token)
            x = x + out
        return x

    def counts_by_hand(self, top_k, used=None):
        """[layer][E]."""
        counts = []
        for x, layer in zip(self.taken, self.layers, strict=True):
            weight = layer.deepspeed_moe.gate.wg.weight.detach().double().numpy()
            chosen = np.argsort(-(x.double().numpy() @ weight.T), axis=1)[:, :top_k]
            counts.append(np.bincount(chosen[slice(None) if used is None else used].ravel(), minlength=EXPERTS))
        return counts


def start():
    import deepspeed

    deepspeed.init_distributed("gloo")


def record_steps(rank, path, top_k, factor, ep_size):
    start()
    model = Model(ep_size, k=top_k, capacity_factor=factor, drop_tokens=factor < 9)
    counts = []
    with moe_async.record_load(model, path, domains=("code",), sampled_tokens=TOKENS) as watch:
        watch.label("code")
        for step in range(STEPS):
            torch.manual_seed(10 * step + rank)
            model(torch.randn(TOKENS, DIM)).sum().backward()
            counts.append(model.counts_by_hand(top_k))
    return np.array(counts)


@pytest.mark.parametrize(("top_k", "factor"), [(1, 0.75), (2, 0.75), (3, 0.75), (2, 99.0)])
def test_counts_and_drops(top_k, factor, tmp_path):
    (counts,) = run_ranks(1, record_steps, tmp_path, top_k, factor, 1)
    record = read_load(tmp_path)
    assert record.meta.layers == ("layers.0", "layers.1") and record.meta.top_k == (top_k, top_k)
    assert np.array_equal(record.windows["counts"], counts)
    capacity = math.ceil(factor * top_k * TOKENS / EXPERTS)
    dropped = np.maximum(counts - capacity, 0)
    assert (dropped.sum() > 0) == (factor < 9)
    assert np.array_equal(record.windows["dropped"], dropped)
    assert np.array_equal(record.windows["domain_counts"][:, :, 0], counts)
    # Paths hold what was kept: all tokens are sampled.
    kept = record.paths.experts[record.paths.step == 1, 0]
    assert np.array_equal(np.bincount(kept[kept >= 0], minlength=EXPERTS), counts[0, 0] - dropped[0, 0])


def test_over_two_ranks(tmp_path):
    counts = run_ranks(2, record_steps, tmp_path, 2, 0.75, 2)
    record = read_load(tmp_path)
    assert np.array_equal(record.windows["counts"], counts[0] + counts[1])
    assert record.windows["micro_batches"].tolist() == [2] * STEPS
    # The gate does not know which experts a rank has.
    assert record.meta.rank_experts == ()


class DenseMasks(Model):
    """Calls the gates for masks over places in the experts' buffers, as older releases do."""

    def forward(self, x):
        self.taken = [x.detach()] * 2
        for layer in self.layers:
            layer.deepspeed_moe.gate(x)
        return x


def dense_masks(rank, path, top_k):
    start()
    model = DenseMasks(k=top_k, capacity_factor=0.75)
    with moe_async.record_load(model, path, sampled_tokens=TOKENS):
        model(torch.randn(TOKENS, DIM))
    return np.array(model.counts_by_hand(top_k))


@pytest.mark.parametrize("top_k", [1, 2])
def test_dense_masks(top_k, tmp_path):
    (counts,) = run_ranks(1, dense_masks, tmp_path, top_k)
    record = read_load(tmp_path)
    dropped = np.maximum(counts - math.ceil(0.75 * top_k * TOKENS / EXPERTS), 0)
    assert dropped.sum() > 0
    assert np.array_equal(record.windows["counts"][0], counts)
    assert np.array_equal(record.windows["dropped"][0], dropped)
    kept = record.paths.experts[:, 1]
    assert np.array_equal(np.bincount(kept[kept >= 0], minlength=EXPERTS), counts[1] - dropped[1])


def unused_tokens(rank, path):
    start()
    model = Model(k=1, capacity_factor=4.0)
    used = torch.arange(TOKENS) % 3 > 0
    with moe_async.record_load(model, path, domains=("a", "b")) as watch:
        with pytest.raises(LoadError, match=r"layers.0 tells its counts for whole passes alone"):
            watch.label(("a", "b"))
        model(torch.randn(TOKENS, DIM), used.long())
    return model.counts_by_hand(1, used.numpy())


def test_tokens_that_are_not_used(tmp_path):
    (counts,) = run_ranks(1, unused_tokens, tmp_path)
    windows = read_load(tmp_path).windows
    assert np.array_equal(windows["counts"][0], counts)
    assert windows["tokens"].tolist() == [[TOKENS * 2 // 3] * 2] and windows["dropped"].sum() == 0
