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
            if key == "policy" or (key == "kind" and section in ROUTERS.values()):
                # It tells which of the sections this one is, so that it has to be said and yet has a default.
                assert field.description, (section, key)
                continue
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
    ("sync.inside=delayed", ["sync.inside is 'delayed'", "blocking, or a mapping such as {delay: 1}"]),
    ("sync.inside={delay: -1}", ["sync.inside.delay is -1", "0 or more", "applying it"]),
    ("sync.inside={delay: 1.0}", ["sync.inside.delay is 1.0", "a whole number", "Write 1."]),
    ("sync.inside={}", ["sync.inside.delay is missing", "required"]),
    ("sync.inside={delay: 1, dealy: 2}", ["sync.inside.dealy is not a known key", "Did you mean delay?"]),
    (
        "sync.inside={delay: 1}",
        ["sync.inside is {delay: 1} but parallel.zero is 1", "Use zero: 0, or inside"],
    ),
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


def moe(**entries: str) -> str:
    """Gives an override of the whole section, with the minimal one's entries where others are not given."""
    whole = {"num_experts": "8", "top_k": "2", "expert_dim": "64"} | entries
    return f"moe={{{', '.join(f'{key}: {value}' for key, value in whole.items())}}}"


FUTURE = "{kind: expert_choice, sees_the_future: true}"

