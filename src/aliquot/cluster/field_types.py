"""What of a document is of the kind that its fields have: the rules read that, and nothing else."""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

from aliquot.cluster.crds import KindSchema, supported
from aliquot.cluster.quantity import parse

_INTEGERS = range(-(1 << 63), 1 << 63)

# What is expected, in words, and whether a value is that.
_SCALARS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "string": ("text, in quotes where it looks like a number or true", lambda value: isinstance(value, str)),
    "integer": ("an integer", lambda value: type(value) is int and value in _INTEGERS),
    "number": ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "quantity": ("an amount like 31, 500m or 56Gi", lambda value: parse(value) is not None),
    "int-or-string": ("an integer or a word", lambda value: type(value) is int or isinstance(value, str)),
}


@dataclass(frozen=True)
class Complaint:
    """A field that nobody knows, or a value that is not of its field's kind."""

    path: str
    value: object
    expected: str | None  # in words; None: the field is unknown
    nearest: str | None = None  # of the names that are known there


def schemas_of_kind(document: dict[str, Any], known: Sequence[KindSchema]) -> list[KindSchema]:
    """One for each version of the project that serves this kind; none for kinds of which nothing is known."""
    return [
        each for each in known if (each.api_version, each.kind) == (document.get("apiVersion"), document.get("kind"))
    ]


def sound(document: dict[str, Any]) -> tuple[dict[str, Any], list[Complaint]]:
    """`document` without what is of the wrong kind, so that whoever reads it finds what he expects or nothing.

    A scalar where text is expected is kept as text, which is what its writer means; a null says nothing. A field is
    known that any supported version has.
    """
    complaints: list[Complaint] = []
    kept = _sound(document, _of_all_versions(str(document.get("kind"))), "", complaints)
    return kept or {}, complaints


@cache
def _of_all_versions(kind: str) -> dict[str, Any]:
    return reduce(_merged, (each.schema for each in supported() if each.kind == kind), {})


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What either knows; where one takes words and the other only integers, words."""
    if not first or expected_kind(second) == "int-or-string":
        return second
    if not second or expected_kind(first) == "int-or-string":
        return first
    found = {**second, **first}
    for key in ("items", "additionalProperties"):
        if isinstance(first.get(key), dict) and isinstance(second.get(key), dict):
            found[key] = _merged(first[key], second[key])
    properties = [each.get("properties", {}) for each in (first, second)]
    if any(properties):
        names = {**properties[1], **properties[0]}
        found["properties"] = {name: _merged(*(each.get(name, {}) for each in properties)) for name in names}
    return found


def expected_kind(schema: dict[str, Any]) -> str | None:
    """object, array, or one of `_SCALARS`; None where anything may stand."""
    if "KMGTP" in schema.get("pattern", ""):
        return "quantity"
    if schema.get("x-kubernetes-int-or-string"):
        return "int-or-string"
    kind: str | None = schema.get("type")
    return kind


def _sound(value: Any, schema: dict[str, Any], path: str, complaints: list[Complaint]) -> Any:
    """None: nothing is left."""
    kind = expected_kind(schema)
    if kind == "array":
        if not isinstance(value, list):
            complaints.append(Complaint(path, value, "a list"))
            return None
        inner = schema.get("items", {})
        items = [_sound(item, inner, f"{path}[{index}]", complaints) for index, item in enumerate(value)]
        return [item for item in items if item is not None]
    if kind == "object":
        if not isinstance(value, dict):
            complaints.append(Complaint(path, value, "a mapping of keys to values"))
            return None
        given = {key: item for key, item in value.items() if item is not None}
        kept = {}
        for key, item in given.items():
            here, below = f"{path}.{key}".lstrip("."), schema_below(schema, key)
            if below is None:
                near = difflib.get_close_matches(str(key), list(schema["properties"]), 1, 0.6)
                complaints.append(Complaint(here, item, None, near[0] if near else None))
            kept[key] = _sound(item, below or {}, here, complaints)
        return {key: item for key, item in kept.items() if item is not None}
    if kind is None:
        return value
    if kind == "string" and isinstance(value, datetime.date):
        return value.isoformat()  # YAML's dates are text to the API server
    expected, fits = _SCALARS[kind]
    if fits(value):
        return value
    complaints.append(Complaint(path, value, expected))
    if kind == "string" and isinstance(value, bool | int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return None


def schema_below(schema: dict[str, Any], key: Any) -> dict[str, Any] | None:
    """Of what lies under `key` in a mapping; None where no such key is known, {} where anything may stand."""
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    if key in properties:
        below: dict[str, Any] = properties[key]
        return below
    if isinstance(more, dict):
        return more
    opaque = schema.get("x-kubernetes-preserve-unknown-fields") or not properties
    return {} if more or opaque else None
