"""Muon moves each matrix of each expert on its own: torch's own optimizer over separate matrices is the reference."""

import pytest
import torch

from moe_async.comm import make_world
from moe_async.engine.checkpoint import load_checkpoint, save_checkpoint
from moe_async.engine.muon import hidden_matrices
from moe_async.engine.start import initialize
from moe_async.engine.micro_batch import MicroBatch
from moe_async.errors import RecipeError
from moe_async.model import build_model
from moe_async.moe.classes import classify, expert_ids
from moe_async.recipe import dump_recipe, parse_recipe
from moe_async.topology import Topology
from tests.helpers.numerics import assert_close
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks

STEPS, RATE, DECAY = 3, 0.02, 0.1


# As many rows as words in the dense matrices that are not about words, an output layer of its own, a gate of one row.
ODD_MODEL = {**SMALL["model"], "ffn_dim": 16, "vocab_size": 32, "tie_embeddings": False}
ODD_MOE = {"shared_dim": 16, "shared_gate": True}


def recipe_of(expert_parallel, odd=False, **optim):
    return small_recipe(
        model=ODD_MODEL if odd else SMALL["model"],
        moe={**SMALL["moe"], "layers": [1], "balance": [], **(ODD_MOE if odd else {})},
        parallel={"expert": expert_parallel, "zero": 0},
        optim={
            "kind": "muon", "lr": RATE, "weight_decay": DECAY, "clip": 0.0, "schedule": {"kind": "constant"},
            "expert": {"lr_scale": 2.0}, **optim,
        },
        train={"steps": 10, "global_batch": 4, "precision": "float32"},
    )  # fmt: skip


def batch(step, index):
    generator = torch.Generator().manual_seed(10 * step + index)
    tokens = torch.randint(0, 32, (2, 6), generator=generator)
    return MicroBatch(tokens, (tokens * 5 + 1) % 32)


FROZEN = "layers.0.attention.out.weight"


def train(rank, expert_parallel, odd):
    recipe = recipe_of(expert_parallel, odd)
    world = make_world(Topology(2, expert_parallel, 4))
    model = build_model(recipe, world)
    if odd:
        model.get_parameter(FROZEN).requires_grad_(False)
    engine = initialize(model, recipe, world)
    if odd:
        for parameter in engine.module.parameters():
            parameter.data = parameter.data.clone()
    history, grads = [], {}

    def look(optimizer, args, kwargs):
        grads.update((name, p.grad.clone()) for name, p in engine.module.named_parameters() if p.requires_grad)

    engine.bridge._base_optimizer.register_step_pre_hook(look)
    for step in range(STEPS):
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        engine.train_step([batch(step, rank)])
        history.append(
            (before, dict(grads), {name: p.detach().clone() for name, p in engine.module.named_parameters()})
        )
    return history, expert_ids(engine.module)


ADAMW = ("embedding", "router", "head", "shared_gate")


def reference(gradient_of, weights):
    """Separate matrices under torch's own Muon, the rest under AdamW."""
    pieces, optimizers = {}, []
    for name, weight in weights.items():
        parts, scale, muon = [weight.clone()], 1.0, weight.ndim > 1 and not any(part in name for part in ADAMW)
        if "experts" in name:
            scale, parts = 2.0, list(weight.unbind(0))
        if name.endswith("w_in"):
            parts = [half for part in parts for half in part.chunk(2, dim=0)]
        if name.endswith("qkv.weight"):
            parts = list(parts[0].split([8, 4, 4]))
        pieces[name] = [torch.nn.Parameter(part.clone()) for part in parts]
        rate = RATE * scale
        if name not in gradient_of(0):
            continue
        if muon:
            optimizers.append(
                torch.optim.Muon(
                    pieces[name], lr=rate, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"
                )
            )
        else:
            decay = DECAY if weight.ndim > 1 else 0.0
            optimizers.append(
                torch.optim.AdamW(pieces[name], lr=rate, weight_decay=decay, betas=(0.9, 0.95), eps=1e-8)
            )  # fmt: skip
    for step in range(STEPS):
        for name, whole in gradient_of(step).items():
            parts = pieces[name]
            rows = [part.shape[0] for part in parts]
            for part, grad in zip(parts, whole.reshape(-1, *parts[0].shape[1:]).split(rows), strict=True):
                part.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    return {name: torch.cat([p.detach() for p in parts]).view_as(weights[name]) for name, parts in pieces.items()}


def gathered(results, step, place):
    """One of the three snapshots of a step, with the experts of both ranks together."""
    merged = {}
    for history, ids in results:
        for name, value in history[step][place].items():
            if name in ids:
                merged.setdefault(name, {}).update(zip(ids[name], value, strict=True))
            else:
                merged[name] = value
    return {name: torch.stack([v[e] for e in sorted(v)]) if isinstance(v, dict) else v for name, v in merged.items()}


@pytest.mark.parametrize(("expert_parallel", "odd"), [(1, False), (2, False), (2, True)])
def test_every_matrix_is_moved_on_its_own(expert_parallel, odd):
    results = run_ranks(2, train, expert_parallel, odd)
    start = gathered(results, 0, 0)
    expected = reference(lambda step: gathered(results, step, 1), start)
    actual = gathered(results, STEPS - 1, 2)
    for name, value in actual.items():
        assert_close(value, expected[name], torch.float32, name)
        assert torch.equal(value, start[name]) == (odd and name == FROZEN), name


def test_what_muon_moves_follows_from_the_module_and_not_from_a_number_of_rows():
    model = build_model(recipe_of(1, odd=True))
    assert model.layers[0].ffn.w_in.shape[0] == model.layers[1].ffn.shared.w_in.shape[0] == model.shape.vocab_size
    chosen = hidden_matrices(model, classify(model))
    matrices = {name for name, p in model.named_parameters() if p.ndim > 1}
    assert matrices - set(chosen) == {
        "embedding.weight", "head.weight", "layers.1.ffn.router.weight", "layers.1.ffn.shared_gate.weight"
    }  # fmt: skip
    assert set(chosen) < matrices
    tied = build_model(recipe_of(1))
    assert "embedding.weight" not in hidden_matrices(tied, classify(tied))


def resume(rank, folder):
    recipe = recipe_of(2)
    world = make_world(Topology(2, 2, 4))
    engine = initialize(build_model(recipe, world), recipe, world)
    engine.train_step([batch(0, rank)])
    path = save_checkpoint(folder, 1, engine.bridge, dump_recipe(recipe), {}, 1)
    engine.train_step([batch(1, rank)])
    other = initialize(build_model(recipe, world), recipe, world)
    load_checkpoint(path, other.bridge)
    other.global_step = 1
    other.train_step([batch(1, rank)])
    return [
        (name, torch.equal(p, q))
        for (name, p), q in zip(engine.module.named_parameters(), other.module.parameters(), strict=True)
    ]


def test_its_momentum_is_in_checkpoints(tmp_path):
    for names in run_ranks(2, resume, tmp_path):
        assert all(equal for _, equal in names), names


def test_zero_1_is_refused():
    text = dump_recipe(recipe_of(1)).replace("zero: 0", "zero: 1")
    with pytest.raises(RecipeError, match=r"optim\.kind is muon but parallel\.zero is 1.*Use zero: 0"):
        parse_recipe(text, "recipe.yaml")