# Every rule of the experts, their routers and their losses, and those that compare them with other sections.
MOE_ERRORS: list[tuple[list[str], list[str]]] = [
    # Forms and limits of single entries.
    (["moe.layers={every: 2, offset: -1}"], ["moe.layers.offset is -1", "0 or more", "the default, 0"]),
    (["moe.num_experts=0"], ["moe.num_experts is 0", "1 or more", "number of routed experts"]),
    (["moe.zero_experts=-1"], ["moe.zero_experts is -1", "0 or more", "the default, 0"]),
    (["moe.expert_dim=0"], ["moe.expert_dim is 0", "greater than 0", "hidden width of one expert"]),
    (["moe.shared_dim=-1"], ["moe.shared_dim is -1", "0 or more", "the default, 0"]),
    (["moe.expert_dropout=1.0"], ["moe.expert_dropout is 1.0", "less than 1", "the default, 0.0"]),
    (["moe.expert=swiglu_clampd"], ["moe.expert is 'swiglu_clampd'", "'relu2' or 'swiglu_clamped'", "swiglu_clamped?"]),
    (["moe.dispatcher=all_to_al"], ["moe.dispatcher is 'all_to_al'", "'all_to_all' or 'all_gather'", "all_to_all?"]),
    (["moe.wire=float16"], ["moe.wire is 'float16'", "'compute' or 'float32'", "Did you mean float32?"]),
    (["moe.products=group"], ["moe.products is 'group'", "'loop' or 'grouped'", "Did you mean grouped?"]),
    (["moe.step_loads=keeps"], ["moe.step_loads is 'keeps'", "'count' or 'keep'", "Did you mean keep?"]),
    (["moe.compile=1"], ["moe.compile is 1", "true or false", "the default, false"]),
    (["moe.device_groups=1"], ["moe.device_groups is 1", "2 or more", "the default, null"]),
    (["moe.capacity=1.25"], ["moe.capacity is 1.25", "a mapping of keys to values", "the default, null"]),
    (["moe.capacity={}"], ["moe.capacity.factor is missing", "required", "null: no limit"]),
    (["moe.capacity={factor: 1.0, minimum: 0}"], ["moe.capacity.minimum is 0", "1 or more", "the default, 1"]),
    (["moe.capacity={factor: 1.0, eval_factor: 0}"], ["moe.capacity.eval_factor is 0", "greater than 0", "null"]),
    (["moe.capacity={factor: 1, policy: postion}"], ["moe.capacity.policy is 'postion'", "Did you mean position?"]),
    (["moe.expert_dropout=-0.1"], ["moe.expert_dropout is -0.1", "0 or more", "the default, 0.0"]),
    (["moe.router.jitter=1.0"], ["moe.router.jitter is 1.0", "less than 1", "the default, 0.0"]),
    (["moe.router.jitter=-0.1"], ["moe.router.jitter is -0.1", "0 or more", "the default, 0.0"]),
    (["moe.router={kind: switch, jitter: 1.0}"], ["moe.router.jitter is 1.0", "less than 1", "the default, 0.01"]),
    (["moe.router={kind: switch, jitter: -0.1}"], ["moe.router.jitter is -0.1", "0 or more", "the default, 0.01"]),
    (["moe.router.groups={number: 2, keep: 0}"], ["moe.router.groups.keep is 0", "1 or more", "may take experts from"]),
    (["moe.router.groups={number: 2, keep: 1, top: 0}"], ["moe.router.groups.top is 0", "1 or more", "default, 2"]),
    *(
        (
            [f"moe.router={{kind: sigmoid_bias, update: {{rule: pid, {entry}: {value}}}}}"],
            [f"moe.router.update.{entry} is {value}", rule, default],
        )
        for entry, value, rule, default in [
            ("until", -1, "0 or more", "the default, null"),
            ("experts_per_token", 0, "greater than 0", "the default, null"),
            ("integral", -1, "0 or more", "the default, 0.0"),
            ("derivative", -1, "0 or more", "the default, 0.0"),
        ]
    ),
    (["moe.router.input_noise=-1"], ["moe.router.input_noise is -1", "0 or more", "the default, 0.0"]),
    (["moe.router.scale=0"], ["moe.router.scale is 0", "greater than 0", "the default, 1.0"]),
    (["moe.router.groups={number: 1, keep: 1}"], ["moe.router.groups.number is 1", "2 or more", "equal groups"]),
    (["moe.router={kind: hash, score: sigmod}"], ["moe.router.score is 'sigmod'", "Did you mean sigmoid?"]),
    (
        ["moe.router={kind: sigmoid_bias, update: {rule: pdi}}"],
        ["moe.router.update.rule is 'pdi'", "Did you mean pid?"],
    ),
    (["moe.router={kind: sigmoid_bias, update: {rate: -1}}"], ["moe.router.update.rate is -1", "0 or more"]),
    (["moe.router={kind: switch, weights: raw}"], ["moe.router.weights is not a known key", "are: kind, jitter"]),
    (["moe.balance=[{coefficient: 1}]"], ["moe.balance.0.loss is missing", "required", "switch: experts times"]),
    (["moe.balance=[{loss: swich, coefficient: 1}]"], ["moe.balance.0.loss is 'swich'", "Did you mean switch?"]),
    (["moe.balance=[{loss: z, coefficient: 1, scope: steps}]"], ["moe.balance.0.scope is 'steps'", "mean step?"]),
    # Rules inside the section.
    (["moe.capacity={factor: 0}"], ["moe.capacity.factor is 0", "greater than 0", "Use 1.25, or null for no limit"]),
    (["moe.shared_gate=true"], ["moe.shared_gate is true", "shared_dim is 0", "Set shared_dim, or remove the gate"]),
    (
        [moe(capacity="{factor: 1.0}", router=FUTURE)],
        ["moe.capacity is set but moe.router.kind is expert_choice", "takes top_k * tokens", "Remove moe.capacity"],
    ),
    (
        [moe(capacity="{factor: 1.0, normalise: after}", router="{weights: raw}")],
        ["moe.capacity.normalise is after but moe.router.weights is raw", "not normalised", "normalise: before, or"],
    ),
    (
        ["moe.device_groups=3"],
        ["moe.device_groups is 3", "divide moe.num_experts, which is 8", "device_groups: 2 or 4"],
    ),
    (
        [moe(dispatcher="local", deduplicate="true")],
        ["moe.deduplicate is true", "moe.dispatcher is local, where no token travels twice", "dispatcher: all_to_all"],
    ),
    (
        [moe(dispatcher="all_gather", deduplicate="true")],
        ["moe.deduplicate is true", "moe.dispatcher is all_gather", "Use dispatcher: all_to_all"],
    ),
    # Routers.
    (
        ["moe.router={kind: expert_choice}"],
        ["moe.router.sees_the_future is false", "later ones", "sees_the_future: true"],
    ),
    (["moe.router={kind: expert_choice, sees_the_future: false}"], ["moe.router.sees_the_future is false", "insist"]),
    (
        ["moe.router={weights: raw, softmax: after}"],
        ["moe.router.softmax is 'after'", "always sums to 1, but weights is raw", "Leave weights out, or use softmax"],
    ),
    (
        ["moe.router.groups={number: 4, keep: 5}"],
        ["moe.router.groups.keep is 5", "from 1 to number, which is 4", "keep: 4 at most"],
    ),
    (
        ["moe.router={kind: sigmoid_bias, update: {integral: 0.5}}"],
        ["moe.router.update.integral is 0.5", "the rule is sign, which does not use it", "rule: pid, or leave it out"],
    ),
    (
        ["moe.router={kind: sigmoid_bias, update: {rule: proportional, derivative: 0.5}}"],
        ["moe.router.update.derivative is 0.5", "the rule is proportional", "rule: pid, or leave it out"],
    ),
    (
        ["moe.router={kind: switch}"],
        ["moe.router.kind is switch but moe.top_k is 2", "takes one expert", "top_k: 1, or kind: topk"],
    ),
    (
        [moe(top_k="3", router="{kind: gshard}")],
        ["moe.router.kind is gshard but moe.top_k is 3", "takes two experts", "top_k: 2, or kind: topk"],
    ),
    (
        [moe(top_k="1", router="{kind: noisy_topk}")],
        ["moe.router.kind is noisy_topk but moe.top_k is 1", "always 1", "top_k: 2 or more, or kind: switch"],
    ),
    (
        [moe(top_k="1", router="{softmax: after}")],
        ["moe.top_k is 1 but the weights of moe.router are normalised", "learn nothing", "and softmax: before"],
    ),
    (
        [moe(top_k="1", router="{kind: hash, weights: normalised}")],
        ["moe.top_k is 1 but the weights of moe.router are normalised", "learn nothing", "Use weights: raw"],
    ),
    *(
        (
            [moe(zero_experts="1", router=router)],
            [f"moe.zero_experts is 1 but moe.router.kind is {kind}", "only switch, topk and", "zero_experts: 0, or"],
        )
        for kind, router in [
            *((kind, f"{{kind: {kind}}}") for kind in ("gshard", "noisy_topk", "hash")),
            ("expert_choice", FUTURE),
        ]
    ),
    (
        ["moe.router={kind: sigmoid_bias, update: {experts_per_token: 1.5}}"],
        ["experts_per_token is 1.5 with moe.top_k 2 and 0 zero experts", "where there are", "or leave it out"],
    ),
    (
        [moe(zero_experts="4", router="{kind: sigmoid_bias, update: {experts_per_token: 2.5}}")],
        ["experts_per_token is 2.5 with moe.top_k 2 and 4 zero experts", "at most top_k", "or leave it out"],
    ),
    (
        [moe(zero_experts="1", router="{groups: {number: 4, keep: 2}}")],
        ["moe.router.groups is set but moe.zero_experts is 1", "are in no group", "Remove one of the two"],
    ),
    (
        ["moe.router.groups={number: 3, keep: 1}"],
        ["moe.router.groups.number is 3 but moe.num_experts is 8", "must be equal", "number: 2 or 4"],
    ),
    (
        ["moe.router.groups={number: 8, keep: 4}"],
        ["moe.router.groups.top is 2 but a group has 1 experts", "Use top: 1 at most"],
    ),
    (
        [moe(top_k="3", router="{kind: sigmoid_bias, groups: {number: 4, keep: 1}}")],
        ["groups.keep is 1, which leaves 2 experts, but moe.top_k is 3", "keep: 2 at least, or top_k: 2 at most"],
    ),
    # Losses.
    (
        ["moe.balance=[{loss: sequence, coefficient: 0.001, scope: step}]"],
        ["moe.balance.0.scope is 'step'", "the loss sequence is over each sequence", "Leave scope out, or use loss"],
    ),
    *(
        (
            [f"moe.balance=[{{loss: {loss}, coefficient: 0.02}}]"],
            [f"moe.balance has the loss {loss} but moe.device_groups is null", "over groups", "Set moe.device_groups"],
        )
        for loss in ("device", "communication")
    ),
    (
        ["moe.balance=[{loss: load, coefficient: 0.01}]"],
        ["moe.balance has the loss load but moe.router.kind is topk", "noise", "noisy_topk}, or loss: importance"],
    ),
    (
        [moe(top_k="8", router="{kind: noisy_topk}", balance="[{loss: load, coefficient: 0.01}]")],
        ["moe.balance has the loss load but moe.top_k is 8", "every chance is 1", "Use a smaller top_k, or remove"],
    ),
    *(
        (
            [moe(router=FUTURE, device_groups="2", balance=f"[{{loss: {loss}, coefficient: 0.01}}]")],
            [f"has the loss {loss} but moe.router.kind is expert_choice", "the loss is constant", "Remove it"],
        )
        for loss in ("switch", "gshard", "sequence", "device", "communication")
    ),
    # What other sections say.
    (
        ["moe.dispatcher=local", "parallel.expert=2"],
        ["moe.dispatcher is local but parallel.expert is 2", "elsewhere", "dispatcher: auto, or expert: 1"],
    ),
    (
        ["moe.products=grouped", "train.precision=float64", "parallel.zero=0"],
        ["moe.products is grouped but train.precision is float64", "no grouped products", "Use products: auto"],
    ),
    (
        ["moe=null", "parallel.expert=2"],
        ["parallel.expert is 2 but moe is null", "no experts to spread", "expert: 1, or add a moe section"],
    ),
    *(
        (
            ["optim.kind=muon", f"parallel.zero={stage}"],
            [f"optim.kind is muon but parallel.zero is {stage}", "needs whole matrices", "zero: 0, or kind: adamw"],
        )
        for stage in (1, 2)
    ),
    *(
        (
            ["train.precision=float64", f"parallel.zero={stage}"],
            [f"train.precision is float64 but parallel.zero is {stage}", "partition in float32", "Use zero: 0"],
        )
        for stage in (1, 2)
    ),
    (
        ["optim.schedule.warmup=5", "train.steps=3"],
        ["optim.schedule.warmup is 5 but train.steps is 3", "end before", "warmup: 2 at most, or steps: 6 at least"],
    ),
    (
        ["optim.schedule={kind: wsd, warmup: 1}", "train.steps=2"],
        ["optim.schedule.warmup is 1 and decay takes 0.2 of the 2 steps", "never reaches lr", "or a shorter warmup"],
    ),
]


