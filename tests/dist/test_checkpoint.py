"""Checkpoints: resumed training equals uninterrupted training bit for bit, and nothing half-written is ever taken."""

import json
from pathlib import Path

import pytest
import torch

from moe_async.comm import make_world
from moe_async.data import load_corpus, make_tokenizer
from moe_async.engine.checkpoint import load_weights, save_checkpoint
from moe_async.engine.checkpoint_folder import find_checkpoints, read_manifest
from moe_async.engine.loop import Trainer
from moe_async.engine.run_folder import RunFolder
from moe_async.engine.start import initialize
from moe_async.engine.stop import StopFlag
from moe_async.errors import CheckpointError, MoeAsyncError
from moe_async.model import build_model
from moe_async.moe.classes import expert_ids
from moe_async.recipe import Recipe
from moe_async.topology import Topology
from tests.helpers.spawn import run_ranks
from tests.helpers.texts import tiny_document, write_texts

STEPS = 4


class Losses:
    """A hook-like recorder of everything a step reports."""

    def __init__(self, trainer):
        self.trainer, self.lines = trainer, []

    def run(self, steps):
        for _ in range(steps):
            line = self.trainer._step().line()
            for measured in ("tokens_per_second", "data_wait", "comm_wait"):
                line.pop(measured)
            self.lines.append(line)
        return self.lines


def make_trainer(document, world_size, folder):
    recipe = Recipe.model_validate(document)
    world = make_world(Topology(world_size, recipe.parallel.expert, 4))
    corpus = load_corpus(recipe.data, make_tokenizer("bytes"))
    engine = initialize(build_model(recipe, world), recipe, world)
    return Trainer(engine, recipe, world, corpus, RunFolder(Path(folder)), StopFlag())


def state(trainer):
    """Weights, full optimizer state and random states of one rank."""
    bridge = trainer.engine.bridge
    tensors = {f"param/{name}": p.detach().clone() for name, p in bridge.module.named_parameters()}
    for name, p in bridge.module.named_parameters():
        tensors.update({f"{key}/{name}": value.clone() for key, value in bridge.optimizer_state(p)})
    tensors["rng"] = torch.rand(3)
    return tensors, bridge.optimizer_steps(), trainer.state_dict()


def interrupted_and_not(rank, texts, folder, zero, optim):
    document = tiny_document(texts, folder)
    document["parallel"]["zero"] = zero
    document["optim"] |= optim
    first = make_trainer(document, 2, folder)
    first.evaluate()
    Losses(first).run(STEPS)
    torch.manual_seed(rank + 5)
    first.save()
    wanted_lines, wanted_state = Losses(first).run(STEPS), state(first)

    document["train"]["seed"] = 99  # other initial weights: everything must come from the checkpoint
    second = make_trainer(document, 2, folder)
    second.resume(find_checkpoints(Path(folder) / "checkpoints")[-1])
    return wanted_lines, wanted_state, Losses(second).run(STEPS), state(second)


@pytest.mark.parametrize(
    ("zero", "optim"),
    [(0, {}), (1, {}), (2, {}), (1, {"kind": "sgd", "momentum": 0.9}), (0, {"kind": "sgd"})],
    ids=["adamw-zero0", "adamw-zero1", "adamw-zero2", "momentum-zero1", "sgd-zero0"],
)
def test_resumed_steps_equal_uninterrupted_ones_bit_for_bit(tmp_path, zero, optim):
    texts = write_texts(tmp_path / "texts")
    for wanted_lines, wanted_state, lines, actual_state in run_ranks(
        2, interrupted_and_not, texts, str(tmp_path / "run"), zero, optim
    ):
        assert lines == wanted_lines
        tensors, steps, counters = actual_state
        assert steps == wanted_state[1] and counters == wanted_state[2]
        assert sorted(tensors) == sorted(wanted_state[0])
        for name, value in tensors.items():
            assert torch.equal(value, wanted_state[0][name]), name


def save_one(rank, texts, folder, world_size, expert):
    trainer = make_trainer(tiny_document(texts, folder, parallel__expert=expert), world_size, folder)
    Losses(trainer).run(2)
    trainer.save()
    return {n: p.detach().clone() for n, p in trainer.engine.module.named_parameters()}, expert_ids(
        trainer.engine.module
    )


def test_one_key_per_expert_loads_into_one_process_with_all_experts(tmp_path):
    texts, folder = write_texts(tmp_path / "texts"), tmp_path / "run"
    ranks = run_ranks(2, save_one, texts, str(folder), 2, 2)
    (path,) = find_checkpoints(folder / "checkpoints")
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}

    model = build_model(Recipe.model_validate(tiny_document(texts, folder, parallel__expert=1)))
    load_weights(path, model)
    for name, value in model.named_parameters():
        for weights, ids in ranks:
            own = list(ids.get(name, [])) or slice(None)
            assert torch.equal(value[own], weights[name]), name


def resume_elsewhere(rank, texts, folder, world_size, expert, zero):
    document = tiny_document(texts, folder, parallel__expert=expert, parallel__zero=zero)
    trainer = make_trainer(document, world_size, folder)
    trainer.resume(find_checkpoints(Path(folder) / "checkpoints")[-1])
    return [line["lm_loss"] for line in Losses(trainer).run(2)]


