"""The journal: a merger that is brought back from it is the one that was, to the bit."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
import torch

from moe_async.errors import SyncError
from moe_async.ops.outer import Outer
from moe_async.sync import journal as journal_module
from moe_async.sync import presets
from moe_async.sync.journal import Journal, apply_input
from moe_async.sync.merger import Merger
from moe_async.sync.messages import UpdateHeader, UpdateId
from tests.helpers.learners import group, slices

PIECES = slices(2, 6)
PLAN = presets.decoupled(2, 2, quorum=2, grace=0.5, discount=0.25, outer=Outer("nesterov", 0.4, 0.6))


def new_merger():
    initial = {n: torch.arange(p.stop - p.start, dtype=torch.float64) for n, p in enumerate(PIECES)}
    return Merger([group(PLAN, PIECES)], initial, 3)


def inputs(count=60, seed=3):
    """What a syncer might be told: three learners that join, send, leave and come back, and time that passes."""
    draw, sequence, lives, here, now = random.Random(seed), {}, {}, set(), 0.0
    for _ in range(count):
        now += draw.random()
        learner = draw.randrange(3)
        if learner not in here:
            lives[learner] = lives.get(learner, -1) + 1
            here.add(learner)
            yield {"kind": "join", "now": now, "learner": learner, "incarnation": lives[learner], "clock": None}, None
        elif draw.random() < 0.1:
            here.discard(learner)
            yield {"kind": "leave", "now": now, "learner": learner}, None
        elif draw.random() < 0.2:
            yield {"kind": "tick", "now": now}, None
        else:
            fragment = draw.randrange(2)
            key = (learner, lives[learner], fragment)
            sequence[key] = sequence.get(key, -1) + 1
            size = PIECES[fragment].stop - PIECES[fragment].start
            payload = torch.randn(size, generator=torch.Generator().manual_seed(len(sequence)), dtype=torch.float64)
            identity = UpdateId(learner, lives[learner], sequence[key], fragment)
            header = UpdateHeader(identity, 0, 2 + 2 * sequence[key], 2, (draw.randint(1, 9),))
            yield {"kind": "arrive", "now": now, "header": asdict(header)}, payload


def same(one, other):
    assert one.state_dict() == other.state_dict()
    mine, theirs = one.tensors(), other.tensors()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("snapshots", [(), (20,), (20, 41)])
@pytest.mark.parametrize("kills", [(7,), (30, 33), (59,)])
def test_a_merger_comes_back_as_it_was(tmp_path, snapshots, kills):
    undisturbed, merger, journal = new_merger(), new_merger(), Journal(tmp_path)
    for number, (entry, payload) in enumerate(inputs()):
        apply_input(undisturbed, entry, payload)
        journal.add(entry, payload)
        apply_input(merger, entry, payload)
        if number in snapshots:
            state = {"merger": merger.state_dict(), "now": entry["now"]}
            journal.snapshot(state, merger.tensors())
        if number in kills:
            # Not closed: a killed process closes nothing.
            merger, journal = new_merger(), Journal(tmp_path)
            assert journal.recover(merger) == entry["now"]
        same(merger, undisturbed)
    assert sum(merger.syncer.version(fragment) for fragment in (0, 1)) > 5
    assert len(list(tmp_path.glob("journal-*"))) == 1 and len(list(tmp_path.glob("snapshot-*"))) == bool(snapshots)


def test_who_left_in_order_to_come_back_is_known_afterwards(tmp_path):
    journal = Journal(tmp_path)
    journal.pause([0, 1], 1.0)
    journal.add({"kind": "join", "now": 1.0, "learner": 0, "incarnation": 0, "clock": None})
    journal.pause([1, 2], 1.0)
    assert journal.paused == {1, 2}
    journal.close()
    again = Journal(tmp_path)
    assert again.recover(new_merger()) == 1.0 and again.paused == {1, 2}


def test_a_journal_is_long_by_number_and_by_room(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_LEAST_ROOM", 1000)
    journal = Journal(tmp_path)
    entry = {"kind": "arrive", "now": 1.0}
    for _ in range(2):
        assert not journal.is_long(2)
        journal.add(entry, torch.zeros(10))
    assert journal.is_long(2) and not journal.is_long(3)
    journal.add(entry, torch.zeros(300))
    assert journal.is_long(200)
    journal.snapshot({}, {"value": torch.zeros(100)})
    journal.add(entry, torch.zeros(700))
    assert not journal.is_long(200)
    journal.add(entry, torch.zeros(200))
    assert journal.is_long(200)


def test_a_new_folder_has_nothing_to_recover(tmp_path):
    assert Journal(tmp_path / "new").recover(new_merger()) is None


def test_what_a_crash_cut_short_was_never_acted_on(tmp_path):
    journal, merger = Journal(tmp_path), new_merger()
    whole = list(inputs(10))
    for entry, payload in whole:
        journal.add(entry, payload)
        apply_input(merger, entry, payload)
    journal.close()
    path = tmp_path / "journal-0" / "inputs.jsonl"
    path.write_text(path.read_text() + '{"kind": "tick", "no')
    again, recovered = new_merger(), Journal(tmp_path)
    assert recovered.recover(again) == whole[-1][0]["now"]
    same(again, merger)
    # It goes on behind the last whole entry.
    recovered.add({"kind": "tick", "now": 99.0})
    recovered.close()
    assert Journal(tmp_path).recover(new_merger()) == 99.0


def test_damage_is_an_error(tmp_path):
    journal = Journal(tmp_path)
    for entry, payload in inputs(12):
        journal.add(entry, payload)
    journal.close()
    payloads = sorted((tmp_path / "journal-0").glob("*.safetensors"))
    payloads[0].write_bytes(b"no tensors")
    with pytest.raises(SyncError, match=r"safetensors is damaged .*restore the folder from a copy"):
        Journal(tmp_path).recover(new_merger())
    path = tmp_path / "journal-0" / "inputs.jsonl"
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(SyncError, match=r"line 1 of .*inputs.jsonl is damaged"):
        Journal(tmp_path).recover(new_merger())


@pytest.mark.parametrize("text", [None, "{}", '{"version": 0}', "cut short"])
def test_a_folder_of_another_format_is_refused(tmp_path, text):
    Journal(tmp_path).close()
    Journal(tmp_path).close()
    path = tmp_path / "format.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(SyncError, match=r"format version (unknown|0); this release reads version 1.*--folder"):
        Journal(tmp_path)


def test_an_entry_that_is_not_known(tmp_path):
    with pytest.raises(SyncError, match="an entry of kind 'dance', which this version does not know"):
        apply_input(new_merger(), {"kind": "dance", "now": 0.0}, None)
