"""The policies that `sync.between` chooses from: how learners share what they learn.

A policy's keys and their defaults are those of the preset of the same name in `moe_async.sync.presets`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, Tag, model_validator

from moe_async.recipe.messages import alternatives, refuse_all, union_discriminator, union_tag
from moe_async.recipe.section import Section

Weight = Literal["equal", "tokens"]

_POLICY = "Which policy. Required."
_EVERY_MEANS = "Steps of a learner between two updates of a fragment."
_EVERY = f"{_EVERY_MEANS} Required."
_FRAGMENTS = "Parts that are sent in turn."
_QUORUM = "Learners whose updates open a merge."
_GRACE = "Seconds after the quorum in which further updates get into the merge."
_DISCOUNT = "An update n versions old counts 1 / (1 + discount * n)."
_MAX_LAG = "Older updates, in versions, are refused."
_AHEAD = (
    "Updates of a fragment that may be under way before its learner waits: how long it goes on when the syncer is gone."
)
_AS_DENSE = "Default: null, as in dense."
_WEIGHT = "What a learner's update counts: equal, or tokens, as many as it saw since its last update (of an expert:"
_LR = "Outer learning rate. Default: 0.7."
_MOMENTUM = "Outer Nesterov momentum. Default: 0.9."


class BspPolicy(Section):
    """All learners' gradients make one step."""

    policy: Literal["bsp"] = Field(default="bsp", description=_POLICY)


class MSyncPolicy(Section):
    """The first gradients of the newest version make one step; later ones are dropped."""

    policy: Literal["m_sync"] = Field(default="m_sync", description=_POLICY)
    count: int = Field(ge=1, description="Gradients that make a step; at most sync.learners. Required.")


class AspPolicy(Section):
    """Every gradient makes a step of its own as it comes."""

    policy: Literal["asp"] = Field(default="asp", description=_POLICY)
    discount: float = Field(
        default=0.0, ge=0, description="A gradient n versions old counts 1 / (1 + discount * n). Default: 0."
    )
    max_lag: int | None = Field(
        default=None, ge=0, description="Older gradients, in versions, are refused. Default: null, none is."
    )


class SspPolicy(Section):
    """As asp, but no learner gets more than some steps ahead of the slowest."""

    policy: Literal["ssp"] = Field(default="ssp", description=_POLICY)
    bound: int = Field(ge=0, description="Steps that a learner may be ahead of the slowest. Required.")
    aggregate: Literal["push", "clock"] = Field(
        default="push",
        description="push: each gradient makes a step; clock: those of one step number make one together. Default:"
        " push.",
    )
    discount: float = Field(
        default=0.0, ge=0, description="A gradient n versions old counts 1 / (1 + discount * n). Default: 0."
    )


class LocalSgdPolicy(Section):
    """The mean of all learners' weights, every so often."""

    policy: Literal["local_sgd"] = Field(default="local_sgd", description=_POLICY)
    every: int = Field(ge=1, description=_EVERY)
    weight: Weight = Field(default="equal", description=f"{_WEIGHT} tokens that it got). Default: equal.")


class DilocoPolicy(Section):
    """Outer Nesterov momentum on the mean of how far the learners came."""

    policy: Literal["diloco"] = Field(default="diloco", description=_POLICY)
    every: int = Field(ge=1, description=_EVERY)
    lr: float = Field(default=0.7, gt=0, description=_LR)
    momentum: float = Field(default=0.9, ge=0, lt=1, description=_MOMENTUM)
    weight: Weight = Field(default="equal", description=f"{_WEIGHT} tokens that it got). Default: equal.")


