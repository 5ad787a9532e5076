"""A learner that stands still and says nothing: the others go on without it, and it comes back as the one it was."""

from __future__ import annotations

import os
import signal
import subprocess

import torch

from moe_async.recipe import Recipe
from moe_async.sync.event_log import read_entries
from tests.helpers.learner_run import Syncer, merged, run_learners, several

SAME = {"policy": "same"}
BETWEEN = {"dense": {"policy": "decoupled", "every": 2, "fragments": 2}, "expert": SAME, "router": SAME}
SILENCE, FROZEN = 8.0, 18.0


def freeze(engine, exchange, rank):
    """Learner 1 stops itself before its eighth step, with all its threads; another process wakes it up."""
    if exchange.seat.learner == 1 and engine.global_step == 7 and not exchange.frozen:
        exchange.frozen = True
        subprocess.Popen(["sh", "-c", f"sleep {FROZEN}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def watch(engine, exchange, rank):
    exchange.frozen = getattr(exchange, "frozen", False)
    freeze(engine, exchange, rank)
    return engine.global_step


def test_a_frozen_learner(tmp_path):
    document = several(BETWEEN, train__steps=70).model_dump(mode="json")
    document["sync"]["timeout"] = SILENCE
    recipe = Recipe.model_validate(document)
    syncer = Syncer(tmp_path / "run", timeout=SILENCE)
    _, results = run_learners(recipe, tmp_path, watch=watch, paces=(0.25, 0.25), syncer=syncer)
    entries = list(read_entries(tmp_path / "run" / "events.jsonl"))
    came = [(e["event"], e["learner"], e["incarnation"]) for e in entries if e["event"] in ("welcome", "farewell")]
    assert came == [("welcome", 0, 0), ("welcome", 1, 0), ("farewell", 1, 0), ("welcome", 1, 0)]
    times = [e["time"] for e in entries if e["event"] in ("farewell", "welcome") and e["learner"] == 1]
    gone, back = times[1:]
    alone = [e for e in entries if e["event"] == "merge" and gone < e["time"] < back]
    assert len(alone) > 5 and {update["learner"] for e in alone for update in e["updates"]} == {0}
    merges = [tuple(update.values()) for e in entries if e["event"] == "merge" for update in e["updates"]]
    sent = {
        tuple(e["header"]["id"].values())
        for learner in (0, 1)
        for e in read_entries(tmp_path / "run" / f"learner-{learner}" / "events.jsonl")
        if e["event"] == "send"
    }
    assert len(merges) == len(set(merges)) and set(merges) == sent
    first, second = (merged(learner) for learner in results)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=0, msg=name)
