"""Plans from the shell's side, and what they say about layouts."""

import json
import math

import pytest

from moe_async.errors import RecipeError
from moe_async.plan.choice import Assumptions, choose, largest_micro_batch, planned
from moe_async.plan.hardware import accelerator, parse_bytes
from moe_async.plan.layout import Layout, candidates, layout_of
from moe_async.plan.memory import rank_memory, syncer_memory
from moe_async.plan.sizes import journeys, model_sizes
from moe_async.plan.speed import operations, step_time
from moe_async.plan.traffic import transfers
from moe_async.recipe import load_recipe
from tools.plan import DOES_NOT_FIT, main

OLMOE, QUICK = "recipes/models/olmoe-1b-7b.yaml", "recipes/quickstart.yaml"
H100 = accelerator("h100")
GIVEN = Assumptions(H100, H100.memory)


def document(capsys, *arguments):
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_it_fits_or_says_what_would(capsys):
    code, plan = document(capsys, OLMOE, "--gpus", "64", "--memory", "80GB")
    assert code == 0 and plan["fits"] and plan["would_fit"] == []
    assert plan["parameters"] == {"total": 6_919_161_856, "active": 1_282_017_280}
    total = plan["memory_bytes"]["total"]
    assert total <= plan["memory_limit"] == 80 * 10**9
    code, plan = document(capsys, OLMOE, "--gpus", "64", "--memory", "40GB")
    assert code == DOES_NOT_FIT and not plan["fits"] and plan["memory_bytes"]["total"] == total
    # What it says would fit does.
    way = plan["would_fit"][0].partition(":")[0].split()
    assert main([OLMOE, "--gpus", "64", "--memory", "40GB", *way]) == 0
    assert "fits 40.0 GB" in capsys.readouterr().out
    assert main([OLMOE, "--gpus", "64", "--memory", "40GB"]) == DOES_NOT_FIT
    text = capsys.readouterr().out
    assert "does not fit: " in text and "most of it: activations" in text and "would fit: --set" in text


