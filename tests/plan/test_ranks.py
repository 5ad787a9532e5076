"""What a plan says of a rank's memory and messages, against training on two ranks."""

from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist

from moe_async.comm import make_world
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.start import initialize
from moe_async.model import build_model
from moe_async.plan.hardware import accelerator
from moe_async.plan.layout import layout_of
from moe_async.plan.memory import rank_memory
from moe_async.plan.sizes import model_sizes
from moe_async.plan.traffic import transfers
from moe_async.recipe import load_recipe
from moe_async.topology import Topology
from tests.helpers.memory import LiveBytes
from tests.helpers.spawn import run_ranks

SYNC = Path(__file__).parents[2] / "recipes" / "quickstart-sync.yaml"
BUCKET = "deepspeed.zero_optimization.reduce_bucket_size=1000"
LENGTH = 64


def recipe_of(overrides):
    """Every token goes to every expert, so that loads are even."""
    even = ["moe.top_k=8", "moe.expert_dim=256", f"data.seq_len={LENGTH}", "train.global_batch=8"]
    return load_recipe(SYNC, [*even, *overrides])


class Sent:
    """Bytes that this rank sends to others in row exchanges and in reductions."""

    def __init__(self):
        self.rows = self.reduced = 0
        # DeepSpeed asks its own module for the gathers of ZeRO, which keeps torch's function from its start on.
        self._places = {
            (dist, "all_to_all_single"): self.all_to_all,
            (dist, "all_reduce"): self.all_reduce,
            (deepspeed.comm, "all_gather_into_tensor"): self.all_gather,
        }
        self._before = {name: getattr(module, name) for module, name in self._places}

    def all_to_all(self, output, given, output_sizes=None, input_sizes=None, **options):
        if input_sizes is not None and given.is_floating_point():
            rank = dist.get_rank(options.get("group"))
            away = sum(size for place, size in enumerate(input_sizes) if place != rank)
            self.rows += away * given.shape[-1] * given.element_size()
        return self._before["all_to_all_single"](output, given, output_sizes, input_sizes, **options)

    def all_reduce(self, tensor, *args, **options):
        if dist.get_world_size(options.get("group")) > 1 and tensor.numel() > 1000:
            self.reduced += tensor.numel() * tensor.element_size()
        return self._before["all_reduce"](tensor, *args, **options)

    def all_gather(self, output, tensor, *args, **options):
        # Half of what an all-reduce of the whole sends.
        self.reduced += output.numel() * output.element_size() / 2
        return self._before["all_gather_into_tensor"](output, tensor, *args, **options)

    def watch(self, on):
        """Count from now on, or no more."""
        for (module, name), counted in self._places.items():
            setattr(module, name, counted if on else self._before[name])


def train(rank, overrides):
    recipe = recipe_of(overrides)
    torch.set_num_threads(1)
    world = make_world(Topology(2, recipe.parallel.expert, recipe.moe.num_experts))
    live, sent = LiveBytes(), Sent()
    with live:
        engine = initialize(build_model(recipe, world), recipe, world)
        kept_always = live.live
        before_step = []
        step = engine.bridge.step

        def watched_step():
            # The optimizer on CPUs has other temporaries than on accelerators, so the step itself is left out.
            before_step.append(live.peak)
            outcome = step()
            live.peak = live.live
            return outcome

        engine.bridge.step = watched_step
        accumulation = recipe.train.accumulation
        # As many steps as fill a queue of delayed gradients.
        for _ in range(4):
            tokens = torch.randint(0, 257, (accumulation, 4 // accumulation, LENGTH))
            sent.rows = sent.reduced = 0
            sent.watch(True)
            engine.train_step([MicroBatch(part, part) for part in tokens])
            sent.watch(False)
    return kept_always, max(before_step), sent.rows, sent.reduced


@pytest.mark.slow
@pytest.mark.parametrize("expert", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_memory_of_a_rank(zero, expert, accumulation):
    overrides = [f"parallel.zero={zero}", f"parallel.expert={expert}", f"train.accumulation={accumulation}"]
    overrides += [BUCKET] if zero else []
    recipe = recipe_of(overrides)
    memory = rank_memory(recipe, model_sizes(recipe), layout_of(recipe, 2))
    always, peak, _, _ = run_ranks(2, train, overrides)[0]
    planned = sum(memory.backward.get(name, 0) for name in ("weights", "optimizer", "master weights"))
    assert planned == pytest.approx(always, rel=0.01)
    assert sum(memory.backward.values()) == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.kind=sgd"],
        ["optim.kind=sgd", "optim.momentum=0.9"],
        ["optim.kind=muon"],
        ["optim.kind=muon", "moe.shared_dim=64"],
        ["moe.dispatcher=all_gather"],
        ["moe.deduplicate=true"],
        ["sync.inside={delay: 1}"],
        ["sync.inside={delay: 2}", "train.accumulation=2"],
        ["train.accumulation=2", "moe.step_loads=keep", "moe.balance=[{loss: switch, coefficient: 0.01, scope: step}]"],
    ],
)
def test_memory_of_optimizers_and_schedules(overrides):
    overrides = ["parallel.zero=0", *overrides]
    recipe = recipe_of(overrides)
    memory = rank_memory(recipe, model_sizes(recipe), layout_of(recipe, 2))
    always, peak, _, _ = run_ranks(2, train, overrides)[0]
    assert memory.backward["weights"] + memory.backward["optimizer"] == pytest.approx(always, rel=0.01)
    assert sum(memory.backward.values()) == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.recompute=block"],
        ["moe.deduplicate=true"],
        ["moe.wire=float32", "train.accumulation=2"],
        ["train.accumulation=2", "moe.balance=[{loss: switch, coefficient: 0.01, scope: step}]"],
        ["moe.dispatcher=all_gather"],
    ],
)
def test_messages_of_a_rank(overrides):
    recipe = recipe_of(["parallel.zero=0", *overrides])
    found = transfers(recipe, model_sizes(recipe), layout_of(recipe, 2), accelerator("h100"))
    _, _, rows, reduced = run_ranks(2, train, ["parallel.zero=0", *overrides])[0]
    # Deduplicated rows come with weights of their experts, four bytes each; all_gather has its own messages there.
    if recipe.moe.dispatcher != "all_gather":
        assert found["tokens to experts"].node == pytest.approx(rows, rel=0.1 if recipe.moe.deduplicate else 0)
    # A ring of two sends what is reduced once.
    assert found["dense gradients"].node == pytest.approx(reduced, rel=0.02)
    assert "expert gradients" not in found and not found["dense gradients"].network


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "accumulation", "expert"), [(1, 1, 2), (1, 2, 1), (2, 2, 2), (2, 2, 1)])
def test_reductions_of_a_rank(zero, accumulation, expert):
    overrides = [f"parallel.zero={zero}", f"parallel.expert={expert}", f"train.accumulation={accumulation}"]
    overrides.append("deepspeed.zero_optimization.reduce_bucket_size=200000")
    recipe = recipe_of(overrides)
    found = transfers(recipe, model_sizes(recipe), layout_of(recipe, 2), accelerator("h100"))
    _, _, _, reduced = run_ranks(2, train, overrides)[0]
    planned = sum(found[name].node for name in ("dense gradients", "expert gradients") if name in found)
    assert planned == pytest.approx(reduced, rel=0.02)
