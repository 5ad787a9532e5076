"""What a syncer does with sessions that come, go and come back, on links without a model behind them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from moe_async.comm import World
from moe_async.engine.door import make_hello
from moe_async.engine.seat import rank_hello, take_seat
from moe_async.engine.syncer_link import SyncerLink
from moe_async.errors import PlaceTakenError, SyncError
from moe_async.recipe import Recipe
from moe_async.recipe.loader import dump_recipe
from moe_async.sync.event_log import read_entries
from moe_async.sync.messages import UpdateHeader, UpdateId
from moe_async.sync.shares import lengths, share
from moe_async.topology import Topology
from tests.helpers.learner_run import LIMIT, Syncer, one_rank, several
from tests.helpers.spawn import run_ranks

SAME = {"policy": "same"}
BETWEEN = {"dense": {"policy": "decoupled", "every": 2, "fragments": 2}, "expert": SAME, "router": SAME}
RECIPE = several(BETWEEN, train__steps=30)


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def hello(learner, ranks=1, recipe=RECIPE, **more):
    return {**make_hello(recipe, World(), learner), "world_size": ranks, **more}


def sit_down(syncer, place, ranks=1, ready=True, timeout=20.0, of=RECIPE, **more):
    """The links of a learner's ranks, with a seat."""
    links = [SyncerLink(*syncer.address, timeout) for _ in range(ranks)]
    seat = take_seat(links[0], {**hello(place, ranks, of), **more}, World(), 5.0)
    for rank in range(1, ranks):
        links[rank].connect(rank_hello(seat, SimpleNamespace(rank=rank)), 5.0)
    if ready:
        links[0].send({"kind": "ready"})
    for link in links:
        link.post_again()
    return links


def send_update(syncer, link, learner):
    """An update of fragment 0 after two steps; returns once it is merged."""
    fragment = syncer.server.run.groups[0].fragments[0]
    header = UpdateHeader(UpdateId(learner, 0, 0, fragment.number), 0, 2, 2, (5,) * len(fragment.units), 1.0)
    zeros = torch.zeros(fragment.elements, dtype=torch.float64)
    link.send({"kind": "update", "header": asdict(header)}, zeros)
    assert eventually(lambda: syncer.server.merger.syncer.version(fragment.number) == 1)


def restarted(syncer, folder, *links):
    """Another syncer on the folder of one that is gone."""
    syncer.close()
    for link in links:
        link.disconnect()
    return Syncer(folder)


def test_ranks_that_come_back_get_the_same_messages(tmp_path):
    """After a restart of the syncer a merge falls between the coming back of two ranks of one learner."""
    syncer = Syncer(tmp_path)
    links = [*sit_down(syncer, 0, ranks=2), *sit_down(syncer, 1)]
    assert eventually(lambda: all(link.received == 3 for link in links))
    syncer = restarted(syncer, tmp_path, *links)
    (other,) = sit_down(syncer, 1, incarnation=0, clock=2)
    first = SyncerLink(*syncer.address, 20.0)
    seat = take_seat(first, hello(0, 2, incarnation=0, clock=1), World(), 5.0)
    send_update(syncer, other, 1)
    second = SyncerLink(*syncer.address, 20.0)
    second.connect(rank_hello(seat, SimpleNamespace(rank=1)), 5.0)
    first.send({"kind": "ready"})
    assert eventually(lambda: second.received == 3) and eventually(lambda: first.received >= 3)
    heard = [[header for header, _ in link.next(link.received)] for link in (first, second)]
    assert heard[0] == heard[1] and heard[0][0]["kind"] == "welcome"
    for link in (first, second, other):
        link.leave()
    syncer.close()


def post_part(syncer, link, rank, sequence, ranks=2):
    """A rank's part of an update of fragment 0 of learner 0, kept until it is acknowledged."""
    fragment = syncer.server.run.groups[0].fragments[0]
    update = UpdateId(0, 0, sequence, fragment.number)
    clock = 2 * (sequence + 1)
    header = UpdateHeader(update, 0, 2, clock, (5,) * len(fragment.units), 1.0)
    elements = sum(lengths(share(fragment, Topology(ranks, ranks, 4), rank)))
    message = {"kind": "update", "header": asdict(header)}
    link.post(fragment.number, sequence, message, torch.zeros(elements, dtype=torch.float64))


