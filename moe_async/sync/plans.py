"""From the recipe's `sync.between` to groups of parameters with their policies.

Classes with equal policies are one group: their parameters are cut into common fragments and travel together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_async.ops.outer import Outer
from moe_async.recipe.between import BetweenSection, ParameterClass
from moe_async.recipe.policies import Policy, SimplePolicy, SwitchPolicy
from moe_async.sync import presets
from moe_async.sync.fragments import Key, cut
from moe_async.sync.settings import PolicyPlan, PolicySettings, SwitchWhen
from moe_async.sync.syncer import SyncGroup


def plan_groups(
    between: BetweenSection,
    keys: Mapping[ParameterClass, Sequence[Key]],
    learners: int,
    steps: int,
    optimizer: Outer | None = None,
    rules: Mapping[str, Outer] | None = None,
) -> list[SyncGroup]:
    """The groups of a run; the same at the syncer and at every learner.

    Args:
        between: the recipe's section.
        keys: what is exchanged, by class.
        learners: expected number of learners.
        steps: of the run, for switches after a share of it.
        optimizer: at the syncer, for policies under which learners send gradients.
        rules: the same of single keys, by name.

    Raises:
        SyncError: more fragments than tensors.
    """
    policies = between.policies()
    shared: list[tuple[Policy, list[ParameterClass]]] = []
    for name, policy in policies.items():
        if keys.get(name):
            same = next((names for known, names in shared if known == policy), None)
            if same is None:
                shared.append((policy, [name]))
            else:
                same.append(name)
    groups, number = [], 0
    for policy, names in shared:
        plan = policy_plan(policy, learners, steps, optimizer)
        members = [key for name in names for key in keys[name]]
        fragments = cut(members, plan.phases[0].fragments, number)
        number += len(fragments)
        groups.append(SyncGroup("+".join(names), plan, fragments, rules or {}))
    return groups


def policy_plan(policy: Policy, learners: int, steps: int, optimizer: Outer | None = None) -> PolicyPlan:
    """The parts of one policy of a recipe; arguments as in `plan_groups`."""
    if not isinstance(policy, SwitchPolicy):
        return PolicyPlan((_settings(policy, learners, optimizer),))
    step = policy.step if policy.fraction is None else policy.fraction * steps
    return presets.switch(
        _settings(policy.first, learners, optimizer),
        _settings(policy.then, learners, optimizer),
        SwitchWhen(step, policy.plateau, policy.improvement),
    )


def _settings(policy: SimplePolicy, learners: int, optimizer: Outer | None) -> PolicySettings:
    """A preset's arguments have the names of the recipe's entries."""
    options = policy.model_dump(exclude={"policy", "outer"})
    if policy.policy in ("bsp", "m_sync", "asp", "ssp"):
        options["optimizer"] = optimizer or Outer("sgd")
    if policy.policy == "delayed_nesterov":
        options["delay"] = options["delay"] or learners
    if policy.policy == "decoupled" and policy.outer is not None:
        options["outer"] = Outer("nesterov", policy.outer.lr, policy.outer.momentum)
    preset = getattr(presets, policy.policy)
    settings: PolicySettings = preset(**options)
    return settings
