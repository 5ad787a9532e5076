"""A model from a recipe: which layers are MoE, dtypes of each precision, and initial weights by name."""

import pytest
import torch

from moe_async.comm import Group, World
from moe_async.errors import TopologyError
from moe_async.model import build_model
from moe_async.model.build import count_parameters, make_transformer, transformer_shape
from moe_async.model.transformer import EMBEDDING_STD
from moe_async.moe import MoELayer
from moe_async.moe.classes import classify, expert_ids
from moe_async.moe.feed_forward import FeedForward
from moe_async.ops.initialise import normal_by_name_
from moe_async.topology import Topology
from tests.helpers.small import SMALL, small_recipe

TOKENS = torch.arange(12).view(2, 6)
DTYPES = [
    # precision, parameters, dense layers, router logits, rows of experts, logits
    ("selective", torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float32),
    ("bf16", torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16),
    ("float32", torch.float32, torch.float32, torch.float32, torch.float32, torch.float32),
    ("float64", torch.float64, torch.float64, torch.float64, torch.float64, torch.float64),
]


def recipe_of(precision="float64", seed=0, **moe):
    train = SMALL["train"] | {"precision": precision, "seed": seed}
    return small_recipe(moe=SMALL["moe"] | moe, train=train)


def moe_layers(model):
    return [index for index, block in enumerate(model.layers) if isinstance(block.ffn, MoELayer)]


def test_the_small_recipe_by_hand():
    model = build_model(small_recipe())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == {
        "embedding.weight": (32, 8),
        "layers.0.attention_norm.weight": (8,),
        # Four query heads and two each of keys and values, of width 8 / 4.
        "layers.0.attention.qkv.weight": (16, 8),
        "layers.0.attention.out.weight": (8, 8),
        "layers.0.ffn_norm.weight": (8,),
        "layers.0.ffn.w_in": (24, 8),
        "layers.0.ffn.w_out": (8, 12),
        "layers.1.attention_norm.weight": (8,),
        "layers.1.attention.qkv.weight": (16, 8),
        "layers.1.attention.out.weight": (8, 8),
        "layers.1.ffn_norm.weight": (8,),
        "layers.1.ffn.router.weight": (4, 8),
        "layers.1.ffn.experts.w_in": (4, 12, 8),
        "layers.1.ffn.experts.w_out": (4, 8, 6),
        "norm.weight": (8,),
    }
    classes = classify(model)
    assert [name for name, kind in classes.items() if kind == "router"] == ["layers.1.ffn.router.weight"]
    assert [name for name, kind in classes.items() if kind == "expert"] == [
        "layers.1.ffn.experts.w_in", "layers.1.ffn.experts.w_out"
    ]  # fmt: skip


def test_parameters_in_all_and_active_by_hand():
    # Embedding 256; two layers of 128 + 64 attention and 16 of norms; a dense network 288; the last norm 8; the router
    # 32; four experts of 96 + 48, of which a token takes two.
    dense = 256 + 2 * (128 + 64 + 16) + 288 + 8 + 32
    assert count_parameters(small_recipe()) == (dense + 4 * 144, dense + 2 * 144)
    for top_k in (1, 4):
        assert count_parameters(recipe_of(top_k=top_k)).active == dense + top_k * 144
    total = dense - 32 + 288
    assert count_parameters(small_recipe(moe=None)) == (total, total)
    model = build_model(small_recipe())
    assert sum(parameter.numel() for parameter in model.parameters()) == dense + 4 * 144


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", [0, 1, 2, 3, 4]),
        ([3], [3]),
        ([4, 0], [0, 4]),
        ({"every": 2}, [0, 2, 4]),
        ({"every": 2, "offset": 1}, [1, 3]),
        ({"every": 3, "offset": 4}, [4]),
        (None, []),
    ],
    ids=str,
)
def test_which_layers_are_moe(layers, expected):
    moe = None if layers is None else SMALL["moe"] | {"layers": layers}
    model = build_model(small_recipe(model=SMALL["model"] | {"layers": 5}, moe=moe))
    assert moe_layers(model) == expected
    assert all(isinstance(model.layers[i].ffn, FeedForward) for i in range(5) if i not in expected)


def test_the_entries_of_the_recipe_reach_the_layers():
    recipe = small_recipe(
        model=SMALL["model"] | {"ffn": "gelu", "norm_eps": 0.5, "rope_theta": 77.0, "head_dim": 6, "kv_heads": 1},
        moe=SMALL["moe"]
        | {"top_k": 3, "expert": "gelu", "shared_dim": 5, "expert_dim": 7}
        | {"router": {"kind": "topk", "weights": "raw"}},
    )
    model = build_model(recipe)
    dense, moe = model.layers[0].ffn, model.layers[1].ffn
    assert dense.kind == "gelu" and dense.w_in.shape == (12, 8)
    assert (moe.router.top_k, moe.router.weights, moe.experts.kind) == (3, "raw", "gelu")
    assert moe.experts.w_in.shape == (4, 7, 8) and moe.shared.w_in.shape == (5, 8)
    assert model.norm.eps == model.layers[0].ffn_norm.eps == model.layers[1].attention_norm.eps == 0.5
    assert model.shape.rope_theta == 77.0 and model.layers[0].attention.qkv.weight.shape == ((4 + 2) * 6, 8)
    assert model.recompute == "none"
    for way in ("block", "reentrant"):
        assert build_model(small_recipe(train=SMALL["train"] | {"recompute": way})).recompute == way


