"""Which parameters Muon moves, and the matrices that they are cut into."""

import pytest
import torch

from moe_async.engine.muon import hidden_matrices, matrices_of
from moe_async.model import build_model
from moe_async.moe.classes import classify
from tests.helpers.small import SMALL, small_recipe


@pytest.mark.parametrize("vocab_size", [8, 16, 24, 32])
@pytest.mark.parametrize("tied", [True, False])
def test_hidden_matrices_do_not_depend_on_the_size_of_the_vocabulary(vocab_size, tied):
    # 8 is the width, 16 the rows of the packed attention, 24 those of the dense network's gate and up projection.
    recipe = small_recipe(
        model={**SMALL["model"], "vocab_size": vocab_size, "tie_embeddings": tied},
        moe={**SMALL["moe"], "shared_dim": 4, "shared_gate": True, "expert_bias": True},
    )
    model = build_model(recipe)
    chosen = hidden_matrices(model, classify(model))
    assert chosen == {
        "layers.0.attention.qkv.weight": [8, 4, 4],
        "layers.0.attention.out.weight": None,
        "layers.0.ffn.w_in": [12, 12],
        "layers.0.ffn.w_out": None,
        "layers.1.attention.qkv.weight": [8, 4, 4],
        "layers.1.attention.out.weight": None,
        "layers.1.ffn.experts.w_in": [6, 6],
        "layers.1.ffn.experts.w_out": None,
        "layers.1.ffn.shared.w_in": [4, 4],
        "layers.1.ffn.shared.w_out": None,
    }


def test_matrices_are_views_of_each_expert_and_block():
    stack = torch.arange(24.0).view(2, 4, 3)
    parts = matrices_of(stack, [1, 3])
    assert [tuple(part.shape) for part in parts] == [(1, 3), (3, 3), (1, 3), (3, 3)]
    parts[2].zero_()
    assert torch.equal(stack[1, 0], torch.zeros(3)) and stack[1, 1:].all()
    assert [tuple(part.shape) for part in matrices_of(stack, None)] == [(4, 3), (4, 3)]


def test_what_is_not_contiguous_is_refused_rather_than_copied():
    with pytest.raises(RuntimeError, match="view"):
        matrices_of(torch.zeros(2, 4, 3).transpose(1, 2), None)
