"""A learner that stands still and says nothing: the others go on without it.

Where nobody waits for anybody it comes back as the one it was. Where learners make rounds together it has missed some,
and begins anew at the others' step: made up alone, its rounds would count twice.
"""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
import torch

from moe_async.recipe import Recipe
from moe_async.sync.event_log import read_entries
from tests.helpers.learner_run import Syncer, merged, run_learners, several

SAME = {"policy": "same"}
DENSE = {
    "decoupled": {"policy": "decoupled", "every": 2, "fragments": 2},
    "local_sgd": {"policy": "local_sgd", "every": 2},
    "bsp": {"policy": "bsp"},
}
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


def run_frozen(policy, folder):
    """Events of the syncer, updates (learner, incarnation, sequence, fragment) that learners sent, and results."""
    between = {"dense": DENSE[policy], "expert": SAME, "router": SAME}
    document = several(between, train__steps=70).model_dump(mode="json")
    document["sync"]["timeout"] = SILENCE
    recipe = Recipe.model_validate(document)
    syncer = Syncer(folder / "run", timeout=SILENCE)
    _, results = run_learners(recipe, folder, watch=watch, paces=(0.25, 0.25), syncer=syncer)
    sent = {
        tuple(e["header"]["id"].values())
        for learner in (0, 1)
        for e in read_entries(folder / "run" / f"learner-{learner}" / "events.jsonl")
        if e["event"] == "send"
    }
    first, second = (merged(learner) for learner in results)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=0, msg=name)
    return list(read_entries(folder / "run" / "events.jsonl")), sent, results


def comings(entries):
    return [(e["event"], e["learner"], e["incarnation"]) for e in entries if e["event"] in ("welcome", "farewell")]


def absence(entries):
    """When learner 1 was counted out, and when it took part again."""
    times = [e["time"] for e in entries if e["event"] in ("farewell", "welcome") and e["learner"] == 1]
    return times[1:]


def test_a_frozen_learner(tmp_path):
    entries, sent, _ = run_frozen("decoupled", tmp_path)
    assert comings(entries) == [("welcome", 0, 0), ("welcome", 1, 0), ("farewell", 1, 0), ("welcome", 1, 0)]
    gone, back = absence(entries)
    alone = [e for e in entries if e["event"] == "merge" and gone < e["time"] < back]
    assert len(alone) > 5 and {update["learner"] for e in alone for update in e["updates"]} == {0}
    merges = [tuple(update.values()) for e in entries if e["event"] == "merge" for update in e["updates"]]
    assert len(merges) == len(set(merges)) and set(merges) == sent


@pytest.mark.parametrize("policy", ["local_sgd", "bsp"])
def test_a_frozen_learner_misses_rounds(policy, tmp_path):
    entries, sent, results = run_frozen(policy, tmp_path)
    assert comings(entries) == [("welcome", 0, 0), ("welcome", 1, 0), ("farewell", 1, 0), ("welcome", 1, 1)]
    gone, back = absence(entries)
    rounds = [(e["time"], [update["learner"] for update in e["updates"]]) for e in entries if e["event"] == "merge"]
    assert [0, 1] in [who for time, who in rounds if time < gone]
    while_away = [who for time, who in rounds if gone < time < back]
    assert len(while_away) > 2 and all(who == [0] for who in while_away)
    after = [who for time, who in rounds if time > back]
    # A round that had begun when it came back does without it.
    assert after.count([0, 1]) > 5 and after[after.index([0, 1]) :].count([0, 1]) == len(after) - after.index([0, 1])
    assert [1] not in after
    merges = {tuple(update.values()) for e in entries if e["event"] == "merge" for update in e["updates"]}
    # What it had computed and not sent when it stood still is of a life that is over.
    assert merges <= sent and {update[:2] for update in sent - merges} <= {(1, 0)}
    steps = results[1][0]["seen"]
    frozen_at = steps.index(7)
    assert steps[: frozen_at + 1] == list(range(8)) and steps[frozen_at + 1] > 8, "it goes on at the others' step"
    assert results[0][0]["steps"] == results[1][0]["steps"]
