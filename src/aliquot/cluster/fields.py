"""The fields that Kubernetes knows, of which kind each is, and what of a document is of that kind.

fields.json beside this file has them of Karpenter 1.14, Trainer 2.1 to 2.3 and Kubernetes' storage kinds. `{name: ...}`
is a mapping with these keys, `{"*": ...}` one with any, `[...]` a list, a word one of `_SCALARS`, 1 anything.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from aliquot.cluster.quantity import parse

_INTEGERS = range(-(1 << 63), 1 << 63)

# What is expected, in words, and whether a value is that.
_SCALARS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("text, in quotes where it looks like a number, a date or true", lambda value: isinstance(value, str)),
    "integer": ("an integer", lambda value: type(value) is int and value in _INTEGERS),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "quantity": ("an amount like 31, 500m or 56Gi", lambda value: parse(value) is not None),
    "integer or text": ("an integer or a word", lambda value: type(value) is int or isinstance(value, str)),
}

Complaints = list[tuple[str, object, str]]  # path, value, what is expected there


def known_fields(kind: str) -> dict[str, Any] | None:
    """None for kinds of which nothing is known."""
    return _fields().get("TrainingRuntime" if kind == "ClusterTrainingRuntime" else kind)


def sound(document: dict[str, Any], kind: str) -> tuple[dict[str, Any], Complaints]:
    """`document` without what is of the wrong kind, so that whoever reads it finds what he expects or nothing.

    A scalar where text is expected is kept as text, which is what its writer means. A null says nothing, as the API
    server has it.
    """
    complaints: Complaints = []
    kept = _sound(document, known_fields(kind) or 1, "", complaints)
    return kept or {}, complaints


def _sound(value: Any, known: Any, path: str, complaints: Complaints) -> Any:
    """None: nothing is left."""
    if isinstance(known, list):
        if not isinstance(value, list):
            complaints.append((path, value, "a list"))
            return None
        items = [_sound(item, known[0], f"{path}[{index}]", complaints) for index, item in enumerate(value)]
        return [item for item in items if item is not None]
    if isinstance(known, dict):
        if not isinstance(value, dict):
            complaints.append((path, value, "a mapping of keys to values"))
            return None
        given = {key: item for key, item in value.items() if item is not None}
        kept = {
            key: _sound(item, known.get(key, known.get("*", 1)), f"{path}.{key}".lstrip("."), complaints)
            for key, item in given.items()
        }
        return {key: item for key, item in kept.items() if item is not None}
    if known == 1:
        return value
    expected, fits = _SCALARS[known]
    if fits(value):
        return value
    complaints.append((path, value, expected))
    if known == "text" and isinstance(value, bool | int | float | datetime.date):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return None


@cache
def _fields() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files("aliquot.cluster").joinpath("fields.json").read_text())
    return loaded
