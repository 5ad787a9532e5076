"""Learners that add up among themselves: the numbers of a merger that has everything. Threads stand for learners."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_async.errors import SyncError
from moe_async.sync import presets
from moe_async.sync.fragments import Key, cut
from moe_async.sync.joint import JointMerger
from moe_async.sync.merger import Merger
from moe_async.sync.messages import Publication
from moe_async.sync.participant import Participant
from moe_async.sync.settings import PolicyPlan, SwitchWhen
from moe_async.sync.syncer import LearnerSync, SyncGroup

LEARNERS, STEPS = 3, 13
DENSE = [Key("a", 4), Key("b", 3)]
EXPERTS = [Key(f"experts.w.{e}", 2, f"experts.{e}", e) for e in range(3)]
"""Expert 2 sees no token at some learners, and expert 1 none anywhere in the first rounds."""


class Model:
    """Drifts by numbers that follow from its learner and the step."""

    def __init__(self, groups, learner):
        self.learner = learner
        self.values = {f.number: torch.zeros(f.elements, dtype=torch.float64) for g in groups for f in g.fragments}

    def drift(self, step):
        generator = torch.Generator().manual_seed(1000 * self.learner + step)
        for number, value in self.values.items():
            self.values[number] = value - torch.rand(value.shape, generator=generator, dtype=torch.float64)

    def tokens(self, step):
        return {"experts.0": 3 + self.learner, "experts.1": step // 7, "experts.2": (self.learner + step) % 2}

    def read(self, fragment):
        return self.values[fragment]

    def write(self, fragment, value):
        self.values[fragment] = value.clone()


def groups_of(dense, expert):
    fragments = cut(DENSE, 1, 0), cut(EXPERTS, 1, 1)
    plans = [plan if isinstance(plan, PolicyPlan) else PolicyPlan((plan,)) for plan in (dense, expert)]
    return [SyncGroup(name, plan, f) for name, plan, f in zip(("dense", "expert"), plans, fragments, strict=True)]


class Table:
    """Adds up over threads, in the order of learners."""

    def __init__(self, learners):
        self.barrier = threading.Barrier(learners, timeout=20)
        self.tensors = {}
        self.headers = {}

    def add_up(self, learner, tensor):
        self.tensors[learner] = tensor.clone()
        self.barrier.wait()
        total = sum(self.tensors[n] for n in sorted(self.tensors))
        self.barrier.wait()
        tensor.copy_(total)

    def gather(self, learner, headers):
        self.headers[learner] = headers
        self.barrier.wait()
        found = [self.headers[n] for n in sorted(self.headers)]
        self.barrier.wait()
        return found


def participant(groups, learner):
    model = Model(groups, learner)
    return model, Participant(LearnerSync(groups, learner), model)


def train(model, own, step):
    model.drift(step)
    own.sync.step_done(5 + model.learner, model.tokens(step), 1.0 / step)


def jointly(groups, learner, table, stop=None):
    """One learner to the end; with ``stop`` its state is saved and put back after that step."""

    def make():
        return JointMerger(
            groups, model.values, {f.number: f.unit_sizes for g in groups for f in g.fragments}, learner, LEARNERS,
            lambda tensor: table.add_up(learner, tensor),
        )  # fmt: skip

    model, own = participant(groups, learner)
    joint = make()
    joint.begin(0.0)

    def meet(updates, adopt=False):
        headers = table.gather(learner, [header for header, _ in updates])
        for publication, value in joint.meet(updates, headers, 0.0):
            own.receive(publication, value)
        own.take(adopt)

    for step in range(1, STEPS + 1):
        train(model, own, step)
        meet(own.contribute())
        assert not own.sync.must_wait() and own.sync.position() == step
        if step == stop:
            state, tensors = joint.state_dict(), {name: t.clone() for name, t in joint.tensors().items()}
            joint = make()
            joint.load(state, tensors)
    meet(own.contribute(last=True), adopt=True)
    return model.values, joint


def over_a_merger(groups):
    models, own = zip(*(participant(groups, learner) for learner in range(LEARNERS)), strict=True)
    merger = Merger(groups, models[0].values, LEARNERS)

    def route(outgoing):
        for entry in outgoing:
            if isinstance(entry.message, Publication):
                own[entry.message.learner].receive(entry.message, entry.value_X)

    for learner in range(LEARNERS):
        route(merger.join(learner, 0, 0.0))
        own[learner].take(adopt=True)

    def meet(last):
        for learner in range(LEARNERS):
            for header, contribution in own[learner].contribute(last):
                route(merger.arrive(header, contribution, 0.0))
        for learner in range(LEARNERS):
            own[learner].take(adopt=last)

    for step in range(1, STEPS + 1):
        for learner in range(LEARNERS):
            train(models[learner], own[learner], step)
        meet(last=False)
    meet(last=True)
    return [model.values for model in models], merger


PLANS = {
    "local_sgd": (presets.local_sgd(3), presets.local_sgd(2, "tokens")),
    "diloco": (presets.diloco(2, weight="tokens"), presets.diloco(4, lr=0.5)),
    "switch": (
        presets.switch(presets.local_sgd(3), presets.diloco(2), SwitchWhen(step=6)),
        presets.switch(presets.diloco(2), presets.local_sgd(4), SwitchWhen(plateau=2, improvement=0.2)),
    ),
}


@pytest.mark.parametrize("stop", [None, 5])
@pytest.mark.parametrize("name", PLANS)
def test_the_numbers_are_those_of_a_merger_with_everything(name, stop):
    groups = groups_of(*PLANS[name])
    table = Table(LEARNERS)
    with ThreadPoolExecutor(LEARNERS) as pool:
        found = list(pool.map(lambda learner: jointly(groups, learner, table, stop), range(LEARNERS)))
    wanted, merger = over_a_merger(groups)
    for learner, (values, joint) in enumerate(found):
        for number, value in values.items():
            torch.testing.assert_close(value, wanted[learner][number], rtol=0, atol=1e-12)
            assert torch.equal(value, found[0][0][number])
        assert joint.state_dict()["syncer"] == merger.state_dict()["syncer"]
        assert joint.merger.staleness.summary(learner) == merger.staleness.summary(learner)
        assert joint.rounds == sum(merger.syncer.version(number) for number in values) > 6
    if name == "switch":
        assert [policy.phase for policy in merger.syncer.policies] == [1, 1]


def test_learners_that_bring_something_else_are_refused():
    groups = groups_of(presets.local_sgd(1), presets.local_sgd(1))
    model, own = participant(groups, 0)
    joint = JointMerger(groups, model.values, {0: [7], 1: [2, 2, 2]}, 0, 2, lambda tensor: None)
    joint.begin(0.0)
    train(model, own, 1)
    updates = own.contribute()
    headers = [header for header, _ in updates]
    with pytest.raises(SyncError, match="bring updates of different fragments and steps"):
        joint.meet(updates, [headers, headers[:1]], 0.0)
