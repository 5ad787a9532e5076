"""`sync.between`: what it means when written out, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import pytest

from moe_async.errors import RecipeError
from moe_async.recipe import dump_recipe, load_recipe, parse_recipe
from moe_async.recipe.policies import contribution, fragments
from tests.helpers.learner_run import several

SAME: dict[str, Any] = {"policy": "same"}
DECOUPLED = {"policy": "decoupled", "every": 24, "fragments": 8}
QUICKSTART = "recipes/quickstart-sync.yaml"


def load(between: dict[str, Any] | None, *more: str, learners: int = 2):
    text = "null" if between is None else str(between).replace("'", "").replace("None", "null")
    return load_recipe(QUICKSTART, [f"sync.learners={learners}", f"sync.between={text}", *more])


def refused(match: str, between: dict[str, Any] | None, *more: str, learners: int = 2) -> None:
    with pytest.raises(RecipeError, match=match):
        load(between, *more, learners=learners)


def test_same_is_the_policy_of_dense_with_other_values():
    recipe = load({"dense": DECOUPLED, "expert": {**SAME, "every": 96, "weight": "equal"}, "router": SAME})
    between = recipe.sync.between
    assert between.router == between.dense
    assert (between.expert.every, between.expert.weight, between.expert.fragments) == (96, "equal", 8)
    assert (between.dense.every, between.dense.weight, between.dense.over) == (24, "tokens", "members")
    again = parse_recipe(dump_recipe(recipe), "again")
    assert again == recipe and "policy: same" not in dump_recipe(recipe)


def test_a_switch():
    policy = {"policy": "switch", "first": {"policy": "bsp"}, "then": {"policy": "asp"}, "fraction": 0.1}
    between = load({"dense": policy, "expert": SAME, "router": SAME}, "parallel.zero=0").sync.between
    assert contribution(between.dense) == "grad" and fragments(between.dense) == 1


@pytest.mark.parametrize(
    ("match", "between"),
    [
        (r"sync.between.dense.policy is 'decopled'; it must be one of bsp, .*Did you mean decoupled\?",
         {"dense": {"policy": "decopled"}}),
        (r"sync.between.dense.evry is not a known key. Did you mean every\?",
         {"dense": {"policy": "diloco", "every": 3, "evry": 3}}),
        (r"sync.between.dense.every is missing; it is required", {"dense": {"policy": "diloco"}}),
        (r"sync.between.dense.policy is same, but it is what the others may be the same as", {"dense": SAME}),
        (r"sync.between.expert.quorum is 2, but the policy of dense, diloco, has no such key",
         {"dense": {"policy": "diloco", "every": 3}, "expert": {**SAME, "quorum": 2}, "router": SAME}),
        (r"sync.between.expert is missing, so nobody would say how the experts of several learners meet",
         {"dense": DECOUPLED, "router": SAME}),
        (r"sync.between.router is missing", {"dense": DECOUPLED, "expert": SAME}),
        (r"dense bsp, expert diloco; learners of a run send either gradients or deltas",
         {"dense": {"policy": "bsp"}, "expert": {"policy": "diloco", "every": 3}}),
        (r"sync.between.dense.quorum is 3 but sync.learners is 2", {"dense": {**DECOUPLED, "quorum": 3}}),
        (r"sync.between.dense.count is 3 but sync.learners is 2", {"dense": {"policy": "m_sync", "count": 3}}),
        (r"overlap is 4 but every is 4; a result has to be taken before its fragment is sent again",
         {"dense": {"policy": "streaming_diloco", "every": 4, "fragments": 2, "overlap": 4}}),
        (r"ahead is 0 with 8 fragments and a quorum of 2", {"dense": {**DECOUPLED, "quorum": 2, "ahead": 0}}),
        (r"ahead: 0 and a quorum above 1 for dense, router, expert, whose policies differ",
         {"dense": {**DECOUPLED, "fragments": 1, "quorum": 2, "ahead": 0}, "expert": {**SAME, "every": 4},
          "router": SAME}),
        (r"parallel.zero is 1 but sync.between.dense.policy is bsp", {"dense": {"policy": "bsp"}}),
        (r"a switch has step None, fraction None and plateau None",
         {"dense": {"policy": "switch", "first": {"policy": "bsp"}, "then": {"policy": "asp"}}}),
        (r"a switch goes from bsp to diloco; learners send gradients under one and deltas under the other",
         {"dense": {"policy": "switch", "first": {"policy": "bsp"}, "then": {"policy": "diloco", "every": 3},
                    "step": 3}}),
    ],
)  # fmt: skip
def test_what_is_refused(match, between):
    refused(match, between)


def test_what_learners_that_send_gradients_cannot_do():
    whole = {"dense": {"policy": "bsp"}, "expert": SAME, "router": SAME}
    refused(
        r"sync.inside is {delay: 1} but sync.between.dense.policy is bsp, .* Use inside: blocking, or a policy that",
        whole, "parallel.zero=0", "sync.inside={delay: 1}",
    )  # fmt: skip
    refused(
        r"optim.kind is muon but sync.between.dense.policy is bsp, .* Use kind: adamw or sgd, or a policy",
        whole, "parallel.zero=0", "optim.kind=muon",
    )  # fmt: skip
    for kind in ("adamw", "sgd"):
        assert load(whole, "parallel.zero=0", f"optim.kind={kind}").sync.between.sends_gradients
    deltas = {"dense": DECOUPLED, "expert": SAME, "router": SAME}
    for change in ("sync.inside={delay: 1}", "optim.kind=muon"):
        assert not load(deltas, "parallel.zero=0", change).sync.between.sends_gradients


DILOCO = {"policy": "diloco", "every": 3}
LOCAL_SGD = {"policy": "local_sgd", "every": 2}


def test_all_reduce_is_for_policies_that_wait_for_all():
    for policy in (DILOCO, LOCAL_SGD, {"policy": "switch", "first": LOCAL_SGD, "then": DILOCO, "step": 4}):
        recipe = load({"dense": policy, "expert": LOCAL_SGD, "router": SAME}, "sync.via=all_reduce")
        assert recipe.sync.via == "all_reduce"
    assert load({"dense": DECOUPLED, "expert": SAME, "router": SAME}).sync.via == "syncer"
    # It says nothing about a learner on its own.
    assert load(None, "sync.via=all_reduce", learners=1).sync.between is None
    wrong = "sync.via is all_reduce but sync.between.{} has the policy {}; .*local_sgd and diloco"
    switch = {"policy": "switch", "first": LOCAL_SGD, "then": {"policy": "streaming_diloco", "every": 4,
              "fragments": 1}, "step": 4}  # fmt: skip
    for name, policy in (("decoupled", DECOUPLED), ("bsp", {"policy": "bsp"}), ("streaming_diloco", switch)):
        given = {"dense": policy, "expert": SAME, "router": SAME}
        refused(wrong.format("dense", name), given, "sync.via=all_reduce", "parallel.zero=0")
    mixed = {"dense": DILOCO, "expert": {"policy": "delayed_nesterov", "every": 3}, "router": SAME}
    refused(wrong.format("expert", "delayed_nesterov"), mixed, "sync.via=all_reduce")
    refused("sync.via is 'all-reduce'; it must be one of 'syncer' or 'all_reduce'", mixed, "sync.via=all-reduce")


def test_learners_and_policies_belong_together():
    whole = {"dense": DECOUPLED, "expert": SAME, "router": SAME}
    refused("sync.between is set but sync.learners is 1; its policies need several learners", whole, learners=1)
    refused("sync.learners is 2 but sync.between is null, so they would share nothing", None)


def test_momentum_on_updates_that_come_one_by_one_is_warned_of():
    whole = {"dense": {**DECOUPLED, "outer": {"lr": 0.7}}, "expert": SAME, "router": SAME}
    (warning,) = [text for text in load(whole).warnings() if "momentum" in text]
    assert "known to ruin training. Use policy: delayed_nesterov" in warning
    assert not load({"dense": DECOUPLED, "expert": SAME, "router": SAME}).warnings()


def test_a_dense_model_needs_no_policy_of_experts():
    recipe = several({"dense": DECOUPLED}, moe=None)
    assert recipe.sync.between.policies().keys() == {"dense"}