def test_more_accelerators_or_shorter_sequences_make_it_fit_too(capsys):
    small = [OLMOE, "--memory", "60GB"]
    _, plan = document(capsys, *small, "--gpus", "64")
    (more,) = (way for way in plan["would_fit"] if "--gpus" in way)
    gpus = more.partition("--gpus ")[2].partition(",")[0]
    assert main([*small, "--gpus", gpus]) == 0 and main([*small, "--gpus", str(int(gpus) // 2)]) == DOES_NOT_FIT
    (shorter,) = (way for way in plan["would_fit"] if "seq_len" in way)
    assert main([*small, "--gpus", "64", *shorter.split()]) == 0


def test_what_cannot_be_planned(capsys):
    for arguments, message in (
        ([OLMOE, "--gpus", "12"], "12"),
        ([OLMOE, "--gpus", "0"], "give 1 or more"),
        ([OLMOE, "--gpus", "8", "--gpu", "tpu"], "known are a100, h100"),
        ([OLMOE, "--gpus", "8", "--memory", "80"], "write it like 80GB"),
        ([QUICK, "--gpus", "3"], "multiple of 2"),
        (["recipes/quickstart-sync.yaml", "--gpus", "1"], "parallel.expert"),
        (["nothing.yaml", "--gpus", "8"], "nothing.yaml"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err, arguments
    for arguments in (["--skew", "0.5"], ["--products-reach", "2"], ["--links-reach", "no"]):
        with pytest.raises(SystemExit, match="2"):
            main([OLMOE, "--gpus", "8", *arguments])


def test_bytes_as_people_write_them():
    assert parse_bytes("80GB") == 80 * 10**9 and parse_bytes("1.5GiB") == 3 * 2**29
    with pytest.raises(RecipeError):
        parse_bytes("0GB")


def test_the_largest_micro_batch_is_the_largest():
    recipe = load_recipe(OLMOE)
    sizes, layout = model_sizes(recipe), layout_of(recipe, 64)
    most = largest_micro_batch(recipe, sizes, layout, GIVEN)
    needs = [
        rank_memory(recipe, sizes, Layout(**{**vars(layout), "micro_batch": size}), GIVEN.skew, GIVEN.reserve).total
        for size in (most, most + 1)
    ]
    assert needs[0] <= H100.memory < needs[1]


def test_the_choice_is_the_fastest_that_fits_and_can_be_launched():
    recipe = load_recipe(OLMOE)
    sizes = model_sizes(recipe)
    choice = choose(recipe, sizes, 64, GIVEN)
    fitting = [one for layout in candidates(recipe, sizes, 64) if (one := planned(recipe, sizes, layout, GIVEN)).fits]
    assert choice.best.time.seconds <= 1.02 * min(one.time.seconds for one in fitting)
    assert choice.fitting == len(fitting) and choice.best.fits
    settings = [f"{name}={value}" for name, value in choice.best.layout.entries().items()]
    chosen = load_recipe(OLMOE, settings)
    assert layout_of(chosen, 64) == choice.best.layout
    assert layout_of(chosen, 64).micro_batch * choice.best.layout.accumulation * 64 == recipe.train.global_batch


def test_layouts_keep_what_the_recipe_says():
    def stages(*overrides):
        recipe = load_recipe("recipes/quickstart-sync.yaml", overrides)
        return {layout.zero for layout in candidates(recipe, model_sizes(recipe), 2)}

    assert stages() == {0, 1, 2}
    assert stages("parallel.zero=0", "sync.inside={delay: 1}") == {0}
    assert stages("parallel.zero=0", "optim.kind=muon") == {0}
    recipe = load_recipe("recipes/quickstart-sync.yaml", ["moe.dispatcher=local", "parallel.expert=1"])
    assert {layout.expert for layout in candidates(recipe, model_sizes(recipe), 2)} == {1}


def test_operations_by_hand():
    recipe = load_recipe("recipes/quickstart-sync.yaml")
    cost = operations(recipe, model_sizes(recipe))
    # Two operations for each weight that a token meets; scores and values over half of 256 positions.
    attention = 2 * (128 * (128 + 2 * 64) + 128 * 128) + 2 * 2 * 128 * 128
    assert cost.blocks == 3 * attention
    assert cost.experts == 3 * 2 * 2 * 3 * 128 * 128
    assert cost.router == 3 * 2 * 8 * 128 and cost.head == 2 * 257 * 128


def test_messages_cross_nodes_where_groups_do():
    recipe = load_recipe(OLMOE)
    sizes = model_sizes(recipe)

    def sent(expert):
        layout = Layout(**{**vars(layout_of(recipe, 64)), "expert": expert})
        return transfers(recipe, sizes, layout, H100)

    rows = 8 * 4096 * layout_of(recipe, 64).micro_batch * 8
    assert sent(8)["tokens to experts"].network == 0
    assert sent(8)["tokens to experts"].node == pytest.approx(rows * 7 / 8 * 2048 * 2 * 4 * 16)
    wide = sent(16)["tokens to experts"]
    assert wide.node / (wide.node + wide.network) == pytest.approx(7 / 15)
    assert "tokens to experts" not in sent(1)
    # Groups of six lie across nodes of eight: the worst has two of its members in one, four in the other.
    recipe48 = load_recipe(OLMOE, ["moe.num_experts=48", "parallel.expert=6", "train.global_batch=384"])
    across = transfers(recipe48, model_sizes(recipe48), layout_of(recipe48, 48), H100)["tokens to experts"]
    assert across.network / (across.node + across.network) == pytest.approx(8 / 15)
    # Replicas of a node's experts are in other nodes.
    expert = sent(8)["expert gradients"]
    assert expert.node == 0 and expert.network == pytest.approx(1.5 * 2 * 7 / 8 * sizes.experts / 8 * 4)


def test_an_uneven_load_costs_time_and_memory_where_experts_are_shards():
    recipe = load_recipe(OLMOE)
    sizes = model_sizes(recipe)
    for expert, grows in ((8, True), (1, False)):
        layout = Layout(**{**vars(layout_of(recipe, 64)), "expert": expert})
        even, busy = (step_time(recipe, sizes, layout, H100, skew) for skew in (1.0, 2.0))
        assert (busy.parts["expert products"] == 2 * even.parts["expert products"]) is grows
        need = [rank_memory(recipe, sizes, layout, skew).total for skew in (1.0, 2.0)]
        assert (need[1] > need[0]) is grows


def test_the_syncer_holds_what_learners_exchange():
    recipe = load_recipe(QUICK)
    sizes = model_sizes(recipe)
    found = syncer_memory(recipe, sizes)
    exchanged = sizes.total * 4
    assert found["weights"] == found["published versions"] == exchanged
    assert found["outer optimizer"] == 0 and 0 < found["updates under way"] < exchanged
    policies = ["dense={policy: diloco, every: 10}", "expert={policy: same}", "router={policy: same}"]
    momentum = load_recipe(QUICK, [f"sync.between.{policy}" for policy in policies])
    assert syncer_memory(momentum, sizes)["outer optimizer"] == exchanged
    alone = load_recipe("recipes/quickstart-sync.yaml")
    assert syncer_memory(alone, sizes) == {}


def test_reductions_of_each_zero_stage():
    recipe = load_recipe(OLMOE)
    sizes = model_sizes(recipe)

    def dense(zero, accumulation):
        layout = Layout(**{**vars(layout_of(recipe, 8)), "zero": zero, "accumulation": accumulation})
        return transfers(recipe, sizes, layout, H100)["dense gradients"].node

    ring = 2 * 7 / 8 * sizes.replicated * 4
    assert [dense(0, 4), dense(1, 4), dense(2, 4)] == pytest.approx([ring, 1.5 * ring, 4.5 * ring])


def test_rounds_pass_the_port_of_the_syncer():
    rounds = "sync.between={dense: {policy: local_sgd, every: 2}, expert: {policy: same}, router: {policy: same}}"
    given = ["sync.learners=8", "train.global_batch=128", rounds]

    def sent(*more):
        recipe = load_recipe(OLMOE, [*given, *more])
        return transfers(recipe, model_sizes(recipe), layout_of(recipe, 64), H100)["rounds between learners"]

    update = 6_919_161_856 * 4 / 2
    through = sent()
    assert through.network == pytest.approx(update / 8, rel=1e-3) and through.exposed
    assert through.seconds(H100, 1.0) == pytest.approx(8 * update / 50e9, rel=1e-3)
    ring = sent("sync.via=all_reduce")
    assert ring.seconds(H100, 1.0) == pytest.approx(2 * 7 / 8 * update / 8 / 50e9, rel=1e-3)
    switch = (
        "{policy: switch, first: {policy: local_sgd, every: 100}, then: {policy: local_sgd, every: 2}, fraction: 0.01}"
    )
    assert sent(f"sync.between.dense={switch}").network == pytest.approx(through.network)


def test_a_z_loss_needs_no_counting_pass():
    def step(scope):
        recipe = load_recipe(OLMOE, [f"moe.balance=[{{loss: {scope[0]}, coefficient: 0.001, scope: {scope[1]}}}]"])
        return step_time(recipe, model_sizes(recipe), layout_of(recipe, 64), H100).seconds

    assert step(("z", "step")) == step(("z", "micro_batch"))
    assert step(("switch", "step")) > 1.2 * step(("switch", "micro_batch"))


def test_micro_batches_stay_where_routing_depends_on_them():
    recipe = load_recipe(OLMOE, ["moe.capacity={factor: 1.25}"])
    found = candidates(recipe, model_sizes(recipe), 64)
    assert {layout.micro_batch for layout in found} == {2} and len({layout.expert for layout in found}) > 1


def test_journeys_of_deduplicated_tokens():
    moe = load_recipe("recipes/models/deepseek-v3-like.yaml").moe
    # Eight ranks hold one group each, of which a token keeps four.
    assert journeys(moe, 8) <= 4 and journeys(moe, 2) <= 2
    free = moe.model_copy(update={"router": load_recipe(OLMOE).moe.router})
    assert journeys(free, 8) == pytest.approx(8 * (1 - math.prod((224 - k) / (256 - k) for k in range(8))))
    assert journeys(free, 256) == pytest.approx(8.0)


def test_large_batches_are_planned_at_once():
    recipe = load_recipe(OLMOE, ["train.global_batch=1073741824"])
    assert len(candidates(recipe, model_sizes(recipe), 8)) > 100


def test_odd_options(capsys):
    bucket = "deepspeed.zero_optimization"
    base = [OLMOE, "--gpus", "64", "--json"]
    size = {}
    for name, value in (("reduce_bucket_size", "auto"), ("overlap_comm", "true"), ("overlap_comm", "false")):
        main([*base, "--set", f"{bucket}.{name}={value}"])
        size[value] = json.loads(capsys.readouterr().out)["memory_bytes"]["backward"]["reduction bucket"]
    assert size == {"auto": 2 * 10**9, "true": 4 * 10**9, "false": 2 * 10**9}
    assert main(["recipes/quickstart-sync.yaml", "--gpus", "8", "--reserve", "0GB"]) == 0
    capsys.readouterr()
    main([OLMOE, "--gpus", "64", "--memory", "1GB"])
    assert "largest micro-batch that fits this layout: none does" in capsys.readouterr().out
    for skew in ("nan", "inf"):
        with pytest.raises(SystemExit, match="2"):
            main([OLMOE, "--gpus", "8", "--skew", skew])