def test_a_rank_may_send_before_the_others_are_back(tmp_path):
    """Its parts wait; and a part whose acknowledgment was lost with a session is acknowledged to its rank alone."""
    syncer = Syncer(tmp_path)
    links = [*sit_down(syncer, 0, ranks=2), *sit_down(syncer, 1)]
    assert eventually(lambda: all(link.received == 3 for link in links))
    for rank in (0, 1):
        post_part(syncer, links[rank], rank, 0)
    assert eventually(lambda: not links[0].outbox() and not links[1].outbox())
    for link in links[:2]:
        link.disconnect()
    first, second = links[:2]
    post_part(syncer, first, 0, 1)
    post_part(syncer, second, 1, 0)
    post_part(syncer, second, 1, 1)
    seat = take_seat(first, hello(0, 2, incarnation=0, clock=4), World(), 5.0)
    first.send({"kind": "ready"})
    # Nothing newer goes out before what is older.
    post_part(syncer, first, 0, 2)
    first.post_again()
    time.sleep(0.5)
    assert first.outbox(), "acknowledged before the other rank is there"
    second.connect(rank_hello(seat, SimpleNamespace(rank=1)), 5.0)
    second.post_again()
    post_part(syncer, second, 1, 2)
    assert eventually(lambda: not first.outbox() and not second.outbox())
    merges = [entry for entry in read_entries(tmp_path / "events.jsonl") if entry["event"] == "merge"]
    assert [update["sequence"] for entry in merges for update in entry["updates"]] == [0, 1, 2]
    for link in links:
        link.leave()
    syncer.close()


def test_a_rank_whose_first_one_is_gone_again_is_told_to_come_later(tmp_path):
    """It is not put out: its learner loses its sessions, and rank 0 knocks anew."""
    syncer = Syncer(tmp_path)
    first, second = (SyncerLink(*syncer.address, 20.0) for _ in range(2))
    seat = take_seat(first, hello(0, 2), World(), 5.0)
    first.disconnect()
    assert eventually(lambda: not syncer.server._lobby.seats)
    second.connect(rank_hello(seat, SimpleNamespace(rank=1)), 5.0)
    with pytest.raises(PlaceTakenError, match="learner 0 has no free place for rank 1"):
        second.reply()
    assert not second.refusal and eventually(lambda: second.lost)
    second.disconnect()
    syncer.close()


@pytest.mark.parametrize(("next_number", "life", "clock"), [(1, 0, 2), (0, 1, 0)])
def test_one_with_an_older_checkpoint_begins_with_the_newest_values(tmp_path, next_number, life, clock):
    """One that was saved after update 0 goes on; one that was saved before begins anew, where the other one is."""
    syncer = Syncer(tmp_path)
    links = [*sit_down(syncer, 0), *sit_down(syncer, 1)]
    assert eventually(lambda: all(link.received == 3 for link in links))
    send_update(syncer, links[0], 0)
    syncer = restarted(syncer, tmp_path, *links)
    link = SyncerLink(*syncer.address, 20.0)
    saved = {"incarnation": 0, "clock": 2, "sequences": {"0": next_number, "1": 0}}
    seat = take_seat(link, hello(0, **saved), World(), 5.0)
    link.send({"kind": "ready"})
    assert seat.incarnation == life
    assert eventually(lambda: link.received >= 3)
    welcome = link.next(1)[0][0]
    assert (welcome["kind"], welcome["clock"]) == ("welcome", clock)
    link.leave()
    syncer.close()


def test_a_syncer_that_was_told_to_stop_waits_for_its_learners(tmp_path):
    """They were told too, and take longer to start again than a session may be silent."""
    recipe = several(BETWEEN, train__steps=30)
    document = recipe.model_dump(mode="json")
    document["sync"]["timeout"] = 4.0
    recipe = Recipe.model_validate(document)
    syncer = Syncer(tmp_path)
    links = [*sit_down(syncer, 0, of=recipe, timeout=6.0), *sit_down(syncer, 1, of=recipe, timeout=6.0)]
    assert eventually(lambda: all(link.received == 3 for link in links))
    syncer = restarted(syncer, tmp_path, *links)
    (link,) = sit_down(syncer, 0, of=recipe, timeout=6.0, incarnation=0, clock=0)
    assert eventually(lambda: link.received >= 3)
    time.sleep(6.0)
    assert syncer.server.merger.syncer.members == {0, 1}
    link.leave()
    syncer.close()


def test_a_lost_connection_is_no_death(tmp_path):
    """A learner that is back at once is never counted out: those who wait for all would go on without it."""
    syncer = Syncer(tmp_path)
    links = [*sit_down(syncer, 0), *sit_down(syncer, 1)]
    assert eventually(lambda: all(link.received == 3 for link in links))
    links[0].disconnect()
    assert eventually(lambda: any("learner 0 is gone" in line for line in syncer.said))
    (again,) = sit_down(syncer, 0, incarnation=0, clock=0)
    assert eventually(lambda: again.received >= 3)
    links[1].disconnect()
    assert eventually(lambda: syncer.server.merger.syncer.members == {0}, 15)
    events = [(e["event"], e["learner"]) for e in read_entries(tmp_path / "events.jsonl") if "learner" in e]
    assert [event for event in events if event[0] in ("welcome", "farewell")] == [
        ("welcome", 0), ("welcome", 1), ("welcome", 0), ("farewell", 1),
    ]  # fmt: skip
    again.leave()
    syncer.close()


def test_who_the_syncer_has_never_seen_cannot_come_back(tmp_path):
    syncer = Syncer(tmp_path)
    for sequences in ({}, {"sequences": {"0": 1, "7": 1}}):
        with pytest.raises(SyncError, match="this run has had no learner 0 yet.* Start the syncer with the --folder"):
            sit_down(syncer, 0, incarnation=0, clock=2, **sequences)
    syncer.close()


