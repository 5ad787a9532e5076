"""The entry `sync.between`: a policy for each class of parameters, and the rules that policies have to fit."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from moe_async.recipe.messages import alternatives, refuse_all
from moe_async.recipe.policies import (
    SIMPLE_NAMES,
    AnyPolicy,
    DecoupledPolicy,
    DilocoPolicy,
    LocalSgdPolicy,
    Policy,
    SamePolicy,
    SimplePolicy,
    StreamingDilocoPolicy,
    SwitchPolicy,
    contribution,
    gradient_policies,
)
from moe_async.recipe.section import Section

ParameterClass = Literal["dense", "router", "expert"]


class BetweenSection(Section):
    """A policy for each class of parameters."""

    dense: AnyPolicy = Field(description="Policy of attention, embeddings, norms and dense networks. Required.")
    expert: AnyPolicy | None = Field(
        default=None, description="Policy of routed experts; must be given where there are some. Default: null."
    )
    router: AnyPolicy | None = Field(
        default=None,
        description="Policy of routers and their biases; must be given where there are some. Default: null.",
    )

    @model_validator(mode="after")
    def _same_as_something(self) -> Self:
        problems = []
        if isinstance(self.dense, SamePolicy):
            problems.append(
                "sync.between.dense.policy is same, but it is what the others may be the same as. Use"
                f" {alternatives([*SIMPLE_NAMES, 'switch'])}."
            )
        else:
            for name in ("expert", "router"):
                own = getattr(self, name)
                if isinstance(own, SamePolicy):
                    problems += _unknown_to(self.dense, own, name)
        refuse_all(problems, self)
        # What is written down of a run says what each class had, not where it was copied from.
        for name in ("expert", "router"):
            own = getattr(self, name)
            if isinstance(own, SamePolicy):
                given = own.model_dump(exclude={"policy"}, exclude_none=True)
                object.__setattr__(self, name, type(self.dense).model_validate(self.dense.model_dump() | given))
        policies = self.policies()
        if len({contribution(policy) for policy in policies.values()}) > 1:
            named = ", ".join(f"{name} {policy.policy}" for name, policy in policies.items())
            refuse_all(
                [
                    f"sync.between has {named}; learners of a run send either gradients or deltas. Use for all classes"
                    f" policies of one kind: {alternatives(gradient_policies())} send gradients, the others deltas."
                ],
                self,
            )
        return self

    def policies(self) -> dict[ParameterClass, Policy]:
        """The policy of each class that has one."""
        found = {"dense": self.dense, "router": self.router, "expert": self.expert}
        return {name: policy for name, policy in found.items() if policy is not None}  # type: ignore[misc]

    @property
    def sends_gradients(self) -> bool:
        """Tells whether learners send gradients, so that the optimizer is the syncer's; otherwise they send deltas."""
        return contribution(self.policies()["dense"]) == "grad"


def _unknown_to(dense: Policy, same: SamePolicy, name: str) -> list[str]:
    """Values given beside ``same`` that the policy of dense has no key for."""
    known = type(dense).model_fields
    given = same.model_dump(exclude={"policy"}, exclude_none=True)
    return [
        f"sync.between.{name}.{key} is {value}, but the policy of dense, {dense.policy}, has no such key. Its keys are"
        f" {', '.join(known)}."
        for key, value in given.items()
        if key not in known
    ]