@pytest.mark.parametrize(("overrides", "parts"), MOE_ERRORS, ids=["; ".join(overrides) for overrides, _ in MOE_ERRORS])
def test_one_wrong_entry_of_the_experts_gives_one_error_with_path_value_rule_and_repair(
    tmp_path: Path, overrides: list[str], parts: list[str]
) -> None:
    message = error_of(write_recipe(tmp_path), overrides)

    assert message.startswith("1 error in ") and len(message.splitlines()) == 2
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "overrides",
    [
        [moe(capacity="{factor: null, eval_factor: 2.0}")],
        [moe(capacity="{factor: 1.0, normalise: after}", router="{weights: normalised}")],
        [moe(capacity="{factor: 1.0}", router="{weights: raw}")],
        [moe(capacity="null", router=FUTURE)],
        [moe(capacity="null", router="{weights: raw}")],
        [moe(shared_dim="8", shared_gate="true")],
        [moe(shared_dim="0", shared_gate="false")],
        [moe(dispatcher="auto", deduplicate="true"), "parallel.expert=8"],
        [moe(dispatcher="all_to_all", deduplicate="true")],
        [moe(dispatcher="local", deduplicate="false"), "parallel.expert=1"],
        [moe(device_groups="null")],
        [moe(router="{weights: raw, softmax: before}")],
        [moe(router="{weights: normalised, softmax: after}")],
        [moe(products="grouped"), "train.precision=bf16"],
        [moe(router=FUTURE, balance="[{loss: z, coefficient: 0.001}, {loss: importance, coefficient: 0.01}]")],
        [moe(router="{kind: noisy_topk}", top_k="7", balance="[{loss: load, coefficient: 0.01}]")],
        [
            moe(
                device_groups="8",
                balance="[{loss: device, coefficient: 0.05}, {loss: communication, coefficient: 0.02}]",
            )
        ],
        [moe(router="{kind: sigmoid_bias, update: {rule: pid, integral: 0.1, derivative: 0.1}}")],
        [moe(router="{kind: sigmoid_bias, update: {rule: sign, integral: 0.0}}")],
        [moe(zero_experts="2", router="{kind: sigmoid_bias, update: {experts_per_token: 2.0}}")],
        [moe(top_k="4", router="{groups: {number: 4, keep: 2}}")],
        [moe(top_k="1", router="{groups: {number: 8, keep: 1, top: 1}}")],
        [moe(top_k="8", balance="[{loss: z, coefficient: 0.001}]")],
        [moe(balance="[{loss: sequence, coefficient: 0.001, scope: sequence}]")],
        ["optim.kind=muon", "parallel.zero=0"],
        ["train.precision=float64", "parallel.zero=0"],
        ["optim.schedule={kind: wsd, warmup: 79}"],
    ],
    ids="; ".join,
)
def test_the_rules_allow_what_is_just_inside(tmp_path: Path, overrides: list[str]) -> None:
    assert load_minimal(tmp_path, *overrides).name == "tiny"


