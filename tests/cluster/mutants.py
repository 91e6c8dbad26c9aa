"""Good objects, each spoiled in one place at random, for the API server and for our own check to judge."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aliquot.cluster.kind_schemas import KindSchema, schema_below, schemas_of_kind

Document = dict[str, Any]
_OF_ANOTHER_KIND = [True, 7, -1, 2.5, "", "x", "no such value!", [], ["x"], [None], {}, {"x": "y"}, None, 1 << 40]
_SAMPLES: dict[object, Any] = {
    "string": "x", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, None: "1",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where something stands: `holder[key]`, of `schema` ({}: nothing is known)."""

    path: str
    holder: Any
    key: Any
    schema: dict[str, Any]
    of_holder: dict[str, Any]


@dataclass(frozen=True)
class Mutant:
    what: str
    document: Document


def mutants(good: Sequence[Document], known: Sequence[KindSchema], count: int, seed: int) -> Iterator[Mutant]:
    """The same ones for the same seed: every document in turn, a kind of change and a place at random."""
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        document = copy.deepcopy(good[number % len(good)])
        (schema, *_) = schemas_of_kind(document, known)
        ways = list(_WAYS)
        draw.shuffle(ways)
        places = list(_places(document, schema.schema, ""))
        draw.shuffle(places)
        what = next(filter(None, (_WAYS[way](place, draw) for way in ways for place in places)))
        yield Mutant(f"{document.get('kind')} {what}", document)


def _places(value: Any, schema: dict[str, Any], path: str) -> Iterator[Place]:
    if isinstance(value, dict):
        for key in value:
            if path == "" and key in ("apiVersion", "metadata"):
                continue  # the address of the object, which is the request's own
            below = (schema_below(schema, key) if schema else None) or {}
            yield Place(f"{path}.{key}", value, key, below, schema)
            yield from _places(value[key], below, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            below = schema.get("items", {})
            yield Place(f"{path}[{index}]", value, index, below, schema)
            yield from _places(item, below, f"{path}[{index}]")


def _drop(place: Place, draw: random.Random) -> str | None:
    del place.holder[place.key]
    return f"{place.path} dropped"


def _rename(place: Place, draw: random.Random) -> str | None:
    """A letter less, as a finger slips."""
    if not isinstance(place.holder, dict) or len(place.key) < 2:
        return None
    at = draw.randrange(len(place.key))
    name = place.key[:at] + place.key[at + 1 :]
    place.holder[name] = place.holder.pop(place.key)
    return f"{place.path} renamed {name}"


def _retype(place: Place, draw: random.Random) -> str | None:
    value = copy.deepcopy(draw.choice(_OF_ANOTHER_KIND))
    place.holder[place.key] = value
    return f"{place.path} = {value!r}"


def _out_of_enum(place: Place, draw: random.Random) -> str | None:
    if "enum" not in place.schema:
        return None
    place.holder[place.key] = str(place.holder[place.key]) + "s"
    return f"{place.path} out of its enum"


def _out_of_pattern(place: Place, draw: random.Random) -> str | None:
    if "pattern" not in place.schema:
        return None
    place.holder[place.key] = "{}!"
    return f"{place.path} out of its pattern"


def _out_of_range(place: Place, draw: random.Random) -> str | None:
    for bound, step in (("minimum", -1), ("maximum", 1)):
        if bound in place.schema:
            place.holder[place.key] = place.schema[bound] + step
            return f"{place.path} out of its range"
    for bound, value in (("maxLength", "a"), ("maxItems", "a")):
        if bound in place.schema and place.schema[bound] < 1000:
            many = place.schema[bound] + 1
            place.holder[place.key] = value * many if bound == "maxLength" else [value] * many
            return f"{place.path} longer than it may be"
    return None


def _twice(place: Place, draw: random.Random) -> str | None:
    """A second root volume, a variable that is there twice."""
    if not isinstance(place.holder, list):
        return None
    place.holder.append(copy.deepcopy(place.holder[place.key]))
    return f"{place.path} twice"


def _another_field(place: Place, draw: random.Random) -> str | None:
    """One that the kind has and this object has not: role beside instanceProfile."""
    absent = sorted(set(place.schema.get("properties", {})) - set(_keys(place)))
    if not absent or not isinstance(place.holder[place.key], dict):
        return None
    name = draw.choice(absent)
    below = place.schema["properties"][name]
    value = copy.deepcopy(draw.choice([*below.get("enum", []), _SAMPLES[below.get("type")]]))
    place.holder[place.key][name] = value
    return f"{place.path}.{name} = {value!r}"


def _unknown_field(place: Place, draw: random.Random) -> str | None:
    if not isinstance(place.holder[place.key], dict):
        return None
    place.holder[place.key]["unknown"] = "x"
    return f"{place.path}.unknown"


def _keys(place: Place) -> list[str]:
    value = place.holder[place.key]
    return list(value) if isinstance(value, dict) else []


_WAYS: dict[str, Callable[[Place, random.Random], str | None]] = {
    "drop": _drop,
    "rename": _rename,
    "retype": _retype,
    "out of enum": _out_of_enum,
    "out of pattern": _out_of_pattern,
    "out of range": _out_of_range,
    "twice": _twice,
    "another field": _another_field,
    "unknown field": _unknown_field,
}
