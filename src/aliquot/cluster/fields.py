"""What of a document is of the kind that its fields have: the rules read that, and nothing else."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
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

Complaints = list[tuple[str, object, str]]  # path, value, what is expected there


def schemas_of_kind(document: dict[str, Any], known: Sequence[KindSchema]) -> list[KindSchema]:
    """One for each version of the project that serves this kind; none for kinds of which nothing is known."""
    return [
        each for each in known if (each.api_version, each.kind) == (document.get("apiVersion"), document.get("kind"))
    ]


def sound(document: dict[str, Any]) -> tuple[dict[str, Any], Complaints]:
    """`document` without what is of the wrong kind, so that whoever reads it finds what he expects or nothing.

    A scalar where text is expected is kept as text, which is what its writer means. A null says nothing, as the API
    server has it. Of several versions the one with the fewest complaints counts.
    """
    schemas = [each.schema for each in schemas_of_kind(document, supported())]
    # Without its group nobody knows it, and the rules ask by the kind.
    schemas = schemas or [each.schema for each in supported() if each.kind == document.get("kind")] or [{}]
    results: list[tuple[dict[str, Any], Complaints]] = []
    for schema in schemas:
        complaints: Complaints = []
        results.append((_sound(document, schema, "", complaints) or {}, complaints))
    return min(results, key=lambda result: len(result[1]))


def expected_kind(schema: dict[str, Any]) -> str | None:
    """object, array, or one of `_SCALARS`; None where anything may stand."""
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity" if "KMGTP" in schema.get("pattern", "") else "int-or-string"
    kind: str | None = schema.get("type")
    return kind


def _sound(value: Any, schema: dict[str, Any], path: str, complaints: Complaints) -> Any:
    """None: nothing is left."""
    kind = expected_kind(schema)
    if kind == "array":
        if not isinstance(value, list):
            complaints.append((path, value, "a list"))
            return None
        inner = schema.get("items", {})
        items = [_sound(item, inner, f"{path}[{index}]", complaints) for index, item in enumerate(value)]
        return [item for item in items if item is not None]
    if kind == "object":
        if not isinstance(value, dict):
            complaints.append((path, value, "a mapping of keys to values"))
            return None
        given = {key: item for key, item in value.items() if item is not None}
        kept = {
            key: _sound(item, schema_below(schema, key) or {}, f"{path}.{key}".lstrip("."), complaints)
            for key, item in given.items()
        }
        return {key: item for key, item in kept.items() if item is not None}
    if kind is None:
        return value
    if kind == "string" and isinstance(value, datetime.date):
        return value.isoformat()  # YAML's dates are text to the API server
    expected, fits = _SCALARS[kind]
    if fits(value):
        return value
    complaints.append((path, value, expected))
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
