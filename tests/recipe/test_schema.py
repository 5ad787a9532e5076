"""What a recipe may say: defaults, forms, and the message of each rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from moe_async.errors import RecipeError
from moe_async.recipe import EveryLayers, MoeSection, Recipe, SourceEntry, TopKRouter
from moe_async.recipe.routers import ROUTERS
from tests.helpers.small import SMALL, small_recipe
from tests.recipe.minimal import error_of, load_minimal, write_recipe


def test_a_minimal_recipe_gets_every_default(tmp_path: Path) -> None:
    recipe = load_minimal(tmp_path)

    assert recipe.name == "tiny"
    assert (recipe.model.kv_heads, recipe.model.head_dim, recipe.model.vocab_size) == (4, 16, None)
    assert recipe.moe is not None
    assert recipe.moe.moe_layers(4) == (0, 1, 2, 3)
    assert isinstance(recipe.moe.router, TopKRouter)
    assert (recipe.moe.router.weights, recipe.moe.shared_dim, recipe.moe.balance) == (None, 0, [])
    assert (recipe.moe.zero_experts, recipe.moe.capacity, recipe.moe.device_groups) == (0, None, None)
    assert (recipe.moe.dispatcher, recipe.moe.wire, recipe.moe.products) == ("auto", "compute", "auto")
    assert (recipe.parallel.expert, recipe.parallel.zero, recipe.sync.inside) == (1, 1, "blocking")
    assert (recipe.optim.lr, recipe.optim.betas, recipe.optim.clip) == (3e-4, (0.9, 0.95), 1.0)
    assert (recipe.optim.schedule.kind, recipe.optim.schedule.warmup) == ("cosine", 0)
    assert [entry.domain for entry in recipe.data.source] == ["python", "english", "cpp", "maths"]
    assert (recipe.data.seq_len, recipe.data.heldout, recipe.data.tokenizer) == (256, 0.05, "bytes")
    assert (recipe.train.accumulation, recipe.train.precision, recipe.train.recompute) == (1, "selective", "none")
    assert recipe.train.max_bad_steps == 20
    assert (recipe.log.dir, recipe.log.every, recipe.log.sample_tokens) == ("runs", 10, 160)
    assert recipe.deepspeed == {}


def test_a_recipe_is_frozen(tmp_path: Path) -> None:
    recipe = load_minimal(tmp_path)

    with pytest.raises(ValidationError, match="frozen"):
        recipe.model.dim = 3


def sections_of(model: type[BaseModel]) -> set[type[BaseModel]]:
    """Gives a model class and all model classes inside its schema's fields."""
    found = {model}
    for field in model.model_fields.values():
        for part in parts_of(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= sections_of(part)
    return found


def parts_of(annotation: object) -> Iterator[object]:
    """Gives an annotation and all that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from parts_of(part)


def test_every_key_has_a_description_that_states_its_default() -> None:
    sections = sections_of(Recipe)
    assert {SourceEntry, EveryLayers, *ROUTERS.values()} <= sections
    for section in sections:
        assert section.__doc__
        for key, field in section.model_fields.items():
            if key == "kind" and section in ROUTERS.values():
                continue  # it tells which of the sections this one is
            description = field.description or ""
            whole_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert "Default: " in description or "Required." in description or whole_section, (section, key)
            assert ("Required." in description) == field.is_required(), (section, key)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", (0, 1, 2, 3)),
        ("[3, 1]", (1, 3)),
        ("{every: 2, offset: 1}", (1, 3)),
        ("{every: 2}", (0, 2)),
        ("{every: 3, offset: 3}", (3,)),
    ],
)
def test_moe_layers_forms(tmp_path: Path, layers: str, expected: tuple[int, ...]) -> None:
    recipe = load_minimal(tmp_path, f"moe.layers={layers}")

    assert recipe.moe is not None
    assert recipe.moe.moe_layers(recipe.model.layers) == expected


def test_moe_layers_names_the_path_when_called_with_too_few_layers() -> None:
    section = MoeSection(num_experts=4, top_k=1, expert_dim=8, layers=[0, 5])

    with pytest.raises(RecipeError, match=r"moe\.layers names layer 5 but model\.layers is 3.*0 to 2"):
        section.moe_layers(3)


def test_source_forms_mean_the_same_entries(tmp_path: Path) -> None:
    words = load_minimal(tmp_path, "data.source=[builtin, 'notes/*.md']").data.source
    mapping = load_minimal(tmp_path, "data.source={path: 'notes/*.md'}").data.source

    assert [(entry.builtin, entry.path) for entry in words] == [
        ("python", None),
        ("english", None),
        ("cpp", None),
        ("maths", None),
        (None, "notes/*.md"),
    ]
    assert mapping == words[4:]
    assert load_minimal(tmp_path, "data.source='notes/*.md'").data.source == mapping


@pytest.mark.parametrize(
    ("path", "domain"),
    [("a/wiki.jsonl", "wiki"), ("code/**/*.py", "code"), ("corpus/", "corpus"), ("*.txt", "text"), ("../*", "text")],
)
def test_domain_defaults_to_the_last_plain_part_of_the_path(path: str, domain: str) -> None:
    assert SourceEntry(path=path).domain == domain
    assert SourceEntry(path=path, domain="mine").domain == "mine"


def test_a_path_named_builtin_is_a_path(tmp_path: Path) -> None:
    (entry,) = load_minimal(tmp_path, "data.source={path: builtin}").data.source

    assert (entry.builtin, entry.path) == (None, "builtin")


def test_head_dim_frees_dim_from_heads(tmp_path: Path) -> None:
    recipe = load_minimal(tmp_path, "model.dim=70", "model.head_dim=24", "model.kv_heads=2")

    assert (recipe.model.head_dim, recipe.model.kv_heads) == (24, 2)


# One override each; the message names the path, the value given, the rule and a repair.
ONE_ERROR: list[tuple[str, list[str]]] = [
    ("name='my run'", ["name is 'my run'", "letters, digits", "Use name: my-run."]),
    ("name=../up", ["name is '../up'", "Use name: up."]),
    ("name=no", ["name is false", "it must be text", "Put it in quotes"]),
    ("name=3", ["name is 3", 'Put it in quotes: "3"']),
    ("model.dim=abc", ["model.dim is 'abc'", "a whole number", "width of the residual stream"]),
    ("model.dim='64'", ["model.dim is '64'", "a whole number", "without quotes: 64"]),
    ("model.dim=0", ["model.dim is 0", "greater than 0"]),
    ("model.layers=true", ["model.layers is true", "a whole number"]),
    ("model.dim=70", ["model.dim is 70 but model.heads is 4", "Use dim: 64 or 72", "model.head_dim"]),
    ("model.dim=68", ["model.dim is 68 but model.heads is 4", "even width"]),
    ("model.head_dim=15", ["model.head_dim is 15", "even", "Use head_dim: 14 or 16"]),
    ("model.kv_heads=3", ["model.kv_heads is 3", "divide model.heads, which is 4", "kv_heads: 2 or 4"]),
    ("model.ffn=swigul", ["model.ffn is 'swigul'", "'swiglu', 'gelu' or 'relu2'", "Did you mean swiglu?"]),
    ("model.wdith=3", ["model.wdith is not a known key", "The keys of model are: dim, layers, heads"]),
    ("model.<dim>=3", ["model.<dim> is not a known key", "Did you mean dim?"]),
    ("model.lyers=3", ["model.lyers is not a known key", "Did you mean layers?"]),
    ("model=null", ["model is null", "a mapping of keys to values"]),
    ("modle.dim=3", ["modle is not a known key", "Did you mean model?"]),
    ("moe.top_k=9", ["moe.top_k is 9", "from 1 to moe.num_experts, which is 8", "top_k: 8 at most"]),
    ("moe.top_k=0", ["moe.top_k is 0", "1 or more"]),
    ("moe.layers=[1, 9]", ["moe.layers names layer 9 but model.layers is 4", "indices from 0 to 3"]),
    ("moe.layers=[1, 1]", ["moe.layers is [1, 1]", "layer 1 more than once"]),
    ("moe.layers=[]", ["moe.layers is []", "names no layer", "moe: null"]),
    ("moe.layers=[-1]", ["moe.layers.0 is -1", "0 or more"]),
    ("moe.layers=al", ["moe.layers is 'al'", "all, a list of layer indices", "{every: 2, offset: 1}"]),
    ("moe.layers={every: 0}", ["moe.layers.every is 0", "1 or more"]),
    ("moe.layers={every: 1, ofset: 2}", ["moe.layers.ofset is not a known key", "Did you mean offset?"]),
    ("moe.layers={every: 2, offset: 4}", ["moe.layers.offset is 4 but model.layers is 4", "from 0 to 3"]),
    ("moe.balance=[{loss: z, coefficient: -1}]", ["moe.balance.0.coefficient is -1", "0 or more"]),
    ("moe.weights=raw", ["moe.weights is not a known key", "The keys of moe are: layers, num_experts"]),
    ("moe.router=switch", ["moe.router is 'switch'", "a mapping whose kind is one of switch, topk"]),
    ("moe.router.kind=topq", ["moe.router.kind is 'topq'", "one of switch, topk", "Did you mean topk?"]),
    ("moe.router.weihgts=raw", ["moe.router.weihgts is not a known key", "Did you mean weights?"]),
    ("moe.router.weights=rwa", ["moe.router.weights is 'rwa'", "'normalised' or 'raw'", "Did you mean raw?"]),
    (
        "moe={num_experts: 8, top_k: 1, expert_dim: 64, router: {weights: normalised}}",
        ["moe.top_k is 1 but the weights of moe.router are normalised", "always 1", "Use weights: raw"],
    ),
    (
        "moe.balance=[{loss: z, coefficient: 1}, {loss: z, coefficient: 2}]",
        ["moe.balance has 2 terms with loss z", "Keep one"],
    ),
    ("parallel.expert=3", ["moe.num_experts is 8 but parallel.expert is 3", "6 or 9 experts", "expert: 2 or 4."]),
    ("parallel.zero=3", ["parallel.zero is 3", "0, 1 or 2"]),
    ("parallel.zero=true", ["parallel.zero is true", "0, 1 or 2"]),
    ("sync.inside=delayed", ["sync.inside is 'delayed'", "'blocking'"]),
    ("optim.lr='3e-4'", ["optim.lr is '3e-4'", "must be a number", "without quotes: 3e-4"]),
    ("optim.lr=true", ["optim.lr is true", "must be a number"]),
    ("optim.lr=.inf", ["optim.lr is inf", "finite"]),
    ("optim.betas=[0.9, 1.0]", ["optim.betas.1 is 1.0", "less than 1"]),
    ("optim.betas=[0.9]", ["optim.betas.1 is missing"]),
    ("optim.schedule.kind=cosin", ["optim.schedule.kind is 'cosin'", "Did you mean cosine?"]),
    (
        "optim.schedule.warmup=100",
        ["optim.schedule.warmup is 100 but train.steps is 100", "warmup: 99 at most", "steps: 101 at least"],
    ),
    (
        "optim.schedule={kind: wsd, warmup: 60, decay: 0.5}",
        ["warmup is 60 and decay takes 0.5 of the 100 steps", "overlap", "decay: 0.39 at most"],
    ),
    ("data.source=[]", ["data.source is []", "1 or more"]),
    ("data.source=7", ["data.source is 7", "an entry or a list of entries"]),
    ("data.source={}", ["data.source is {}", "exactly one of builtin and path", "Add one"]),
    ("data.source=[a, {path: b, builtin: cpp}]", ["data.source.1 is {", "exactly one of", "Remove one"]),
    ("data.source=[{builtin: pyton}]", ["data.source.0.builtin is 'pyton'", "Did you mean python?"]),
    ("data.source={builtin: cpp, field: text}", ["data.source.field is 'text'", "files only"]),
    # "builtin" stands for four entries, yet the mapping after it keeps the index that its writer sees.
    ("data.source=[builtin, {path: a, wieght: 2}]", ["data.source.1.wieght", "Did you mean weight?"]),
    ("data.heldout=0.6", ["data.heldout is 0.6", "0.5 or less", "the default, 0.05"]),
    ("train.steps=1e2", ["train.steps is 100.0", "a whole number", "Write 100."]),
    ("train.steps=null", ["train.steps is null", "a whole number"]),
    (
        "train.accumulation=3",
        ["train.accumulation is 3 but train.global_batch is 16", "accumulation: 2 or 4", "global_batch: 15 or 18"],
    ),
    ("train.precision=fp32", ["train.precision is 'fp32'", "'float32'"]),
    ("log.tensorboard=1", ["log.tensorboard is 1", "true or false", "the default, false"]),
    ("log.prompts=[a, 2]", ["log.prompts.1 is 2", 'Put it in quotes: "2"']),
    ("deepspeed={wandb: {since: 2020-01-01}}", ["deepspeed does not fit into a JSON file", "date"]),
]


@pytest.mark.parametrize(("override", "parts"), ONE_ERROR, ids=[override for override, _ in ONE_ERROR])
def test_one_wrong_entry_gives_one_error_with_path_value_rule_and_repair(
    tmp_path: Path, override: str, parts: list[str]
) -> None:
    message = error_of(write_recipe(tmp_path), [override])

    assert message.startswith("1 error in ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize("section", ["model", "optim", "data", "train"])
def test_a_missing_section_is_named(tmp_path: Path, section: str) -> None:
    text = "\n".join(line for line in write_recipe(tmp_path).read_text().splitlines() if not line.startswith(section))

    assert f"{section} is missing; it is required" in error_of(write_recipe(tmp_path, text))


def test_all_errors_come_at_once_from_every_section(tmp_path: Path) -> None:
    message = error_of(
        write_recipe(tmp_path),
        [
            "model.heads=5",
            "model.lyers=2",
            "moe.num_experts=63",
            "moe.layers=[9]",
            "parallel.expert=8",
            "optim.schedule.warmup=100",
            "train.steps=50",
            "log.every=0",
            "deepspeed.fp16.enabled=true",
            "deepspeed.optimizer.type=Adam",
        ],
    )

    expected = [
        "model.dim is 64 but model.heads is 5",
        "model.lyers",
        "moe.num_experts is 63 but parallel.expert is 8",
        "optim.schedule.warmup is 100 but train.steps is 50",
        "log.every is 0",
        "deepspeed.fp16",
        "deepspeed.optimizer",
    ]
    assert message.startswith(f"{len(expected)} errors in ")
    for part in expected:
        assert part in message
    assert len(message.splitlines()) == 1 + len(expected)


def test_experts_that_do_not_divide_name_the_nearest_repairs(tmp_path: Path) -> None:
    message = error_of(write_recipe(tmp_path), ["moe.num_experts=63", "parallel.expert=8"])

    assert message.endswith(
        "moe.num_experts is 63 but parallel.expert is 8; the experts must divide evenly over the expert ranks."
        " Use 56 or 64 experts, or expert: 7 or 9."
    )


def test_a_dense_model_takes_no_expert_ranks(tmp_path: Path) -> None:
    assert load_minimal(tmp_path, "moe=null").moe is None
    assert "parallel.expert is 2 but moe is null" in error_of(write_recipe(tmp_path), ["moe=null", "parallel.expert=2"])


def test_micro_batch_size_divides_the_global_batch(tmp_path: Path) -> None:
    recipe = load_minimal(tmp_path, "train.global_batch=32", "train.accumulation=2")

    assert [recipe.micro_batch_size(world) for world in (1, 2, 4, 16)] == [16, 8, 4, 1]


@pytest.mark.parametrize(
    ("world", "parts"),
    [
        (3, ["train.global_batch is 32 but 3 ranks", "--set train.global_batch=30 or --set train.global_batch=36"]),
        (16, ["take 64 equal micro-batches", "--set train.global_batch=64 or --set train.accumulation=2"]),
    ],
)
def test_micro_batch_size_names_the_override(tmp_path: Path, world: int, parts: list[str]) -> None:
    recipe = load_minimal(tmp_path, "train.global_batch=32", f"train.accumulation={2 if world == 3 else 4}")

    with pytest.raises(RecipeError) as caught:
        recipe.micro_batch_size(world)
    for part in parts:
        assert part in str(caught.value)


def test_check_world_wants_full_expert_groups(tmp_path: Path) -> None:
    recipe = load_minimal(tmp_path, "parallel.expert=4", "train.global_batch=24")

    recipe.check_world(4)
    recipe.check_world(8)
    with pytest.raises(RecipeError) as caught:
        recipe.check_world(6)
    message = str(caught.value)
    assert "parallel.expert is 4 but the launch has 6 ranks" in message
    assert "--set parallel.expert=1 or --set parallel.expert=2, or launch 4 or 8 ranks" in message


def test_check_world_reports_experts_and_batch_together(tmp_path: Path) -> None:
    recipe = load_minimal(tmp_path, "parallel.expert=2")

    with pytest.raises(RecipeError) as caught:
        recipe.check_world(3)
    assert "--set parallel.expert=1, or launch 2 or 4 ranks" in str(caught.value)
    assert "--set train.global_batch=15 or --set train.global_batch=18" in str(caught.value)


def test_a_recipe_made_in_python_obeys_the_same_rules() -> None:
    data: dict[str, Any] = {
        "model": {"dim": 64, "layers": 2, "heads": 4, "ffn_dim": 128},
        "moe": {"num_experts": 8, "top_k": 2, "expert_dim": 64},
        "parallel": {"expert": 3},
        "optim": {"lr": 1e-3},
        "data": {"source": "builtin"},
        "train": {"steps": 1, "global_batch": 1},
    }

    with pytest.raises(ValidationError, match=r"moe\.num_experts is 8 but parallel\.expert is 3"):
        Recipe.model_validate(data)
    assert Recipe.model_validate({**data, "parallel": {"expert": 2}}).name is None


@pytest.mark.parametrize("router", ["{}", "{weights: raw}", "{kind: switch}", "{kind: topk}"])
def test_one_expert_per_token_takes_every_other_rule(tmp_path: Path, router: str) -> None:
    recipe = load_minimal(tmp_path, "moe.top_k=1", f"moe.router={router}")

    assert recipe.moe is not None and recipe.moe.top_k == 1


def test_unusual_coefficients_are_allowed_and_warned_of():
    usual = [{"loss": "switch", "coefficient": 0.1}, {"loss": "z", "coefficient": 0.01}]
    assert small_recipe(moe=SMALL["moe"] | {"balance": usual}).warnings() == []
    assert small_recipe(moe=None).warnings() == []
    large = [{"loss": "switch", "coefficient": 0.9}, {"loss": "z", "coefficient": 0.1}]
    first, second = small_recipe(moe=SMALL["moe"] | {"balance": large}).warnings()
    assert first.startswith("moe.balance.0.coefficient is 0.9 for switch; usual are 0.001 to 0.1")
    assert "0.1 for z; usual are 0.0001 to 0.01" in second
    assert all("outweighs the language-model loss" in sentence for sentence in (first, second))
    small = [{"loss": "switch", "coefficient": 1e-4}, {"loss": "z", "coefficient": 0.0}]
    (only,) = small_recipe(moe=SMALL["moe"] | {"balance": small}).warnings()
    assert only.startswith("moe.balance.0.coefficient is 0.0001 for switch") and "changes next to nothing" in only
