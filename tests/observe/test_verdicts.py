"""Each disease of routing is planted in a small model that really trains, and found; a healthy run has none."""

import pytest
import torch

from moe_async.comm import World
from moe_async.engine.load_meta import load_meta
from moe_async.engine.micro_batch import MicroBatch
from moe_async.engine.start import initialize, join_world
from moe_async.model import build_model
from moe_async.moe import MoELayer
from moe_async.observe import LoadStore, read_load
from moe_async.observe.recorder import LoadRecorder
from moe_async.observe.verdicts import verdicts
from tests.helpers.small import SMALL, small_recipe
from tests.helpers.spawn import run_ranks
from tests.observe.loads import figures_of, meta_of

STEPS, ROWS, LENGTH, VOCAB = 80, 32, 16, 32
DOMAINS = ("low", "high")
HEALTHY = [{"loss": "switch", "coefficient": 0.05, "scope": "step"}, {"loss": "z", "coefficient": 0.001}]
OPTIM = SMALL["optim"] | {"kind": "adamw", "lr": 0.003}


def recipe_of(balance=HEALTHY, optim=OPTIM, **moe):
    return small_recipe(
        moe=SMALL["moe"] | {"layers": [0, 1], "num_experts": 8, "balance": balance, **moe},
        optim=optim,
        train={"steps": STEPS, "global_batch": ROWS, "precision": "float32"},
    )


def routers(model):
    return [part.router for part in model.modules() if isinstance(part, MoELayer)]


def nothing(model, step):
    """A run that is left alone."""


def prefers_two_experts(model, step):
    """The rich get richer, as happens where nothing keeps experts even."""
    for router in routers(model):
        router.bias_state.bias_E[:2] += 0.02


def starves_expert_five(model, step):
    for router in routers(model):
        router.bias_state.bias_E[5] -= 0.02


def sharpens(model, step):
    for router in routers(model):
        router.weight.data *= 1.07


BIASED = {"kind": "sigmoid_bias", "update": {"rule": "sign", "rate": 0.0}}
PLANTS = {
    "healthy": (recipe_of(), nothing),
    "healthy bias": (
        recipe_of([], router={"kind": "sigmoid_bias", "update": {"rule": "sign", "rate": 0.003}}),
        nothing,
    ),
    "collapse": (recipe_of([], router=BIASED), prefers_two_experts),
    "dying experts": (recipe_of([], router=BIASED), starves_expert_five),
    "oscillating bias": (
        recipe_of([], router={"kind": "sigmoid_bias", "update": {"rule": "sign", "rate": 0.5}}),
        nothing,
    ),
    "owned expert": (recipe_of(), nothing),
    "router saturation": (recipe_of([HEALTHY[0]]), sharpens),
}


def batch_of(generator, apart):
    """Half of the sequences are of each domain; ``apart``: one has low tokens alone, the other high ones."""
    domains = torch.arange(ROWS) % 2
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    if apart:
        tokens = tokens // 2 + domains[:, None] * (VOCAB // 2)
    return MicroBatch(tokens, tokens.roll(-1, dims=1), domains=domains)


def train(recipe, change, folder, world, apart):
    torch.manual_seed(0)
    engine = initialize(build_model(recipe, world), recipe, world)
    engine.observed = load_meta(recipe, world, DOMAINS)
    recorder = LoadRecorder(LoadStore(folder, engine.observed))
    generator = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        report = engine.train_step([batch_of(generator, apart)])
        with torch.no_grad():
            change(engine.module, step)
        states = [router.bias_state for router in routers(engine.module)]
        biases = None if states[0] is None else torch.stack([state.bias_E for state in states]).double().numpy()
        recorder.add(step, report.load, biases)
    recorder.flush()


def all_runs(rank, folder):
    world: World | None = None
    for name, (recipe, change) in PLANTS.items():
        world = world or join_world(recipe)
        train(recipe, change, folder / name.replace(" ", "-"), world, apart=name == "owned expert")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(1, all_runs, folder, timeout=240)
    return folder


@pytest.mark.parametrize("name", PLANTS)
def test_what_was_planted_is_found_and_nothing_else(runs, name):
    found = verdicts(read_load(runs / name.replace(" ", "-")))
    expected = set() if name.startswith("healthy") else {name}
    assert {verdict.disease for verdict in found} == expected, "\n".join(map(str, found))
    if expected:
        assert {verdict.layer for verdict in found} >= {"layer 0"}
    if name == "dying experts":
        assert all(verdict.experts == (5,) for verdict in found)


def found_in(folder, counts, steps=10, domains=("code", "prose", "(none)"), **others):
    """Diseases of one layer with those counts [E] in every step."""
    meta = meta_of(layers=1, experts=len(counts), domains=domains)
    recorder = LoadRecorder(LoadStore(folder, meta))
    for step in range(1, steps + 1):
        recorder.add(step, figures_of(meta, [counts], **others))
    recorder.flush()
    return [verdict.disease for verdict in verdicts(read_load(folder))]


def test_little_evidence_is_none(tmp_path):
    assert found_in(tmp_path / "few", [60, 60, 60, 1]) == []
    assert found_in(tmp_path / "many", [80, 80, 80, 1]) == ["dying experts"]


@pytest.mark.parametrize(("share", "disease"), [(0.55, ["owned expert"]), (0.65, [])])
def test_most_of_the_text_may_be_most_of_an_expert(tmp_path, share, disease):
    counts = [[95, 30, 30, 30], [5, 70, 70, 70], [0, 0, 0, 0]]
    tokens = [1000 * share, 1000 * (1 - share), 0]
    assert found_in(tmp_path, [100] * 4, domain_tokens=tokens, domain_counts=[counts]) == disease


def test_logits_that_are_not_finite_are_not_taken_for_saturation(tmp_path):
    nan = [float("nan")]
    assert found_in(tmp_path / "bad", [100] * 4, top=nan, z=nan, entropy=nan, margin=nan, bad_tokens=[1]) == []
    assert found_in(tmp_path / "large", [100] * 4, top=[100], z=[200 * 51**2]) == ["router saturation"]
