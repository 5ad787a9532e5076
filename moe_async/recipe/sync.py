"""The section `sync`: when the dense gradients of ranks meet, and how several learners share what they learn.

Each key states its meaning, unit and default. The rule that compares it with `parallel` lives in `schema`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from moe_async.recipe.between import BetweenSection
from moe_async.recipe.messages import union_tag
from moe_async.recipe.section import Section


class DelaySection(Section):
    """Dense gradients that are applied some steps after the step that computed them."""

    delay: int = Field(
        ge=0,
        description="Steps between computing a dense gradient and applying it; 0 gives the numbers of blocking."
        " Required.",
    )


def _inside_form(value: object) -> str | None:
    """Tells which of the two forms of `sync.inside` a value has."""
    if value == "blocking":
        return union_tag("word")
    return union_tag("mapping") if isinstance(value, (dict, DelaySection)) else None


Inside = Annotated[
    Annotated[Literal["blocking"], Tag(union_tag("word"))] | Annotated[DelaySection, Tag(union_tag("mapping"))],
    Discriminator(
        _inside_form,
        custom_error_type="inside_form",
        custom_error_message="it must be blocking, or a mapping such as {delay: 1}",
    ),
]


class SyncSection(Section):
    """How ranks inside a learner, and learners, keep together."""

    learners: int = Field(
        default=1,
        ge=1,
        description="Launches that train this model together, each of them a whole set of ranks. Default: 1.",
    )

    inside: Inside = Field(
        default="blocking",
        description="Inside a learner: blocking averages the gradients of a step before that step. {delay: 1} averages"
        " those of dense layers and routers while the next step computes, and applies them one step late (2: two"
        " steps, and so on); needs parallel.zero 0. Default: blocking.",
    )

    between: BetweenSection | None = Field(
        default=None, description="Between learners: a policy for each class of parameters. Default: null, one learner."
    )
    via: Literal["syncer", "all_reduce"] = Field(
        default="syncer",
        description="Between learners: syncer sends updates to the syncer, which merges them; learners may come, go and"
        " differ. all_reduce adds updates up among the learners themselves, all of which take part from the first step"
        " to the last with the same number of ranks; only for local_sgd, diloco and a switch between them. Default:"
        " syncer.",
    )
    timeout: float = Field(
        default=60.0,
        gt=0,
        description="Between learners: seconds without a sign of life after which a partner counts as gone. Default:"
        " 60.",
    )

    @property
    def delay(self) -> int | None:
        """Gives the steps by which dense gradients are late; None: they are reduced by a blocking reduction."""
        return None if self.inside == "blocking" else self.inside.delay
