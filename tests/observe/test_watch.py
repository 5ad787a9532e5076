"""record_load writes what counting by hand gives, in a loop of the test's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_async
from moe_async.errors import LoadError
from moe_async.observe import read_load
from moe_async.ops.load import max_violation

SEQUENCES, LENGTH, DIM, EXPERTS, TOP_K = 3, 11, 8, 5, 2
TOKENS = SEQUENCES * LENGTH


class Stack(nn.Module):
    """Layers of this package one after another, which keep what they took."""

    def __init__(self, recompute=False, **options):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, DIM)
        self.layers = nn.ModuleList(
            moe_async.MoELayer(DIM, EXPERTS, TOP_K, expert_dim=4, seed=seed, **options) for seed in range(2)
        )
        self.recompute, self.taken = recompute, []

    def forward(self, ids):
        x = self.embed(ids)
        self.taken = []
        for layer in self.layers:
            self.taken.append(x.detach().flatten(0, -2))
            hidden = checkpoint(self.hidden, layer, x, use_reentrant=False) if self.recompute else layer(x).hidden
            x = x + hidden
        return x

    @staticmethod
    def hidden(layer, x):
        return layer(x).hidden

    def chosen_by_hand(self):
        """Of each layer, the experts of each token, [T, K], and the softmax of the logits, [T, E]."""
        return [by_hand(x, layer.router.weight) for x, layer in zip(self.taken, self.layers, strict=True)]


def by_hand(x_TD, weight_ED, top_k=TOP_K):
    logits = x_TD.detach().double().numpy() @ weight_ED.detach().double().numpy().T
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.argsort(-logits, axis=1)[:, :top_k], probs / probs.sum(axis=1, keepdims=True)


def counts_of(chosen_TK, experts=EXPERTS):
    return np.bincount(np.asarray(chosen_TK).ravel(), minlength=experts)


def ids_of(step):
    return torch.randperm(TOKENS, generator=torch.Generator().manual_seed(step)).view(SEQUENCES, LENGTH)


def run(model, path, steps, ids=ids_of, **options):
    """Counts by hand of each forward pass and layer, [step][layer][E]."""
    counts = []
    with moe_async.record_load(model, path, **options):
        for step in range(1, steps + 1):
            model(ids(step)).sum().backward()
            counts.append([counts_of(chosen) for chosen, _ in model.chosen_by_hand()])
    return np.array(counts)


def test_counts_and_figures_of_each_step(tmp_path):
    model = Stack()
    counts = run(model, tmp_path, 3)
    record = read_load(tmp_path)
    assert record.meta.layers == ("layers.0", "layers.1")
    assert (record.meta.experts, record.meta.top_k) == ((EXPERTS, EXPERTS), (TOP_K, TOP_K))
    windows = record.windows
    assert windows["first_step"].tolist() == [1, 2, 3] and (windows["tokens"] == TOKENS).all()
    assert np.array_equal(windows["counts"], counts)
    probs_TE = model.chosen_by_hand()[1][1]
    last = {name: windows[name][-1, 1] for name in ("prob", "entropy", "top", "margin", "violation", "z", "bad_tokens")}
    ordered = np.sort(probs_TE, axis=1)
    np.testing.assert_allclose(last["prob"], probs_TE.sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(last["entropy"], -(probs_TE * np.log(probs_TE)).sum(), rtol=1e-5)
    np.testing.assert_allclose(last["top"], ordered[:, -1].sum(), rtol=1e-5)
    np.testing.assert_allclose(last["margin"], (ordered[:, -1] - ordered[:, -2]).sum(), rtol=1e-4)
    np.testing.assert_allclose(last["violation"], max_violation(counts[-1, 1]), rtol=1e-5)
    assert last["bad_tokens"] == 0


def test_paths_are_those_of_the_tokens(tmp_path):
    model = Stack()
    run(model, tmp_path, 1, sampled_tokens=7)
    paths = read_load(tmp_path).paths
    assert len(paths) == 7 and len(set(paths.token.tolist())) == 7
    place_of = {token: place for place, token in enumerate(ids_of(1).ravel().tolist())}
    for layer, (chosen_TK, _) in enumerate(model.chosen_by_hand()):
        for token, experts in zip(paths.token.tolist(), paths.experts[:, layer], strict=True):
            assert experts.tolist() == chosen_TK[place_of[token]].tolist()


def test_what_is_computed_again_counts_once(tmp_path):
    counts = run(Stack(recompute=True), tmp_path, 2)
    assert np.array_equal(read_load(tmp_path).windows["counts"], counts)


def test_several_passes_of_a_step_and_steps_left_out(tmp_path):
    counts = run(Stack(), tmp_path, 9, accumulation=2, every=2)
    windows = read_load(tmp_path).windows
    # Passes 3 and 4 are step 2, passes 7 and 8 are step 4; pass 9 begins step 5, which is left out.
    assert windows["first_step"].tolist() == [2, 4] and windows["micro_batches"].tolist() == [2, 2]
    assert np.array_equal(windows["counts"], [counts[2] + counts[3], counts[6] + counts[7]])
    worst = max(max_violation(counts[place, 1]) for place in (2, 3))
    np.testing.assert_allclose(windows["micro_violation_peak"][0, 1], worst, rtol=1e-6)


def test_a_step_cut_short_is_kept(tmp_path):
    counts = run(Stack(), tmp_path, 3, accumulation=2)
    windows = read_load(tmp_path).windows
    assert windows["last_step"].tolist() == [1, 2]
    assert np.array_equal(windows["counts"][1], counts[2])


def test_evaluation_is_left_out_unless_asked_for(tmp_path):
    model = Stack()
    with moe_async.record_load(model, tmp_path / "train"):
        model(ids_of(1))
        model.eval()(ids_of(2))
        model.train()(ids_of(3))
    assert len(read_load(tmp_path / "train").windows) == 2
    with moe_async.record_load(model.eval(), tmp_path / "eval", evaluation=True):
        model(ids_of(1))
    assert np.array_equal(
        read_load(tmp_path / "eval").windows["counts"][0], [counts_of(chosen) for chosen, _ in model.chosen_by_hand()]
    )


def test_labels_of_sequences_and_of_passes(tmp_path):
    model = Stack()
    with moe_async.record_load(model, tmp_path, domains=("code", "prose")) as watch:
        watch.label(("prose", "code", "prose"))
        model(ids_of(1))
        first = model.chosen_by_hand()[1][0].reshape(SEQUENCES, -1)
        watch.label("code")
        model(ids_of(2))
        second = model.chosen_by_hand()[1][0]
        watch.label(None)
        model(ids_of(3))
    record = read_load(tmp_path)
    assert record.meta.domains == ("code", "prose", "(none)")
    assert record.windows["domain_tokens"].tolist() == [[LENGTH, 2 * LENGTH, 0], [TOKENS, 0, 0], [0, 0, TOKENS]]
    by_domain = record.windows["domain_counts"][:, 1]
    assert np.array_equal(by_domain[0, 0], counts_of(first[1]))
    assert np.array_equal(by_domain[0, 1], counts_of(first[[0, 2]]))
    assert np.array_equal(by_domain[1, 0], counts_of(second))
    assert set(record.paths.domain[record.paths.step == 1].tolist()) == {0, 1}


def test_drops_of_full_experts(tmp_path):
    model = Stack(capacity={"factor": 0.8})
    counts = run(model, tmp_path, 1)
    windows = read_load(tmp_path).windows
    capacity = int(np.ceil(0.8 * TOP_K * TOKENS / EXPERTS))
    assert np.array_equal(windows["counts"], counts)
    dropped = np.maximum(counts - capacity, 0)
    assert dropped.sum() > 0 and np.array_equal(windows["dropped"], dropped)


def test_the_bias_after_the_step_and_zero_experts(tmp_path):
    model = Stack(router={"kind": "sigmoid_bias"}, zero_experts=2)
    with moe_async.record_load(model, tmp_path):
        for step in (1, 2):
            model(ids_of(step))
            for layer in model.layers:
                layer.router.bias_state.bias_E.fill_(step / 100)
    record = read_load(tmp_path)
    assert record.meta.zero_experts == 2 and record.windows["counts"].shape[-1] == EXPERTS + 2
    assert (record.windows["counts"].sum(axis=-1) == TOKENS * TOP_K).all()
    np.testing.assert_allclose(record.windows["bias"][:, 1, 0], [0.01, 0.02])


def test_a_wrapped_model_and_one_layer_alone(tmp_path):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, ids):
            return self.module(ids)

    model = Wrapper(Stack())
    with moe_async.record_load(model, tmp_path / "wrapped"):
        model(ids_of(1))
    assert read_load(tmp_path / "wrapped").meta.layers == ("module.layers.0", "module.layers.1")
    layer = moe_async.MoELayer(DIM, EXPERTS, TOP_K)
    with moe_async.record_load(layer, tmp_path / "alone"):
        layer(torch.randn(TOKENS, DIM))
    record = read_load(tmp_path / "alone")
    assert record.meta.layers == ("layer",) and record.windows["counts"].sum() == TOKENS * TOP_K


def test_a_resumed_loop_goes_on_behind(tmp_path):
    model = Stack()
    first = run(model, tmp_path, 2)
    with pytest.raises(LoadError, match=r"steps up to 2, and this loop would record from step 1 on.*step=2"):
        moe_async.record_load(model, tmp_path)
    second = run(model, tmp_path, 2, step=2)
    windows = read_load(tmp_path).windows
    assert windows["first_step"].tolist() == [1, 2, 3, 4]
    assert np.array_equal(windows["counts"], [*first, *second])


def test_hooks_are_gone_afterwards(tmp_path):
    model = Stack()
    with pytest.raises(RuntimeError, match="of the loop"), moe_async.record_load(model, tmp_path):
        model(ids_of(1))
        model(ids_of(2))
        raise RuntimeError("of the loop")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    # What was there before the loop failed is kept.
    assert len(read_load(tmp_path).windows) == 2


def test_a_layer_without_tokens_leaves_out_the_pass(tmp_path, caplog):
    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stack()

        def forward(self, ids):
            return self.inner(ids) if len(ids) > 1 else self.inner.layers[0](self.inner.embed(ids)).hidden

    model = Short()
    with moe_async.record_load(model, tmp_path):
        model(ids_of(1))
        model(ids_of(2)[:1])
        model(ids_of(3))
    assert "inner.layers.1 had no tokens in a forward pass, which is left out" in caplog.text
    assert read_load(tmp_path).windows["tokens"][:, 0].tolist() == [TOKENS, 0, TOKENS]


def test_bad_use_says_what_to_do(tmp_path):
    model = Stack()
    with pytest.raises(LoadError, match="Linear has no MoE layer that can be watched; known are"):
        moe_async.record_load(nn.Linear(2, 2), tmp_path)
    with pytest.raises(LoadError, match="every=0; it must be 1 or more"):
        moe_async.record_load(model, tmp_path, every=0)
    with pytest.raises(LoadError, match="each must be there once"):
        moe_async.record_load(model, tmp_path, domains=("a", "a"))
    watch = moe_async.record_load(model, tmp_path, domains=("code",))
    with pytest.raises(LoadError, match=r"'prose' is not among the domains \('code',\)"):
        watch.label("prose")
    with pytest.raises(LoadError, match="no forward pass of Stack in training mode was seen"), watch:
        model.eval()(ids_of(1))
    with (
        pytest.raises(LoadError, match="3 sequences but 2 labels"),
        moe_async.record_load(model.train(), tmp_path, domains=("code",)) as watch,
    ):
        watch.label(("code", "code"))
        model(ids_of(1))
