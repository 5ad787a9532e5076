"""Figures of a step against a loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_async import MoELayer
from moe_async.comm import Group
from moe_async.observe import LoadMeta, StepTally

LAYERS, EXPERTS, TOP_K, SEQUENCES, LENGTH = 2, 5, 2, 3, 7


def layers_of(**options):
    torch.manual_seed(3)
    return [
        MoELayer(8, EXPERTS, TOP_K, expert_dim=4, seed=seed, compute_dtype=torch.float64, **options).double()
        for seed in range(LAYERS)
    ]


def meta_of(domains=("code", "prose", "(none)"), **others):
    return LoadMeta(("0", "1"), (EXPERTS,) * LAYERS, (TOP_K,) * LAYERS, domains=domains, **others)


def step_of(meta, layers, batches):
    """The tally of some micro-batches of hidden states with domains, and what the layers gave for them."""
    tally, outputs = StepTally(meta), []
    for x, domains in batches:
        outputs.append([layer(x) for layer in layers])
        tally.add([output.routing for output in outputs[-1]], domains)
    return tally.over_ranks(Group(), Group()), outputs


def batches_of(number=2):
    torch.manual_seed(5)
    return [
        (torch.randn(SEQUENCES, LENGTH, 8, dtype=torch.float64), torch.tensor([index % 2, 1, 2]))
        for index in range(number)
    ]


def test_counts_and_probabilities_by_a_loop_over_tokens():
    layers, batches = layers_of(), batches_of()
    figures, outputs = step_of(meta_of(rank_experts=(tuple(range(EXPERTS)),)), layers, batches)
    for place, layer in enumerate(layers):
        counts, prob = np.zeros(EXPERTS), np.zeros(EXPERTS)
        by_domain, tokens_of = np.zeros((3, EXPERTS)), np.zeros(3)
        sums = dict.fromkeys(("entropy", "z", "top", "margin"), 0.0)
        for (x, domains), output in zip(batches, outputs, strict=True):
            for sequence in range(SEQUENCES):
                for position in range(LENGTH):
                    logits = (layer.router.weight @ x[sequence, position]).detach().double()
                    p = torch.softmax(logits, dim=0)
                    prob += p.numpy()
                    first, second = p.sort(descending=True).values[:2].tolist()
                    sums["entropy"] -= float((p * p.log()).sum())
                    sums["z"] += float(torch.logsumexp(logits, dim=0)) ** 2
                    sums["top"] += first
                    sums["margin"] += first - second
                    tokens_of[domains[sequence]] += 1
                    for expert in output[place].selection[sequence, position].tolist():
                        counts[expert] += 1
                        by_domain[domains[sequence], expert] += 1
        assert figures["counts"][place].tolist() == counts.tolist()
        assert figures["domain_counts"][place].tolist() == by_domain.tolist()
        assert figures["domain_tokens"].tolist() == tokens_of.tolist()
        assert figures["tokens"][place] == len(batches) * SEQUENCES * LENGTH
        assert figures["rank_load"][place].tolist() == [counts.sum()]
        np.testing.assert_allclose(figures["prob"][place], prob, rtol=1e-5)
        for name, value in sums.items():
            np.testing.assert_allclose(figures[name][place], value, rtol=1e-5, err_msg=name)


def test_the_violation_of_micro_batches():
    layers, batches = layers_of(), batches_of(3)
    figures, outputs = step_of(meta_of(), layers, batches)
    for place in range(LAYERS):
        each = []
        for output in outputs:
            counts = np.bincount(output[place].selection.reshape(-1).numpy(), minlength=EXPERTS)
            each.append(counts.max() / counts.mean() - 1)
        np.testing.assert_allclose(figures["micro_violation"][place], sum(each), rtol=1e-12)
        np.testing.assert_allclose(figures["micro_violation_peak"][place], max(each), rtol=1e-12)
    assert figures["micro_batches"].tolist() == [3]


def test_what_is_dropped_is_not_computed():
    capacity = {"factor": 0.5, "policy": "position"}
    layers = layers_of(capacity=capacity)
    figures, outputs = step_of(meta_of(rank_experts=(tuple(range(EXPERTS)),)), layers, batches_of(1))
    for place in range(LAYERS):
        chosen = outputs[0][place].selection.reshape(-1).numpy()
        full = -1 - EXPERTS - chosen[chosen < -EXPERTS]
        assert len(full) > 0
        assert figures["dropped"][place].tolist() == np.bincount(full, minlength=EXPERTS).tolist()
        assert figures["counts"][place].sum() == SEQUENCES * LENGTH * TOP_K
        assert figures["rank_load"][place].sum() == SEQUENCES * LENGTH * TOP_K - len(full)


def test_layers_with_fewer_choices_are_padded():
    few = MoELayer(8, 3, 1, expert_dim=4, seed=9, compute_dtype=torch.float64).double()
    layers = [layers_of()[0], few]
    meta = LoadMeta(("0", "1"), (EXPERTS, 3), (TOP_K, 1))
    figures, _ = step_of(meta, layers, [(x, None) for x, _ in batches_of()])
    assert figures["counts"].shape == (2, EXPERTS)
    assert figures["counts"][1, 3:].tolist() == [0, 0] and figures["counts"][1].sum() == 2 * SEQUENCES * LENGTH
    # Its balance is that of three experts.
    assert figures["micro_violation_peak"][1] <= 2


def test_tokens_without_a_label_have_a_place():
    figures, _ = step_of(meta_of(), layers_of(), [(batches_of(1)[0][0], None)])
    assert figures["domain_tokens"].tolist() == [0, 0, SEQUENCES * LENGTH]


def test_a_micro_batch_without_tokens_counts_nothing():
    figures, _ = step_of(meta_of(), layers_of(), [(torch.zeros(0, LENGTH, 8, dtype=torch.float64), None)])
    assert not figures["counts"].any() and not figures["micro_violation"].any()


def test_another_number_of_layers_is_refused():
    with pytest.raises(ValueError, match="zip"):
        StepTally(meta_of()).add([layers_of()[0](batches_of(1)[0][0]).routing])