def test_a_scope_that_is_not_given_follows_from_the_loss(tmp_path: Path) -> None:
    losses = "[{loss: switch, coefficient: 0.01}, {loss: sequence, coefficient: 0.001}]"
    recipe = load_minimal(tmp_path, f"moe.balance={losses}")

    assert recipe.moe is not None
    assert [term.scope for term in recipe.moe.balance] == ["micro_batch", "sequence"]


def test_independent_mistakes_of_the_experts_come_at_once(tmp_path: Path) -> None:
    message = error_of(write_recipe(tmp_path), [moe(top_k="9", shared_gate="true")])

    assert message.startswith("2 errors in ") and len(message.splitlines()) == 3
    assert "moe.top_k is 9" in message and "moe.shared_gate is true" in message

    losses = "[{loss: z, coefficient: -1}, {loss: swich, coefficient: 1}]"
    entries = {"num_experts": "6", "device_groups": "4", "router": "{kind: gshrad}", "wire": "x", "balance": losses}
    message = error_of(write_recipe(tmp_path), [moe(**entries, capacity="{factor: -1}")])
    expected = [
        "moe.router.kind is 'gshrad'",
        "moe.capacity.factor is -1",
        "moe.device_groups is 4",
        "moe.balance.0.coefficient is -1",
        "moe.balance.1.loss is 'swich'",
        "moe.wire is 'x'",
    ]
    assert message.startswith(f"{len(expected)} errors in ") and len(message.splitlines()) == 1 + len(expected)
    for part in expected:
        assert part in message


