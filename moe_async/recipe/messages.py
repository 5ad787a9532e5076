"""Turns what is wrong with a recipe into sentences: the path, the value given, the rule, a repair.

`statement` is for rules that name their own paths; every other error gets its path and value from here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, Discriminator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

STATEMENT = "statement"
_UNION = "union"
"""How the type of error of a union begins whose forms are told apart by a key, see `union_discriminator`."""
_TAG_MARK = "\0"  # no key that a person writes begins with it

_RULES: dict[str, str] = {
    "int_type": "it must be a whole number",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "string_type": "it must be text",
    "bool_type": "it must be true or false",
    "list_type": "it must be a list",
    "tuple_type": "it must be a list",
    "dict_type": "it must be a mapping of keys to values",
    "model_type": "it must be a mapping of keys to values",
    "literal_error": "it must be one of {expected}",
    "greater_than": "it must be greater than {gt:g}",
    "greater_than_equal": "it must be {ge:g} or more",
    "less_than": "it must be less than {lt:g}",
    "less_than_equal": "it must be {le:g} or less",
    "too_short": "its number of entries must be {min_length} or more",
    "too_long": "its number of entries must be {max_length} or less",
    "invalid_key": "a key must be text; put it in quotes",
    "string_too_short": "it must not be empty",
}


def statement(text: str) -> PydanticCustomError:
    """Gives an error whose text is a whole sentence already, with its paths and values in it."""
    return PydanticCustomError(STATEMENT, "{text}", {"text": text})


def refuse_all(problems: Sequence[str], value: object) -> None:
    """Raises every problem as an error of its own; none when there is none."""
    if problems:
        details = [InitErrorDetails(type=statement(text), input=value) for text in problems]
        raise ValidationError.from_exception_data("recipe", details)


def union_discriminator(tag_of: Callable[[Any], str | None], key: str, names: Sequence[str]) -> Discriminator:
    """Tells the forms of a union apart by one of their keys.

    Args:
        tag_of: gives the `union_tag` of a value, None where it has none.
        key: the key.
        names: what it may say.
    """
    return Discriminator(
        tag_of,
        # Pydantic wants discriminators to be hashable, so what the message needs is in the type and not in a context.
        custom_error_type=f"{_UNION}/{key}/{'/'.join(names)}",
        custom_error_message=f"it must be a mapping whose {key} is one of {alternatives(names)}",
    )


def union_tag(name: str) -> str:
    """Gives the tag of one form of a union. Pydantic puts tags into locations, where people need not see them."""
    return _TAG_MARK + name


def alternatives(values: Iterable[object]) -> str:
    """Joins values as "a", "a or b", or "a, b or c"."""
    *head, last = [str(value) for value in values]
    return f"{', '.join(head)} or {last}" if head else last


def nearest_multiples(value: int, step: int) -> list[int]:
    """Gives the positive multiples of `step` just below and just above `value`, which is none itself."""
    below = value // step * step
    return [multiple for multiple in (below, below + step) if multiple > 0]


def nearest_divisors(number: int, value: int) -> list[int]:
    """Gives the divisors of `number` just below and just above `value`, which is none itself."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    below = [divisor for divisor in divisors if divisor < value]
    above = [divisor for divisor in divisors if divisor > value]
    return below[-1:] + above[:1]