class StreamingDilocoPolicy(Section):
    """DiLoCo fragment by fragment, its results taken some steps later."""

    policy: Literal["streaming_diloco"] = Field(default="streaming_diloco", description=_POLICY)
    every: int = Field(ge=1, description=_EVERY)
    fragments: int = Field(ge=1, description=f"{_FRAGMENTS} Required.")
    overlap: int = Field(
        default=0, ge=0, description="Steps from sending a part to taking the result; less than every. Default: 0."
    )
    mix: float = Field(
        default=0.5, ge=0, le=1, description="Share of the local weights when a result is taken. Default: 0.5."
    )
    lr: float = Field(default=0.7, gt=0, description=_LR)
    momentum: float = Field(default=0.9, ge=0, lt=1, description=_MOMENTUM)
    weight: Weight = Field(default="equal", description=f"{_WEIGHT} tokens that it got). Default: equal.")


class DelayedNesterovPolicy(Section):
    """Every update moves the weights as it comes, the momentum changes after several."""

    policy: Literal["delayed_nesterov"] = Field(default="delayed_nesterov", description=_POLICY)
    every: int = Field(ge=1, description=_EVERY)
    delay: int | None = Field(
        default=None, ge=1, description="Updates after which the momentum changes. Default: null, sync.learners."
    )
    share: float = Field(
        default=0.0, ge=0, le=1, description="Part of the momentum that each update in between applies. Default: 0."
    )
    lr: float = Field(default=0.7, gt=0, description=_LR)
    momentum: float = Field(default=0.9, ge=0, lt=1, description=_MOMENTUM)


class OuterSection(Section):
    """Outer Nesterov momentum."""

    lr: float = Field(default=0.7, gt=0, description=_LR)
    momentum: float = Field(default=0.9, ge=0, lt=1, description=_MOMENTUM)


class DecoupledPolicy(Section):
    """Learners never wait for one another; what has come is merged and sent to all."""

    policy: Literal["decoupled"] = Field(default="decoupled", description=_POLICY)
    every: int = Field(ge=1, description=_EVERY)
    fragments: int = Field(default=1, ge=1, description=f"{_FRAGMENTS} Default: 1.")
    quorum: int = Field(default=1, ge=1, description=f"{_QUORUM} Default: 1.")
    grace: float = Field(
        default=0.0,
        ge=0,
        description=f"{_GRACE} Default: 0.",
    )
    weight: Weight = Field(default="tokens", description=f"{_WEIGHT} tokens that it got). Default: tokens.")
    over: Literal["arrived", "members"] = Field(
        default="members",
        description="Weights are divided by their sum over all members (then it does not matter in which groups updates"
        " arrive) or over the arrived. Default: members.",
    )
    discount: float = Field(default=0.0, ge=0, description=f"{_DISCOUNT} Default: 0.")
    max_lag: int | None = Field(default=None, ge=0, description=f"{_MAX_LAG} Default: null, none is.")
    ahead: int = Field(
        default=4,
        ge=0,
        description=f"{_AHEAD} Default: 4.",
    )
    outer: OuterSection | None = Field(
        default=None, description="Outer momentum. Default: null, updates are added as they are."
    )


class SamePolicy(Section):
    """The policy of `sync.between.dense`, with other values where some are given; not for dense itself."""

    policy: Literal["same"] = Field(default="same", description=_POLICY)
    every: int | None = Field(default=None, ge=1, description=f"{_EVERY_MEANS} {_AS_DENSE}")
    fragments: int | None = Field(default=None, ge=1, description=f"{_FRAGMENTS} {_AS_DENSE}")
    weight: Weight | None = Field(default=None, description=f"{_WEIGHT} tokens that it got). {_AS_DENSE}")
    quorum: int | None = Field(default=None, ge=1, description=f"{_QUORUM} {_AS_DENSE}")
    grace: float | None = Field(default=None, ge=0, description=f"{_GRACE} {_AS_DENSE}")
    discount: float | None = Field(default=None, ge=0, description=f"{_DISCOUNT} {_AS_DENSE}")
    max_lag: int | None = Field(default=None, ge=0, description=f"{_MAX_LAG} {_AS_DENSE}")
    ahead: int | None = Field(default=None, ge=0, description=f"{_AHEAD} {_AS_DENSE}")


