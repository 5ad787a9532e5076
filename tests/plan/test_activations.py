"""What a plan says of activations, against what small models keep and use: within ten percent."""

import pytest
import torch
from torch.nn import functional

from moe_async import build_model
from moe_async.plan.activations import Load, activations
from moe_async.plan.sizes import model_sizes, widths
from moe_async.recipe import load_recipe
from tests.helpers.memory import KeptBytes, LiveBytes

TOLERANCE = 0.1


def recipe_of(overrides, vocabulary):
    return load_recipe(
        "recipes/quickstart-sync.yaml", ["parallel.expert=1", f"model.vocab_size={vocabulary}", *overrides]
    )


def measured(recipe, sequences, length):
    """Bytes that are kept for the backward pass, and the most beside weights and their gradients."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model(recipe).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    parameters = list(model.parameters())
    tokens = torch.randint(0, model.shape.vocab_size, (sequences, length))
    kept = KeptBytes(parameters)
    live = LiveBytes([*parameters, *(parameter.grad for parameter in parameters)])
    with live:
        with kept:
            output = model(tokens)
        dtype = torch.promote_types(output.logits.dtype, torch.float32)
        loss = functional.cross_entropy(output.logits.flatten(0, 1).to(dtype), tokens.flatten())
        loss.backward()
    return kept.bytes, live.peak


BF16, BLOCK = "train.precision=bf16", "train.recompute=block"
# Overrides; sequences, their length, and the vocabulary. Vocabularies are small where a block is to be the worst
# moment, large where the loss, the head or the embedding is.
GRID = [
    (["model.layers=2"], 4, 128, 512),
    (["model.layers=2", BF16], 4, 128, 512),
    (["model.layers=2", "train.precision=float32"], 8, 256, 32),
    (["model.layers=2", "train.precision=float64", "parallel.zero=0"], 8, 256, 32),
    (["model.layers=2", "moe.top_k=4", "moe.num_experts=16"], 8, 128, 32),
    (["model.layers=2", "moe.expert_dim=512", "moe.num_experts=32"], 4, 64, 32),
    (["model.layers=6", BLOCK], 4, 128, 512),
    (["model.layers=6", BLOCK, BF16], 4, 128, 32),
    (["model.layers=6", BLOCK, "moe.expert_dim=512"], 2, 64, 32),
    (["model.layers=6", "train.recompute=reentrant"], 4, 128, 512),
    (["model.layers=4", BLOCK, "moe.layers={every: 2}"], 8, 128, 32),
    (["model.layers=4", "moe.layers={every: 2, offset: 1}", "model.ffn_dim=512", BF16], 8, 64, 257),
    (["model.layers=3", "moe.shared_dim=512"], 4, 256, 32),
    (["model.layers=3", "moe.shared_dim=256", "moe.shared_gate=true", BF16], 4, 256, 32),
    (["model.layers=3", "model.qk_norm=head"], 4, 128, 512),
    (["model.layers=3", "model.qk_norm=full", BF16], 4, 128, 512),
    (["model.layers=3", "model.kv_heads=4", "model.head_dim=64"], 4, 128, 32),
    (["model.layers=3", "moe.expert=gelu"], 4, 128, 32),
    (["model.layers=3", "moe.expert=relu2", "moe.expert_dropout=0.1"], 4, 128, 32),
    (["model.layers=3", "moe.expert=swiglu_clamped", "moe.expert_bias=true"], 4, 128, 32),
    (["model.layers=3", "moe.zero_experts=4"], 4, 128, 32),
    (["model.layers=3", "moe.router={kind: sigmoid_bias}"], 4, 128, 32),
    (["model.layers=3", "moe.router={kind: noisy_topk}"], 4, 128, 32),
    (["model.layers=3", "moe.router={kind: switch}", "moe.top_k=1"], 4, 128, 32),
    (["model.layers=1", "model.dim=256", "moe.expert_dim=8"], 1, 64, 4096),
    (["model.layers=1", "model.dim=256", "moe.expert_dim=8", "model.tie_embeddings=false", BF16], 1, 64, 4096),
    (["moe=null", "model.layers=2", "model.ffn_dim=1024"], 4, 128, 32),
    (["moe=null", "model.layers=2", "model.ffn_dim=512", "model.ffn=gelu", BF16], 4, 128, 32),
    (["moe=null", "model.layers=2", "model.ffn_dim=512", "model.ffn=relu2"], 4, 128, 32),
    (["moe=null", "model.layers=6", "model.ffn_dim=512", BLOCK], 4, 128, 32),
]


@pytest.mark.parametrize(("overrides", "sequences", "length", "vocabulary"), GRID)
def test_kept_and_peak_bytes_are_those_measured(overrides, sequences, length, vocabulary):
    recipe = recipe_of(overrides, vocabulary)
    found = activations(model_sizes(recipe), widths(recipe), Load(sequences, length), recipe.train.recompute)
    kept, peak = measured(recipe, sequences, length)
    assert found.kept == pytest.approx(kept, rel=TOLERANCE)
    assert found.peak == pytest.approx(peak, rel=TOLERANCE)


def test_a_capacity_gives_an_upper_bound():
    recipe = recipe_of(["model.layers=2", "moe.capacity={factor: 1.0}"], 32)
    found = activations(model_sizes(recipe), widths(recipe), Load(4, 128), "none")
    kept, _ = measured(recipe, 4, 128)
    assert 0.75 * found.kept < kept < found.kept


def test_rows_of_a_busy_rank_cost_what_they_take():
    """Twice the rows: the experts' inputs and hidden values are twice as many, and nothing else."""
    recipe = recipe_of(["model.layers=2"], 32)
    sizes, width = model_sizes(recipe), widths(recipe)
    even, busy = (activations(sizes, width, Load(4, 128, rows, 2), "none") for rows in (1.0, 2.0))
    rows, row_bytes = 4 * 128 * 2, (128 + 4 * 128) * 2
    assert busy.kept - even.kept == 2 * rows * row_bytes
    assert busy.dispatch - even.dispatch == 2 * rows * 128 * 2
