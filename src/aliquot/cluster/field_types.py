"""Remove values of the wrong type from a document, so that rules can read the rest without checks."""

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

# The expected value in words, and a test of a value.
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
    """An unknown field, or a value of the wrong type."""

    path: str
    value: object
    expected: str | None  # in words; None: the field is unknown
    nearest: str | None = None  # the most similar known name


def schemas_of_kind(document: dict[str, Any], known: Sequence[KindSchema]) -> list[KindSchema]:
    """Return the schemas of this kind, one for each version of its project; none for an unknown kind."""
    return [
        schema
        for schema in known
        if (schema.api_version, schema.kind) == (document.get("apiVersion"), document.get("kind"))
    ]


def well_typed(document: dict[str, Any]) -> tuple[dict[str, Any], list[Complaint]]:
    """Return `document` without values of the wrong type, and a complaint for each of them.

    A scalar in place of text becomes text, because its writer means text; nulls are dropped. A field of any supported
    version is known.
    """
    complaints: list[Complaint] = []
    value = _well_typed(document, _schema_of_all_versions(str(document.get("kind"))), "", complaints)
    return value or {}, complaints


@cache
def _schema_of_all_versions(kind: str) -> dict[str, Any]:
    return reduce(_merged, (schema.schema for schema in supported() if schema.kind == kind), {})


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two schemas of a kind: a field of either is known, and int-or-string wins over integer."""
    if not first or expected_kind(second) == "int-or-string":
        return second
    if not second or expected_kind(first) == "int-or-string":
        return first
    merged = {**second, **first}
    for key in ("items", "additionalProperties"):
        if isinstance(first.get(key), dict) and isinstance(second.get(key), dict):
            merged[key] = _merged(first[key], second[key])
    properties = [schema.get("properties", {}) for schema in (first, second)]
    if any(properties):
        names = {**properties[1], **properties[0]}
        merged["properties"] = {name: _merged(*(schema.get(name, {}) for schema in properties)) for name in names}
    return merged


def expected_kind(schema: dict[str, Any]) -> str | None:
    """Return object, array, or a key of `_SCALARS`; None if any value is allowed."""
    if "KMGTP" in schema.get("pattern", ""):
        return "quantity"
    if schema.get("x-kubernetes-int-or-string"):
        return "int-or-string"
    kind: str | None = schema.get("type")
    return kind


def _well_typed(value: Any, schema: dict[str, Any], path: str, complaints: list[Complaint]) -> Any:
    """Return the well-typed part of `value`, or None."""
    kind = expected_kind(schema)
    if kind == "array":
        if not isinstance(value, list):
            complaints.append(Complaint(path, value, "a list"))
            return None
        inner = schema.get("items", {})
        elements = [_well_typed(item, inner, f"{path}[{index}]", complaints) for index, item in enumerate(value)]
        return [item for item in elements if item is not None]
    if kind == "object":
        if not isinstance(value, dict):
            complaints.append(Complaint(path, value, "a mapping of keys to values"))
            return None
        present = {key: item for key, item in value.items() if item is not None}
        fields = {}
        for key, item in present.items():
            here, below = f"{path}.{key}".lstrip("."), schema_below(schema, key)
            if below is None:
                matches = difflib.get_close_matches(str(key), list(schema["properties"]), 1, 0.6)
                complaints.append(Complaint(here, item, None, matches[0] if matches else None))
            fields[key] = _well_typed(item, below or {}, here, complaints)
        return {key: item for key, item in fields.items() if item is not None}
    if kind is None:
        return value
    if kind == "string" and isinstance(value, datetime.date):
        return value.isoformat()  # the API server reads YAML dates as text
    expected, fits = _SCALARS[kind]
    if fits(value):
        return value
    complaints.append(Complaint(path, value, expected))
    if kind == "string" and isinstance(value, bool | int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return None


def schema_below(schema: dict[str, Any], key: Any) -> dict[str, Any] | None:
    """Return the schema of `key` in a mapping; None if the key is unknown, {} if any value is allowed."""
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    if key in properties:
        below: dict[str, Any] = properties[key]
        return below
    if isinstance(more, dict):
        return more
    opaque = schema.get("x-kubernetes-preserve-unknown-fields") or not properties
    return {} if more or opaque else None