def test_the_vocabulary_is_the_tokenizers_own_unless_given():
    section = small_recipe(model=SMALL["model"] | {"vocab_size": None}).model
    assert transformer_shape(section, 257).vocab_size == 257
    assert transformer_shape(small_recipe().model, 257).vocab_size == 32
    assert build_model(small_recipe(model=SMALL["model"] | {"vocab_size": None})).embedding.weight.shape == (257, 8)


@pytest.mark.parametrize(("precision", "parameters", "dense", "router", "rows", "logits"), DTYPES)
def test_dtypes_of_each_precision(precision, parameters, dense, router, rows, logits):
    model = build_model(recipe_of(precision, shared_dim=4))
    seen = {}
    moe = model.layers[1].ffn
    model.layers[0].attention.qkv.register_forward_hook(lambda m, i, o: seen.update(attention=o.dtype))
    model.layers[0].ffn.register_forward_hook(lambda m, i, o: seen.update(network=o.dtype))
    moe.shared.register_forward_hook(lambda m, i, o: seen.update(shared=o.dtype))
    moe.router.register_forward_hook(
        lambda m, i, o: seen.update(router=o[0].dtype, probs=o[1].probs_TE.dtype, weights=o[1].weights_TK.dtype)
    )
    moe.experts.register_forward_hook(lambda m, i, o: seen.update(rows_in=i[0].dtype, rows_out=o.dtype))
    output = model(TOKENS)
    assert seen == {
        "attention": dense, "network": dense, "shared": dense, "router": router, "probs": router, "weights": router,
        "rows_in": rows, "rows_out": rows,
    }  # fmt: skip
    assert output.logits.dtype == logits
    (sums,) = output.routing
    assert sums.prob_sum_E.dtype == sums.z_sum.dtype == sums.entropy_sum.dtype == router
    assert sums.counts_E.dtype == torch.int64
    output.logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == parameters, name


def test_precision_does_not_change_the_initial_weights():
    reference = dict(build_model(recipe_of("float64")).named_parameters())
    for precision in ("selective", "bf16", "float32"):
        for name, parameter in build_model(recipe_of(precision)).named_parameters():
            assert torch.equal(parameter.double(), reference[name]), name


def test_one_seed_gives_the_same_model_twice_and_another_seed_another():
    first = dict(build_model(recipe_of(seed=3)).named_parameters())
    torch.manual_seed(99)
    second, other = (dict(build_model(recipe_of(seed=seed)).named_parameters()) for seed in (3, 4))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, other[name]) == ("norm" in name), name


def test_initial_weights_follow_from_the_names_in_the_model():
    model = build_model(recipe_of("float32", seed=7))
    scale = (2 * 2) ** -0.5
    for name, std, value in [
        ("embedding.weight", EMBEDDING_STD, model.embedding.weight),
        ("layers.0.ffn.w_in", 8**-0.5, model.layers[0].ffn.w_in),
        ("layers.0.ffn.w_out", scale * 12**-0.5, model.layers[0].ffn.w_out),
        ("layers.1.attention.out.weight", scale * 8**-0.5, model.layers[1].attention.out.weight),
        ("layers.1.ffn.router.weight", 8**-0.5, model.layers[1].ffn.router.weight),
        ("layers.1.ffn.experts.w_in.2", 8**-0.5, model.layers[1].ffn.experts.w_in[2]),
        ("layers.1.ffn.experts.w_out.3", scale * 6**-0.5, model.layers[1].ffn.experts.w_out[3]),
    ]:
        expected = torch.empty_like(value)
        normal_by_name_(expected, std=std, seed=7, name=name)
        assert torch.equal(value, expected), name
    assert torch.equal(model.norm.weight, torch.ones(8))


def world_of(rank, expert_parallel=2, placement=()):
    """One of two ranks, without processes: enough to make a model, not to run it."""
    topology = Topology(2, expert_parallel, 4, placement)
    ranks = topology.expert_group(rank)
    return World(topology, rank, rank, expert=Group(ranks, ranks.index(rank)))


@pytest.mark.parametrize("placement", [(), (2, 0, 3, 1)], ids=["in order", "placed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_hold_their_slices_of_the_one_process_model(rank, placement):
    whole = dict(build_model(small_recipe()).named_parameters())
    world = world_of(rank, placement=placement)
    model = build_model(small_recipe(), world)
    ids = expert_ids(model)
    assert set(ids.values()) == {world.topology.experts_of(rank)}
    for name, parameter in model.named_parameters():
        expected = whole[name][list(ids[name])] if name in ids else whole[name]
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("rank", [0, 1])
def test_replicas_hold_the_same_model(rank):
    whole = dict(build_model(small_recipe()).named_parameters())
    for name, parameter in build_model(small_recipe(), world_of(rank, expert_parallel=1)).named_parameters():
        assert torch.equal(parameter, whole[name]), name


def test_a_world_made_for_other_experts_says_so():
    with pytest.raises(TopologyError, match="the layer has 4 experts but the topology was made for 6"):
        build_model(small_recipe(), World(Topology(num_experts=6)))


def test_the_meta_device_costs_no_memory():
    recipe = small_recipe(moe=SMALL["moe"] | {"expert_dim": 2**30, "num_experts": 2**10})
    with torch.device("meta"):
        model = make_transformer(recipe, World(Topology(num_experts=2**10)))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.layers[1].ffn.experts.w_in.shape == (2**10, 2**31, 8)