def test_a_report_comes_through_though_another_rank_left_before(tmp_path):
    syncer = Syncer(tmp_path)
    first, second = sit_down(syncer, 0, ranks=2, ready=False)
    second.leave()
    time.sleep(0.3)
    first.send({"kind": "report", "summary": {"learner": {"rounds": 3}}})
    first.leave()
    assert eventually(lambda: syncer.server.reports == {0: {"learner": {"rounds": 3}}})
    assert eventually(lambda: not syncer.server._lobby.seats)
    syncer.close()


def test_a_damaged_folder_is_refused_to_everyone(tmp_path):
    """Nothing of a recovery that failed stays: the next learner would go on with half of the state."""
    syncer = Syncer(tmp_path)
    links = [*sit_down(syncer, 0), *sit_down(syncer, 1)]
    assert eventually(lambda: all(link.received == 3 for link in links))
    send_update(syncer, links[1], 1)
    (payload,) = (tmp_path / "syncer" / "journal-0").glob("*.safetensors")
    syncer = restarted(syncer, tmp_path, *links)
    payload.write_bytes(b"damaged")
    for learner in (0, 0, 1):
        with pytest.raises(SyncError, match=r"safetensors is damaged .*restore the folder from a copy"):
            sit_down(syncer, learner)
    syncer.close()


def test_the_first_to_come_back_may_not_bring_another_recipe(tmp_path):
    syncer = Syncer(tmp_path)
    links = sit_down(syncer, 0, ready=False)
    syncer = restarted(syncer, tmp_path, *links)
    with pytest.raises(SyncError, match=r"train\.steps is 30 in the run but 31 in this learner's recipe"):
        take_seat(SyncerLink(*syncer.address, 20.0), hello(0, recipe=several(BETWEEN, train__steps=31)), World(), 5.0)
    assert syncer.server.run is None
    (link,) = sit_down(syncer, 0, ready=False)
    assert syncer.server.run is not None
    link.leave()
    syncer.close()


def test_a_hello_that_makes_no_sense_ends_nothing(tmp_path):
    syncer = Syncer(tmp_path)
    (link,) = sit_down(syncer, 0, ready=False)
    for wrong in ({"libraries": "none"}, {"code": []}, {"world_size": 3, "expert_parallel": 2}, {"learner": None}):
        with pytest.raises(SyncError, match="a message of kind hello does not fit"):
            sit_down(syncer, 1, **wrong)
    (other,) = sit_down(syncer, 1)
    for entry in (link, other):
        entry.leave()
    syncer.close()


def test_silence_is_measured_by_the_recipe(tmp_path):
    """The first learner knocked before its recipe was known; a quarter of its time limit is more than the syncer's."""
    syncer = Syncer(tmp_path, timeout=8.0)
    recipe = dump_recipe(several(BETWEEN, train__steps=30, sync__timeout=60.0))
    links = [sit_down(syncer, place, ready=False, timeout=60.0, recipe=recipe)[0] for place in (0, 1)]
    time.sleep(10.0)
    assert not any(link.lost for link in links)
    for link in links:
        link.leave()
    syncer.close()


def test_a_learner_comes_back_before_its_loss_was_noticed(tmp_path):
    syncer = Syncer(tmp_path)
    (lost,) = sit_down(syncer, 0)
    with pytest.raises(SyncError, match="place 0 is taken"):
        sit_down(syncer, 0)
    (link,) = sit_down(syncer, 0, incarnation=0, clock=2)
    assert eventually(lambda: lost.lost) and not link.lost
    time.sleep(0.5)
    assert set(syncer.server._lobby.seats) == {0} and not link.lost
    for entry in (lost, link):
        entry.leave()
    syncer.close()


def test_a_link_lost_before_the_run_began_comes_back(tmp_path):
    """The learner waits for another one; the syncer gives it another incarnation, and all its ranks have to know."""
    recipe = several({"dense": {"policy": "local_sgd", "every": 3}, "expert": SAME, "router": SAME}, train__steps=3)
    syncer = Syncer(tmp_path / "run")
    arguments = (one_rank, dump_recipe(recipe), syncer.address)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run_ranks, 2, *arguments, 0, str(tmp_path), None, 0.0, timeout=LIMIT)
        seats = syncer.server._lobby.seats
        assert eventually(lambda: 0 in seats and seats[0].complete, 60.0)
        seats[0].connections[1].close(wait=False)
        assert eventually(lambda: 0 in seats and seats[0].complete and seats[0].incarnation == 1, 20.0)
        second = pool.submit(run_ranks, 2, *arguments, 1, str(tmp_path), None, 0.0, timeout=LIMIT)
        assert [result["steps"] for future in (first, second) for result in future.result()] == [3] * 4
    syncer.thread.join(20)
    assert not syncer.thread.is_alive()