def test_a_mistake_of_the_experts_is_not_blamed_on_what_follows_from_it(tmp_path: Path) -> None:
    entries = {"top_k": "9", "router": "{kind: gshard}", "balance": "[{loss: load, coefficient: 0.01}]"}
    message = error_of(write_recipe(tmp_path), [moe(**entries)])

    assert message.startswith("1 error in ") and "moe.top_k is 9" in message
    message = error_of(write_recipe(tmp_path), [moe(router="{kind: best}", capacity="{factor: 1.0, normalise: after}")])
    assert message.startswith("1 error in ") and "moe.router.kind is 'best'" in message
    message = error_of(write_recipe(tmp_path), ["parallel.zero=3", "optim.kind=muon", "train.precision=float64"])
    assert message.startswith("1 error in ") and "parallel.zero is 3" in message
    message = error_of(write_recipe(tmp_path), [moe(num_experts="x", device_groups="3", top_k="1000")])
    assert message.startswith("1 error in ") and "moe.num_experts is 'x'" in message


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


def warnings_of(moe: dict[str, Any]) -> list[str]:
    """Gives the warnings of a small recipe with these entries of `moe`."""
    return small_recipe(moe=SMALL["moe"] | {"balance": []} | moe).warnings()


@pytest.mark.parametrize("policy", ["position", "probability", "random", "batch_prioritised"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_limit_in_evaluation_that_looks_at_later_tokens_is_warned_of(policy: str, top_k: int) -> None:
    limit = {"factor": 1.25, "policy": policy}
    assert warnings_of({"top_k": top_k, "capacity": limit}) == []
    sentences = warnings_of({"top_k": top_k, "capacity": limit | {"eval_factor": 2.0}})
    if policy == "position" and top_k == 1:
        assert sentences == []
    else:
        (only,) = sentences
        assert only.startswith(f"moe.capacity.eval_factor is 2 with policy {policy} and top_k {top_k}: ")
        assert "later tokens" in only and "not those of a causal model" in only and "Leave eval_factor out" in only


def test_a_router_in_bfloat16_is_warned_of() -> None:
    assert warnings_of({"router": {"kind": "topk", "compute": "float32"}}) == []
    (only,) = warnings_of({"router": {"kind": "topk", "compute": "bfloat16"}})
    assert only.startswith("moe.router.compute is bfloat16") and "use float32 for anything else" in only


def test_warnings_come_all_at_once() -> None:
    sentences = warnings_of(
        {
            "balance": [{"loss": "switch", "coefficient": 0.9}],
            "capacity": {"factor": 1.0, "eval_factor": 1.0},
            "router": {"kind": "topk", "compute": "bfloat16"},
        }
    )
    assert [sentence.split()[0] for sentence in sentences] == [
        "moe.balance.0.coefficient",
        "moe.capacity.eval_factor",
        "moe.router.compute",
    ]


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [
        *((loss, 0.001, 0.1) for loss in ("switch", "gshard", "importance", "load", "device", "communication")),
        *((loss, 0.0001, 0.01) for loss in ("z", "sequence")),
    ],
)
def test_every_loss_has_a_usual_coefficient(loss: str, low: float, high: float) -> None:
    entries: dict[str, Any] = {"device_groups": 2}
    if loss == "load":
        entries["router"] = {"kind": "noisy_topk"}
    for coefficient in (0.0, low, high):
        assert warnings_of(entries | {"balance": [{"loss": loss, "coefficient": coefficient}]}) == []
    for coefficient, effect in ((low / 2, "changes next to nothing"), (2 * high, "outweighs the language-model loss")):
        (only,) = warnings_of(entries | {"balance": [{"loss": loss, "coefficient": coefficient}]})
        assert f"for {loss}; usual are {low:g} to {high:g}" in only and effect in only
