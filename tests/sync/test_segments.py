"""Parts of a fragment under optimizers of their own, and how much of the mean over all members a merge holds."""

from __future__ import annotations

import pytest
import torch

from moe_async.ops.outer import Outer
from moe_async.sync import presets
from moe_async.sync.arithmetic import SharedValue
from moe_async.sync.combine import portion
from moe_async.sync.fragments import Fragment, Key, Unit
from moe_async.sync.merger import Merger
from moe_async.sync.messages import Merge, UpdateHeader, UpdateId
from moe_async.sync.segments import Segment, segments
from moe_async.sync.settings import Combine, PolicyPlan
from moe_async.sync.syncer_policy import SyncerPolicy
from tests.helpers.learners import group

SGD, ADAMW, NONE = Outer("sgd", 0.5, 0.5), Outer("adamw", 0.1, weight_decay=0.2), Outer()
FRAGMENT = Fragment(0, (Unit("", (Key("a", 2), Key("b", 3), Key("c", 1))), Unit("e", (Key("d", 2, "e", 0),))))


def test_neighbours_with_one_rule_are_one_segment():
    rules = {"a": ADAMW, "b": ADAMW, "c": NONE}
    assert segments(FRAGMENT, SGD, rules) == (Segment(5, ADAMW), Segment(1, NONE), Segment(2, SGD))
    assert segments(FRAGMENT, SGD, {}) == (Segment(8, SGD),)
    # Where the policy's own optimizer is that of a key by chance, the cut stays: that of another phase is not.
    assert [part.elements for part in segments(FRAGMENT, NONE, rules)] == [5, 1, 2]


def test_each_segment_is_moved_by_its_own_optimizer_and_keeps_its_state():
    rules = {"a": SGD, "b": ADAMW, "c": NONE, "d": SGD}
    draw = torch.Generator().manual_seed(1)
    start, *directions = (torch.randn(8, generator=draw, dtype=torch.float64) for _ in range(5))
    shared = SharedValue(start.clone(), FRAGMENT.unit_sizes, [segments(FRAGMENT, SGD, rules)])
    sizes, outers = [2, 3, 1, 2], [SGD, ADAMW, NONE, SGD]
    alone = [
        SharedValue(part.clone(), [len(part)], [[Segment(len(part), outer)]])
        for part, outer in zip(start.split(sizes), outers, strict=True)
    ]
    for direction in directions:
        shared.merge([direction], [[0.5, 1.0]], 0.75)
        for one, part, factor in zip(alone, direction.split(sizes), (0.5, 0.5, 0.5, 1.0), strict=True):
            one.merge([part], [[factor]], 0.75)
        assert torch.equal(shared.value_X, torch.cat([one.value_X for one in alone]))
        # As a snapshot brings it back.
        copy = SharedValue(start.clone(), FRAGMENT.unit_sizes, [segments(FRAGMENT, SGD, rules)])
        copy.load_tensors(shared.tensors())
        assert copy.tensors().keys() == shared.tensors().keys()
        shared = copy
    assert sorted(shared.tensors()) == [
        "outer/0/velocity", "outer/1/count", "outer/1/first", "outer/1/second", "outer/3/velocity", "value"
    ]  # fmt: skip


def header(learner, base=0):
    return UpdateHeader(UpdateId(learner, 0, 0, 0), base, 1, 1, (0,), 0.0)


@pytest.mark.parametrize(
    ("combine", "wanted"),
    [(Combine(), 1.0), (Combine(over="members"), 2 / 4), (Combine(over="members", discount=0.5), (1 / 2 + 1 / 1) / 4)],
)
def test_the_portion_of_a_merge(combine, wanted):
    # Whether a unit saw tokens does not matter.
    assert portion(combine, [header(0, base=1), header(1, base=3)], version=3, members=4) == wanted


def test_merges_say_their_portion():
    for settings, wanted in ((presets.bsp(SGD), [1.0]), (presets.asp(SGD, 1.0), [1 / 2, 1 / 4])):
        policy = SyncerPolicy(PolicyPlan((settings,)), [0], 2)
        for learner in range(2):
            policy.join(learner, 0, 0, 0.0)
        decisions = [*policy.arrive(header(0), 1.0), *policy.arrive(header(1), 2.0)]
        assert [entry.portion for entry in decisions if isinstance(entry, Merge)] == wanted


def test_learners_that_push_one_by_one_decay_no_more_than_together():
    """Gradients of zero: in a round of two a value of 8 decays by a tenth once, or by a twentieth twice."""
    decaying = Outer("sgd", 0.5, weight_decay=0.2)
    for settings, wanted in ((presets.bsp(decaying), 8 * 0.9), (presets.asp(decaying), 8 * 0.95 * 0.95)):
        merger = Merger([group(settings, [slice(0, 2)])], {0: torch.full((2,), 8.0, dtype=torch.float64)}, 2)
        for learner in range(2):
            merger.join(learner, 0, 0.0)
        for learner in range(2):
            merger.arrive(header(learner), torch.zeros(2, dtype=torch.float64), 1.0 + learner)
        assert merger.values[0].value_X.tolist() == pytest.approx([wanted, wanted])