def shown(value: object) -> str:
    """Writes a value the way a recipe would, cut short when it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def describe_errors(error: ValidationError, model: type[BaseModel], raw: object) -> list[str]:
    """Gives one sentence or two for each error.

    Args:
        error: what pydantic found.
        model: the class that was to be filled; unknown keys are compared with its fields.
        raw: the data as the user gave them, so that paths count entries as the user wrote them.
    """
    return [_describe(details, model, raw) for details in error.errors(include_url=False)]


def _describe(details: ErrorDetails, model: type[BaseModel], raw: object) -> str:
    kind, context, given = details["type"], details.get("ctx", {}), details["input"]
    loc = [part for part in details["loc"] if not _is_tag(part)]
    path = _dotted(loc, raw)
    owner, field = _owner_and_field(model, details["loc"])
    if kind == STATEMENT:
        return details["msg"]
    if kind == "extra_forbidden":
        return _describe_unknown_key(path, str(loc[-1]), owner)
    if kind.startswith(f"{_UNION}/") and isinstance(given, Mapping):
        key, *names = kind.split("/")[1:]
        return _describe_unknown_kind(path, key, given, names)
    if kind == "missing":
        return _describe_missing(path, field)
    if kind == "value_error":
        return f"{path} is {shown(given)}; {context['error']}"
    rule = _RULES[kind].format(**context) if kind in _RULES else _lower_first(details["msg"])
    return f"{path} is {shown(given)}; {rule}. {_repair(kind, context, given, field)}".rstrip()


def _describe_missing(path: str, field: FieldInfo | None) -> str:
    if field is None:
        return f"{path} is missing; the list is too short. Add an entry."
    return f"{path} is missing; it is required. {_meaning(field)}"


def _describe_unknown_key(path: str, key: str, owner: type[BaseModel]) -> str:
    known = list(owner.model_fields)
    place = path.removesuffix(key).rstrip(".") or "a recipe"
    near = difflib.get_close_matches(key, known, n=1)
    repair = f"Did you mean {near[0]}?" if near else f"The keys of {place} are: {', '.join(known)}."
    return f"{path} is not a known key. {repair}"


def _describe_unknown_kind(path: str, key: str, given: Mapping[str, Any], kinds: Sequence[str]) -> str:
    kind = given.get(key)
    near = difflib.get_close_matches(str(kind), kinds, n=1, cutoff=0.5)
    repair = f" Did you mean {near[0]}?" if near else ""
    return f"{path}.{key} is {shown(kind)}; it must be one of {alternatives(kinds)}.{repair}"


def _repair(kind: str, context: Mapping[str, Any], value: object, field: FieldInfo | None) -> str:
    """Gives what to write instead, or an empty text where the rule says it already."""
    if kind == "literal_error":
        near = difflib.get_close_matches(str(value), _quoted(context["expected"]), n=1, cutoff=0.5)
        if near:
            return f"Did you mean {near[0]}?"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}."
    if kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        return f"Write it without quotes: {value}."
    if kind == "string_type" and isinstance(value, bool):
        return "Put it in quotes."  # how it was written, such as no or off, is lost
    if kind == "string_type" and isinstance(value, (int, float)):
        return f'Put it in quotes: "{value}".'
    if field is not None and not field.is_required() and not field.validate_default:
        default = field.get_default()
        if isinstance(default, BaseModel):
            return "Leave it out to get its defaults."
        return f"Leave it out to get the default, {shown(list(default) if isinstance(default, tuple) else default)}."
    return _meaning(field) if field is not None else ""


def _meaning(field: FieldInfo) -> str:
    return f"Meaning: {_lower_first((field.description or '').removesuffix(' Required.'))}"


def _quoted(expected: str) -> list[str]:
    """Takes the words out of pydantic's "'a', 'b' or 'c'"."""
    return [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _dotted(loc: Sequence[int | str], raw: object) -> str:
    """Writes a location with dots; leaves out the index 0 of a lone value that counts as a list of one."""
    parts: list[str] = []
    node = raw
    for part in loc:
        if isinstance(part, int) and not isinstance(node, (list, tuple)):
            continue
        parts.append(str(part))
        node = _child(node, part)
    return ".".join(parts) or "the recipe"


def _child(node: object, part: int | str) -> object:
    if isinstance(node, Mapping):
        return node.get(part)
    if isinstance(node, (list, tuple)) and isinstance(part, int) and part < len(node):
        return node[part]
    return None


def _is_tag(part: int | str) -> bool:
    return isinstance(part, str) and part.startswith(_TAG_MARK)


def _owner_and_field(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """Gives the section class that holds the last part of a location, and the field it is; None for a list's entry."""
    field = None
    for depth, part in enumerate(loc):
        if _is_tag(part):
            continue
        field = model.model_fields.get(part) if isinstance(part, str) else None
        rest = loc[depth + 1 :]
        if field is not None and any(not _is_tag(later) for later in rest):
            model = _model_of(field.annotation, str(rest[0]), model)
    return model, field


def _model_of(annotation: object, tag: str, otherwise: type[BaseModel]) -> type[BaseModel]:
    """Gives the model inside an annotation: of several, the one whose ``kind`` or ``policy`` the tag names."""
    models = list(models_in(annotation))
    named = [
        model
        for model in models
        for key in ("kind", "policy")
        if key in model.model_fields and union_tag(str(model.model_fields[key].default)) == tag
    ]
    return next(iter([*named, *models]), otherwise)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Gives the section classes inside an annotation, as those of a union or of a list's entries."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)
