"""Dense gradients in flight: saved where a run stops, applied only where it ends."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from moe_async.engine.checkpoint_folder import find_checkpoints, read_manifest
from moe_async.engine.hooks import CheckpointHook, EvaluationHook, Hook
from moe_async.errors import CheckpointError
from tests.dist.test_checkpoint import Losses, make_trainer, state
from tests.helpers.spawn import run_ranks
from tests.helpers.texts import tiny_document, write_texts

DELAY, STEPS, STOP = 2, 7, 4


def document_of(texts, folder, delay=DELAY, steps=STEPS, expert=2, precision="float32"):
    document = tiny_document(
        texts, folder, parallel__zero=0, parallel__expert=expert, train__steps=steps, train__precision=precision
    )
    document["moe"]["balance"][0]["scope"] = "step"
    document["sync"] = {"inside": "blocking" if delay is None else {"delay": delay}}
    return document


def everything(trainer):
    """Of one rank: weights, optimizer, counters, and the gradients in flight."""
    tensors, updates, counters = state(trainer)
    # The trainers of one process share it.
    del tensors["rng"]
    for age, means in enumerate(trainer.engine.bridge.delayed.state()):
        tensors.update({f"inflight/{age}/{name}": mean.clone() for name, mean in means.items()})
    return tensors, updates, counters


def differences(actual, wanted):
    """Names of what differs."""
    (first, updates, counters), (second, other_updates, other_counters) = actual, wanted
    assert updates == other_updates and counters == other_counters
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def saved_in_flight(checkpoint):
    """Tensors of each age in a checkpoint."""
    with safe_open(checkpoint / "dense.safetensors", framework="pt") as file:
        keys = [key for key in file.keys() if key.startswith("inflight/")]  # noqa: SIM118
    return {age: sum(key.startswith(f"inflight/{age}/") for key in keys) for age in {key.split("/")[1] for key in keys}}


class StopAt(Hook):
    """As a signal would."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, record):
        if record.report.step == self.step:
            trainer.stop.reason = "SIGTERM"


class Waits(Hook):
    """How many steps were in flight whenever hooks were called, and at evaluations."""

    def __init__(self):
        self.steps, self.evaluations = {}, {}

    def on_step(self, trainer, record):
        self.steps[record.report.step] = len(trainer.engine.bridge.delayed)

    def on_evaluation(self, trainer, evaluation):
        self.evaluations[trainer.engine.global_step] = len(trainer.engine.bridge.delayed)


def trainer_of(document, folder, *hooks):
    trainer = make_trainer(document, 2, folder)
    trainer.hooks = [*hooks, EvaluationHook(2), CheckpointHook(0)]
    return trainer


def runs(rank, texts, folder):
    """A run in one piece; one that a signal stops and that goes on; and one that ends where the signal came."""
    whole, waits = trainer_of(document_of(texts, f"{folder}/whole"), f"{folder}/whole"), Waits()
    whole.hooks = [waits, EvaluationHook(2), CheckpointHook(3)]
    assert whole.run()
    ends = {"whole": everything(whole)}
    # What the last evaluation saw are the weights that the run ends with.
    last = whole.last_evaluation
    assert whole.evaluated and whole.evaluate() == last
    stopped = trainer_of(document_of(texts, f"{folder}/part"), f"{folder}/part", StopAt(STOP))
    assert not stopped.run() and len(stopped.engine.bridge.delayed) == DELAY
    (checkpoint,) = find_checkpoints(Path(folder, "part", "checkpoints"))

    document = document_of(texts, f"{folder}/part")
    document["train"]["seed"] = 99  # other initial weights: everything must come from the checkpoint
    resumed = trainer_of(document, f"{folder}/part")
    resumed.resume(checkpoint)
    ends["resumed"] = everything(resumed), everything(stopped)
    assert resumed.run()
    ends["end"] = everything(resumed)

    shorter = trainer_of(document_of(texts, f"{folder}/part", steps=STOP), f"{folder}/part")
    shorter.resume(checkpoint)
    assert shorter.saved_step == STOP and shorter.run()
    weights = {name: p.detach().clone() for name, p in shorter.engine.module.named_parameters()}
    again = trainer_of(document_of(texts, f"{folder}/part", steps=STOP + 3), f"{folder}/part", waits_again := Waits())
    again.resume(find_checkpoints(Path(folder, "part", "checkpoints"))[0])
    different = [n for n, p in again.engine.module.named_parameters() if not torch.equal(p, weights[n])]
    assert again.run()
    return ends, (waits.steps, waits.evaluations), different, waits_again.steps


