"""Segments: which outer optimizer moves which part of a fragment.

Gradients of one fragment are not all applied alike: norms and biases do not decay, each class of parameters has its own
learning rate, and a selection bias has no gradient at all. So an optimizer may be given for single keys. It is plain
data, made once from the recipe, and the same wherever a merge is carried out: at the syncer, under the virtual clock
and in a replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_async.ops.outer import Outer
from moe_async.sync.fragments import Fragment


@dataclass(frozen=True)
class Segment:
    """Neighbouring elements of a fragment that one optimizer moves."""

    elements: int
    outer: Outer


def segments(fragment: Fragment, outer: Outer, rules: Mapping[str, Outer]) -> tuple[Segment, ...]:
    """The segments of a fragment in order, as few as there can be.

    Args:
        fragment: which one.
        outer: of keys that ``rules`` does not name.
        rules: of single keys, by name.
    """
    found: list[Segment] = []
    before: Outer | None = None
    for key in fragment.keys:
        # The cuts follow from the rules alone, so that the segments of two policies in turn are the same elements.
        rule = rules.get(key.name)
        if found and rule == before:
            found[-1] = Segment(found[-1].elements + key.elements, found[-1].outer)
        else:
            found.append(Segment(key.elements, rule or outer))
        before = rule
    return tuple(found)