SimplePolicy = (
    BspPolicy
    | MSyncPolicy
    | AspPolicy
    | SspPolicy
    | LocalSgdPolicy
    | DilocoPolicy
    | StreamingDilocoPolicy
    | DelayedNesterovPolicy
    | DecoupledPolicy
)
SIMPLE_NAMES = [str(form.model_fields["policy"].default) for form in get_args(SimplePolicy)]


def _policy(value: Any) -> str | None:
    name = value.get("policy") if isinstance(value, dict) else getattr(value, "policy", None)
    return union_tag(name) if isinstance(name, str) else None


_Tagged = (
    Annotated[BspPolicy, Tag(union_tag("bsp"))]
    | Annotated[MSyncPolicy, Tag(union_tag("m_sync"))]
    | Annotated[AspPolicy, Tag(union_tag("asp"))]
    | Annotated[SspPolicy, Tag(union_tag("ssp"))]
    | Annotated[LocalSgdPolicy, Tag(union_tag("local_sgd"))]
    | Annotated[DilocoPolicy, Tag(union_tag("diloco"))]
    | Annotated[StreamingDilocoPolicy, Tag(union_tag("streaming_diloco"))]
    | Annotated[DelayedNesterovPolicy, Tag(union_tag("delayed_nesterov"))]
    | Annotated[DecoupledPolicy, Tag(union_tag("decoupled"))]
)
_Simple = Annotated[_Tagged, union_discriminator(_policy, "policy", SIMPLE_NAMES)]


class SwitchPolicy(Section):
    """One policy, and from some moment on another."""

    policy: Literal["switch"] = Field(default="switch", description=_POLICY)
    first: _Simple = Field(description="The policy at the beginning. Required.")
    then: _Simple = Field(description="The policy afterwards. Required.")
    step: int | None = Field(
        default=None, ge=1, description="Change after that many steps, on average over the learners. Default: null."
    )
    fraction: float | None = Field(
        default=None, gt=0, lt=1, description="Change after that share of train.steps. Default: null."
    )
    plateau: int | None = Field(
        default=None, ge=1, description="Change after that many merges without a lower loss. Default: null."
    )
    improvement: float = Field(
        default=0.0, ge=0, description="plateau: by how much a loss must be lower to count, in nats. Default: 0."
    )

    @model_validator(mode="after")
    def _one_hands_over_to_the_other(self) -> Self:
        problems = []
        if sum(value is not None for value in (self.step, self.fraction, self.plateau)) != 1:
            problems.append(
                f"a switch has step {self.step}, fraction {self.fraction} and plateau {self.plateau}; one condition"
                " says when the policy changes. Give one of the three."
            )
        if contribution(self.first) != contribution(self.then):
            problems.append(
                f"a switch goes from {self.first.policy} to {self.then.policy}; learners send gradients under one and"
                " deltas under the other. Use two policies that send the same:"
                f" {alternatives(gradient_policies())} send gradients."
            )
        elif fragments(self.first) != fragments(self.then):
            problems.append(
                f"a switch goes from {fragments(self.first)} fragments to {fragments(self.then)}; the shared state"
                " is cut once. Use the same number."
            )
        refuse_all(problems, self)
        return self


Policy = SimplePolicy | SwitchPolicy
AnyPolicy = Annotated[
    _Tagged | Annotated[SwitchPolicy, Tag(union_tag("switch"))] | Annotated[SamePolicy, Tag(union_tag("same"))],
    union_discriminator(_policy, "policy", [*SIMPLE_NAMES, "switch", "same"]),
]


def gradient_policies() -> list[str]:
    """Names of the policies under which learners send gradients and the optimizer is the syncer's."""
    return ["bsp", "m_sync", "ssp", "asp"]


def contribution(policy: Policy) -> Literal["grad", "delta"]:
    """What learners send under a policy."""
    name = policy.first.policy if isinstance(policy, SwitchPolicy) else policy.policy
    return "grad" if name in gradient_policies() else "delta"


def fragments(policy: Policy) -> int:
    """Parts that a class is cut into under a policy."""
    return int(getattr(policy.first if isinstance(policy, SwitchPolicy) else policy, "fragments", 1))