def test_resume_on_another_number_of_ranks_goes_on_with_the_same_losses(tmp_path):
    texts, folder = write_texts(tmp_path / "texts"), tmp_path / "run"
    run_ranks(2, save_one, texts, str(folder), 2, 2)
    losses = [
        run_ranks(ranks, resume_elsewhere, texts, str(folder), ranks, expert, zero)[0]
        for ranks, expert, zero in ((2, 2, 1), (1, 1, 0), (4, 4, 2), (2, 1, 1))
    ]
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], rel=2e-3)  # bfloat16 experts see rows in other groupings


def resume_with(rank, texts, folder, changes):
    document = tiny_document(texts, folder, parallel__expert=1)
    for key, value in changes.items():
        section, entry = key.split("__")
        document[section][entry] = value
    trainer = make_trainer(document, 1, folder)
    try:
        trainer.resume(find_checkpoints(Path(folder) / "checkpoints")[-1])
    except MoeAsyncError as error:
        return str(error)
    return None


def many_changes(rank, texts, folder, cases):
    return [resume_with(rank, texts, folder, case) for case in cases]


def test_another_recipe_or_text_is_refused_and_another_length_is_not(tmp_path):
    texts, folder = write_texts(tmp_path / "texts"), tmp_path / "run"
    run_ranks(2, save_one, texts, str(folder), 2, 2)
    cases = {
        "moe__top_k": (1, "moe.top_k was 2 and is 1"),
        "optim__kind": ("sgd", "optim.kind was 'adamw' and is 'sgd'"),
        "model__layers": (1, "model.layers was 2 and is 1"),
        "data__seed": (3, "data.seed is 3"),
        "data__heldout": (0.3, "the text has changed"),
        "train__steps": (50, None),
        "optim__lr": (0.5, None),
    }
    (messages,) = run_ranks(1, many_changes, texts, str(folder), [{key: case[0]} for key, case in cases.items()])
    for message, (_, part) in zip(messages, cases.values(), strict=True):
        assert message is None if part is None else part in message


def fail_on_one_rank(rank, texts, folder):
    trainer = make_trainer(tiny_document(texts, folder), 2, folder)
    trainer.save()
    Losses(trainer).run(1)
    if rank == 1:
        import moe_async.engine.checkpoint as checkpoint

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        checkpoint.save_file = full
    try:
        save_checkpoint(Path(folder) / "checkpoints", 1, trainer.engine.bridge, "", {}, keep=1)
    except CheckpointError as error:
        return str(error)
    return None


def test_a_rank_that_cannot_write_fails_all_and_harms_nothing(tmp_path):
    texts, folder = write_texts(tmp_path / "texts"), tmp_path / "run"
    for message in run_ranks(2, fail_on_one_rank, texts, str(folder)):
        assert "rank 1: [Errno 28] No space left on device" in message and "untouched" in message
    (path,) = find_checkpoints(folder / "checkpoints")
    assert path.name == "step_00000000" and read_manifest(path).trainer["step"] == 0


def keep_two(rank, texts, folder):
    trainer = make_trainer(tiny_document(texts, folder, parallel__expert=1), 1, folder)
    for _ in range(4):
        Losses(trainer).run(1)
        trainer.save()
        trainer.save()  # the same step again replaces it


def test_keeps_the_newest_and_tells_damaged_ones(tmp_path):
    texts, folder = write_texts(tmp_path / "texts"), tmp_path / "run"
    run_ranks(1, keep_two, texts, str(folder))
    older, path = find_checkpoints(folder / "checkpoints")
    assert (older.name, path.name) == ("step_00000003", "step_00000004")
    assert not list((folder / "checkpoints").glob(".*"))

    dense = path / "dense.safetensors"
    content = dense.read_bytes()
    dense.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"dense\.safetensors is {len(content) - 1} bytes long; its manifest"):
        read_manifest(path)
    dense.unlink()
    with pytest.raises(CheckpointError, match=r"dense\.safetensors is missing"):
        read_manifest(path)
    dense.write_bytes(content)

    manifest = path / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(document | {"format_version": 9}))
    with pytest.raises(CheckpointError, match="format version 9"):
        read_manifest(path)
    manifest.write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(path)
    manifest.unlink()
    assert find_checkpoints(folder / "checkpoints") == [older]
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        read_manifest(path)

    content = (older / "dense.safetensors").read_bytes()
    (older / "dense.safetensors").write_bytes(bytes(len(content)))
    plain = Recipe.model_validate(tiny_document(texts, folder, parallel__expert=1))
    with pytest.raises(CheckpointError, match=r"dense\.safetensors is damaged"):
        load_weights(older, build_model(plain))
    (older / "dense.safetensors").write_bytes(content)
    shallow = Recipe.model_validate(tiny_document(texts, folder, parallel__expert=1, model__layers=1))
    with pytest.raises(CheckpointError, match=r"holds 'layers\.1\..* more parameters that this model has not"):
        load_weights(older, build_model(shallow))
    other = Recipe.model_validate(tiny_document(texts, folder, parallel__expert=1, model__dim=24))
    with pytest.raises(CheckpointError, match=r"has shape \(257, 16\) but the model needs \(257, 24\)"):
        load_weights(older, build_model(other))