def between_problems(
    between: BetweenSection, learners: int, has_experts: bool, zero: int, delay: int | None
) -> list[str]:
    """What keeps learners from training together like that, with repairs.

    Args:
        between: the section.
        learners: expected number of learners.
        has_experts: whether the model has routers and experts.
        zero: the ZeRO stage.
        delay: steps by which dense gradients are late inside a learner; None: they are not delayed.
    """
    problems = []
    if learners < 2:
        problems.append(
            f"sync.between is set but sync.learners is {learners}; its policies need several learners. Use learners: 2"
            " or more, or leave sync.between out."
        )
    policies = between.policies()
    for name in ("expert", "router") if has_experts else ():
        if name not in policies:
            problems.append(
                f"sync.between.{name} is missing, so nobody would say how the {name}s of several learners meet. Add"
                f" {name}: {{policy: same}}."
            )
    for name, policy in policies.items():
        for part in (policy.first, policy.then) if isinstance(policy, SwitchPolicy) else (policy,):
            problems += _size_problems(f"sync.between.{name}", part, learners)
    waiting = {name: p for name, p in policies.items() if isinstance(p, DecoupledPolicy) and _waits_for_some(p)}
    if any(policy != other for policy in waiting.values() for other in waiting.values()):
        problems.append(
            f"sync.between has ahead: 0 and a quorum above 1 for {', '.join(waiting)}, whose policies differ, so they"
            " are merged apart; learners could wait for one another on different ones for ever. Use ahead: 1 or more,"
            " or the same policy for them."
        )
    if not between.sends_gradients:
        return problems
    if delay is not None:
        problems.append(
            f"sync.inside is {{delay: {delay}}} but sync.between.dense.policy is {policies['dense'].policy}, where"
            " learners send the gradients of each step and apply none, so there is nothing to delay. Use inside:"
            " blocking, or a policy that sends deltas."
        )
    if zero:
        problems.append(
            f"parallel.zero is {zero} but sync.between.dense.policy is {policies['dense'].policy}, where learners send"
            " gradients and the optimizer is the syncer's; ZeRO 1 and 2 cut gradients into pieces. Use zero: 0."
        )
    return problems


def via_problems(between: BetweenSection) -> list[str]:
    """Policies that learners cannot follow by an all-reduce among themselves, with repairs."""
    problems = []
    for name, policy in between.policies().items():
        for part in (policy.first, policy.then) if isinstance(policy, SwitchPolicy) else (policy,):
            if not isinstance(part, LocalSgdPolicy | DilocoPolicy):
                problems.append(
                    f"sync.via is all_reduce but sync.between.{name} has the policy {part.policy}; an all-reduce needs"
                    " the updates of all learners after the same steps, as local_sgd and diloco do. Use one of these"
                    " for every class, or via: syncer."
                )
    return problems


def _size_problems(place: str, policy: SimplePolicy, learners: int) -> list[str]:
    problems = []
    for key in ("quorum", "count"):
        value = getattr(policy, key, None)
        if value is not None and value > learners:
            problems.append(
                f"{place}.{key} is {value} but sync.learners is {learners}, so it would never be reached. Use {key}:"
                f" {learners} at most."
            )
    if isinstance(policy, StreamingDilocoPolicy) and policy.overlap >= policy.every:
        problems.append(
            f"{place}.overlap is {policy.overlap} but every is {policy.every}; a result has to be taken before its"
            f" fragment is sent again. Use overlap: {policy.every - 1} at most."
        )
    if isinstance(policy, DecoupledPolicy) and policy.fragments > 1 and _waits_for_some(policy):
        problems.append(
            f"{place}.ahead is 0 with {policy.fragments} fragments and a quorum of {policy.quorum}; learners could wait"
            " for one another on different fragments for ever. Use ahead: 1 or more."
        )
    return problems


def _waits_for_some(policy: DecoupledPolicy) -> bool:
    """Whether a learner waits after each update for others, but not for all."""
    return policy.ahead == 0 and policy.quorum > 1


def between_warnings(between: BetweenSection) -> list[str]:
    """Sentences about choices that are allowed and usually wrong."""
    momenta = {
        name: policy.outer.momentum
        for name, policy in between.policies().items()
        if isinstance(policy, DecoupledPolicy) and policy.outer is not None and policy.outer.momentum > 0
    }
    if not momenta:
        return []
    named = ", ".join(f"{name} {value:g}" for name, value in momenta.items())
    return [
        f"sync.between has outer momentum ({named}) on updates that come one by one; momentum on stale updates is known"
        " to ruin training. Use policy: delayed_nesterov, or leave outer out."
    ]