@pytest.mark.slow
def test_a_run_drains_at_its_end_and_saves_what_is_in_flight_before(tmp_path):
    texts = write_texts(tmp_path / "texts")
    for ends, (steps, evaluations), different, again in run_ranks(2, runs, texts, str(tmp_path)):
        assert steps == {1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2, STEPS: 0}
        assert evaluations == {2: 2, 4: 2, 6: 2, STEPS: 0}
        assert any(name.startswith("inflight/1/") for name in ends["resumed"][0][0])
        assert differences(*ends["resumed"]) == []
        assert differences(ends["end"], ends["whole"]) == []
        assert ends["whole"][1] == {"dense": STEPS, "expert": STEPS}
        # A run that is made longer after its end starts with nothing in flight.
        assert different == [] and again == {5: 1, 6: 2, 7: 0}
    whole = find_checkpoints(tmp_path / "whole" / "checkpoints")
    assert [(path.name, sorted(saved_in_flight(path))) for path in whole] == [
        ("step_00000006", ["0", "1"]), ("step_00000007", []),
    ]  # fmt: skip
    (count,) = set(saved_in_flight(whole[0]).values())
    manifest = json.loads((whole[0] / "manifest.json").read_text())
    assert manifest["optimizer_steps"] == {"dense": 4, "expert": 6} and manifest["format_version"] == 3
    with safe_open(whole[0] / "dense.safetensors", framework="pt") as file:
        assert count == sum(key.startswith("param/") for key in file.keys())  # noqa: SIM118


def losses_from(rank, texts, folder, world_size, expert, delay, steps):
    """The steps after the newest checkpoint, or all of them and a checkpoint after the fourth."""
    document = document_of(texts, folder, delay, expert=expert, precision="float64")
    trainer = make_trainer(document, world_size, folder)
    if steps == STEPS:
        Losses(trainer).run(STOP)
        trainer.save()
    else:
        try:
            trainer.resume(find_checkpoints(Path(folder) / "checkpoints")[-1])
        except CheckpointError as error:
            return str(error)
    return [line["lm_loss"] for line in Losses(trainer).run(STEPS - STOP)]


@pytest.mark.slow
def test_gradients_in_flight_go_on_at_another_number_of_ranks_and_never_get_lost(tmp_path):
    texts, folder = write_texts(tmp_path / "texts"), tmp_path / "run"
    wanted = run_ranks(2, losses_from, texts, str(folder), 2, 2, DELAY, STEPS)[0]
    for ranks, expert in ((1, 1), (4, 2)):
        found = run_ranks(ranks, losses_from, texts, str(folder), ranks, expert, DELAY, 0)[0]
        assert found == pytest.approx(wanted, rel=1e-11)
    for delay in (None, 0, 1):
        (message,) = run_ranks(1, losses_from, texts, str(folder), 1, 1, delay, 0)
        assert f"dense gradients of 2 steps that are yet to be applied, but the delay is {delay or 0} here" in message
        assert "--set 'sync.inside={delay: 2}'" in message
    # A longer delay takes them, and applies them a step later.
    (longer,) = run_ranks(1, losses_from, texts, str(folder), 1, 1, 3, 0)
    assert longer[:1] == pytest.approx(wanted[:1], rel=1e-11) and longer[2] != pytest.approx(wanted[2], rel=1e-4)
    assert read_manifest(find_checkpoints(folder / "checkpoints")[-1]).optimizer_steps == {"dense": 2, "expert": 4}
