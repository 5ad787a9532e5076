"""The section that says which text the model learns from: `data`, and the entries of its `source`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from moe_async.recipe.section import Section

BuiltinDomain = Literal["python", "english", "cpp", "maths"]
BUILTIN_DOMAINS: tuple[BuiltinDomain, ...] = ("python", "english", "cpp", "maths")


class SourceEntry(Section):
    """One source of training text: a builtin domain, or files."""

    builtin: BuiltinDomain | None = Field(
        default=None, description="Name of a builtin domain. Default: null; then path is required."
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="File, directory or glob. Default: null; then builtin is required.",
    )
    field: str | None = Field(
        default=None,
        min_length=1,
        description="Key of the text in each line of JSON Lines files; only with path. Default: null, plain text.",
    )
    domain: str = Field(
        default=None,
        validate_default=True,
        min_length=1,
        description="Label under which evaluation reports the text; entries with one label count as one domain."
        " Default: the builtin's name, or the path's last part without its ending.",
    )
    weight: float = Field(
        default=1.0, gt=0, description="How often the entry is drawn, relative to the others. Default: 1."
    )
    max_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Largest amount of text read from the entry, in bytes. Default: null, all of it.",
    )
    document_bytes: int = Field(
        default=16384,
        gt=0,
        description="A longer text file is cut into documents near this size, in bytes, at blank lines."
        " Default: 16384.",
    )

    @field_validator("field")
    @classmethod
    def _field_needs_path(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("builtin") is not None:
            raise ValueError("it applies to files only. Remove it, or give a path in place of the builtin.")
        return value

    @field_validator("domain", mode="before")
    @classmethod
    def _fill_domain(cls, value: object, info: ValidationInfo) -> object:
        if value is not None:
            return value
        return info.data.get("builtin") or _label(info.data.get("path") or "")

    @model_validator(mode="after")
    def _one_origin(self) -> SourceEntry:
        if (self.builtin is None) == (self.path is None):
            repair = "Add one of them." if self.path is None else "Remove one of them."
            raise ValueError(f"it must name exactly one of builtin and path. {repair}")
        return self


def _label(path: str) -> str:
    """Gives the last part of a path that holds no wildcard, without its ending: `code/**/*.py` gives `code`."""
    plain = [part for part in PurePath(path).parts if not set(part) & set("*?[") and part.strip("/.")]
    return PurePath(plain[-1]).stem if plain else "text"


# Stands for the word "builtin" until the list is complete, so that errors count entries as the user wrote them.
_ALL_BUILTINS = SourceEntry(path="builtin")


def _source_entry(value: object) -> object:
    """Reads the short form of an entry, a string."""
    if isinstance(value, str):
        return _ALL_BUILTINS if value == "builtin" else {"path": value}
    return value


class DataSection(Section):
    """Where text comes from and how it is cut into sequences."""

    source: list[Annotated[SourceEntry, BeforeValidator(_source_entry)]] = Field(
        min_length=1,
        description="One entry or a list of entries. An entry is a mapping; the word builtin, for all builtin domains;"
        " or another string, for a path. Required.",
    )
    seq_len: int = Field(default=256, ge=8, description="Length of a training sequence, in tokens. Default: 256.")
    heldout: float = Field(
        default=0.05, gt=0, le=0.5, description="Share of the documents kept for evaluation. Default: 0.05."
    )
    heldout_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Largest amount of held-out text per domain that evaluation reads, in bytes."
        " Default: null, all of it.",
    )
    tokenizer: Literal["bytes"] = Field(default="bytes", description="How text becomes token ids. Default: bytes.")
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of the order of training windows; the split does not depend on it. Default: 0.",
    )

    @field_validator("source", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        if isinstance(value, (str, dict, SourceEntry)):
            return [value]
        if not isinstance(value, list):
            raise ValueError("it must be an entry or a list of entries. Use builtin, a path or a mapping.")
        return value

    @field_validator("source")
    @classmethod
    def _spell_out_builtins(cls, value: list[SourceEntry]) -> list[SourceEntry]:
        every = [SourceEntry(builtin=domain) for domain in BUILTIN_DOMAINS]
        return [entry for given in value for entry in (every if given is _ALL_BUILTINS else [given])]
