"""What the documentation of a recipe's entry is: meaning, kind of value, range and default."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moe_async.errors import RecipeError
from moe_async.recipe.messages import alternatives, models_in, shown
from moe_async.recipe.schema import Recipe

_BOUNDS = {"gt": "greater than {}", "ge": "{} or more", "lt": "less than {}", "le": "{} or less"}
_TELL_FORMS = ("kind", "policy")
"""Keys that tell the forms of a section apart."""
_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Explained:
    """One entry of a recipe, in one form of the section that holds it.

    Attributes:
        path: with dots, without places in lists.
        form: which form of the section has it, such as ``kind: sigmoid_bias``; empty where there is one form.
        meaning: its documentation.
        value: what it may be, with its range.
        default: as a recipe would say it; None where the entry is required.
        entries: what lies below it: the first sentence about each, its kind of value and its default.
    """

    path: str
    form: str
    meaning: str
    value: str
    default: str | None
    entries: Mapping[str, str]


def explain(path: str) -> list[Explained]:
    """The documentation of an entry, once for each form of its section that documents it otherwise.

    Args:
        path: with dots, such as ``moe.router.update.rate``; places in lists may be left out.

    Raises:
        RecipeError: there is no such entry.
    """
    parts = [part for part in path.split(".") if not part.isdecimal()] or [path]
    found: list[tuple[type[BaseModel], FieldInfo]] = []
    owners: list[type[BaseModel]] = [Recipe]
    for depth, part in enumerate(parts):
        found = [(owner, owner.model_fields[part]) for owner in owners if part in owner.model_fields]
        if not found:
            raise RecipeError(_unknown(parts[:depth], part, owners))
        owners = list(dict.fromkeys(model for _, field in found for model in models_in(field.annotation)))
    explained = [_explained(".".join(parts), owner, field, len(found) > 1) for owner, field in found]
    alike = {(one.meaning, one.value, one.default): one for one in reversed(explained)}
    chosen = list(reversed(alike.values()))
    return [Explained(**{**vars(chosen[0]), "form": ""})] if len(chosen) == 1 and len(found) > 1 else chosen


def values_of(recipe: Recipe, path: str) -> list[Any]:
    """What a resolved recipe says at a path: a value for each entry of a list on the way; none where it has no such
    entry."""
    values: list[Any] = [recipe.model_dump(mode="json")]
    for part in path.split("."):
        below: list[Any] = []
        for value in values:
            if isinstance(value, list) and part.isdecimal():
                below += value[int(part) : int(part) + 1]
                continue
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, Mapping) and part in one:
                    below.append(one[part])
        values = below
    return values


def entries(recipe: Recipe) -> dict[str, Any]:
    """A resolved recipe as one value for each dotted path; lists of plain values are one value."""
    return dict(_entries(recipe.model_dump(mode="json"), ""))


def _entries(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _entries(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(one, Mapping | list) for one in value):
        for place, below in enumerate(value):
            yield from _entries(below, f"{path}.{place}")
    else:
        yield path, value


def _explained(path: str, owner: type[BaseModel], field: FieldInfo, several: bool) -> Explained:
    return Explained(
        path=path,
        form=_form(owner) if several else "",
        meaning=_without_default(field.description or ""),
        value=_value(field),
        default=_default(field),
        entries=_below(field),
    )


def _below(field: FieldInfo) -> dict[str, str]:
    """What is said of each entry below a field; the key that tells forms apart may have the values of all of them."""
    below: dict[str, list[FieldInfo]] = {}
    for model in models_in(field.annotation):
        for name, one in model.model_fields.items():
            below.setdefault(name, []).append(one)
    said = {}
    for name, fields in below.items():
        last = fields[-1]
        value = " or ".join(dict.fromkeys(map(_value, fields if name in _TELL_FORMS else [last])))
        default = "required" if name in _TELL_FORMS or last.is_required() else f"default {_default(last)}"
        said[name] = f"{_first_sentence(last.description or '')} ({value}; {default})"
    return said


def _form(owner: type[BaseModel]) -> str:
    for key in _TELL_FORMS:
        if key in owner.model_fields and not owner.model_fields[key].is_required():
            return f"{key}: {owner.model_fields[key].default}"
    return ""


def _unknown(before: list[str], part: str, owners: list[type[BaseModel]]) -> str:
    known = list(dict.fromkeys(name for owner in owners for name in owner.model_fields))
    where = ".".join(before) or "a recipe"
    if not known:
        return f"{where} has no entries below it. Ask for {where} itself."
    near = difflib.get_close_matches(part, known, n=1)
    hint = f"Did you mean {'.'.join([*before, near[0]])}?" if near else f"The entries are: {', '.join(known)}."
    return f"{where} has no entry {part!r}. {hint}"


def _value(field: FieldInfo) -> str:
    bounds = [
        text.format(shown(getattr(rule, name)))
        for rule in field.metadata
        for name, text in _BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return ", ".join([" or ".join(dict.fromkeys(_names(field.annotation))), *bounds])


def _names(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _names(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from _names(one)
    elif origin is Literal:
        yield alternatives(shown(value) if not isinstance(value, str) else value for value in get_args(annotation))
    elif annotation is type(None):
        yield "null"
    elif origin in (list, tuple):
        yield f"list of {' or '.join(dict.fromkeys(_names(get_args(annotation)[0])))}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        form = _form(annotation)
        yield f"mapping ({form})" if form else "mapping"
    elif annotation in _KINDS:
        yield _KINDS[annotation]
    else:
        yield "mapping"


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    # Defaults that follow from other entries are told in words alone.
    stated = (field.description or "").partition("Default:")[2].strip().removesuffix(".")
    return stated or shown(field.get_default())


def _without_default(text: str) -> str:
    meaning = text.partition(" Default:")[0].strip()
    return meaning.removesuffix(" Required.").strip()


def _first_sentence(text: str) -> str:
    return _without_default(text).partition(". ")[0].removesuffix(".")
