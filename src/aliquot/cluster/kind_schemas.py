"""Read the schemas of Kubernetes kinds, and remove the values of an object that have the wrong type for its schema.

The API server checks objects with the same schemas and with the CEL rules in them. facts.json next to this file has
the schemas, without descriptions, of the supported operator versions and of the core kinds that aliquot renders. The
program `python -m tests.tools.cluster_facts` writes facts.json. Other schemas come from files or from the cluster.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml

from aliquot.cluster.quantity import parse
from aliquot.core.decode import BoundedFastLoader
from aliquot.core.errors import ManifestError

SUFFIXES = (".yaml", ".yml", ".json")
_CORE = re.compile(r"^([a-z]*|[a-z.]+\.k8s\.io)$")  # API groups of Kubernetes itself; x-k8s.io is for other projects
_INTEGERS = range(-(1 << 63), 1 << 63)

# By type in a schema: a description of the expected value, for users.
EXPECTED = {
    "string": "text, in quotes where it looks like a number or true", "integer": "an integer", "number": "a number",
    "boolean": "true or false", "quantity": "an amount like 31, 500m or 56Gi", "int-or-string": "an integer or a word",
    "array": "a list", "object": "a mapping of keys to values",
}  # fmt: skip
_SCALARS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int and value in _INTEGERS,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "quantity": lambda value: parse(value) is not None,
    "int-or-string": lambda value: type(value) is int or isinstance(value, str),
}


@dataclass(frozen=True, eq=False)
class KindSchema:
    """The schema of one version of a Kubernetes kind."""

    api_version: str
    kind: str
    source: str  # origin of the schema, such as "Karpenter 1.14.1" or a file name
    schema: dict[str, Any]  # structural schema: spec.versions[].schema.openAPIV3Schema of a CRD
    shipped: bool = False  # whether the schema is from facts.json and therefore known to be valid

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]


def is_core(group: str) -> bool:
    return bool(_CORE.match(group)) and not group.endswith(".x-k8s.io")


def read_crds(directory: Path) -> list[KindSchema]:
    """Read all CRDs below `directory`, which may also be a file.

    Raises UserError if there is no CRD, or if a file with a CRD cannot be read.
    """
    paths = sorted(directory.rglob("*")) if directory.is_dir() else [directory]
    readable = [file for file in paths if file.is_file() and (file.suffix in SUFFIXES or file == directory)]
    schemas = [schema for file in readable for schema in schemas_of(_documents(file), str(file))]
    if not schemas:
        raise ManifestError("no CustomResourceDefinition here", directory)
    return schemas


def schemas_of(documents: Iterable[Any], source: str) -> Iterator[KindSchema]:
    """Yield the schema of each served version of each CRD in `documents`. Raises UserError for an incomplete CRD."""
    for document in documents:
        if not isinstance(document, dict) or document.get("kind") != "CustomResourceDefinition":
            continue
        try:
            spec = document["spec"]
            for version in spec["versions"]:
                schema = {**version["schema"]["openAPIV3Schema"]}
                if version.get("served", True):
                    yield KindSchema(f"{spec['group']}/{version['name']}", spec["names"]["kind"], source, schema)
        except (KeyError, TypeError, AttributeError):
            raise ManifestError("a CustomResourceDefinition without a schema in each of its versions", source) from None


def _documents(file: Path) -> list[Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if "CustomResourceDefinition" not in text:
            return []
        documents = list(yaml.load_all(text, Loader=BoundedFastLoader))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ManifestError(f"cannot read this CRD: {' '.join(str(error).split())}", file) from None
    lists = [document.get("items") for document in documents if isinstance(document, dict)]
    return [*documents, *(item for items in lists if isinstance(items, list) for item in items)]


@cache
def supported() -> Sequence[KindSchema]:
    """Return the schemas in facts.json; among the schemas of a kind, the one of the newest version comes first."""
    loaded = json.loads(files("aliquot.cluster").joinpath("facts.json").read_text())
    shared: list[Any] = []
    for entry in loaded["shared"]:  # an entry refers only to earlier entries
        shared.append(_resolved(entry, shared))
    return [
        KindSchema(kind["apiVersion"], kind["kind"], kind["source"], _resolved(kind["schema"], shared), shipped=True)
        for kind in loaded["kinds"]
    ]


def _resolved(value: Any, shared: list[Any]) -> Any:
    """Replace each {"$ref": N} in `value` by `shared[N]`; facts.json stores repeated parts of schemas only once."""
    if isinstance(value, dict):
        if "$ref" in value:
            return shared[value["$ref"]]
        return {key: _resolved(item, shared) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, shared) for item in value]
    return value


@dataclass(frozen=True)
class Violation:
    """A violation of a schema; `rule` is one of findings.RULES."""

    rule: str
    message: str  # begins with the path of the field
    fix: str


def schemas_of_kind(document: dict[str, Any], known: Sequence[KindSchema]) -> list[KindSchema]:
    """Return the schemas for the kind of `document`, one for each supported version of its operator."""
    key = document.get("apiVersion"), document.get("kind")
    return [schema for schema in known if (schema.api_version, schema.kind) == key]


def well_typed(document: dict[str, Any]) -> dict[str, Any]:
    """Return `document` without nulls and values of the wrong type.

    A number or boolean in place of text becomes text, because the writer most likely meant text.
    """
    return _well_typed(document, _schema_of_all_versions(str(document.get("kind")))) or {}


@cache
def _schema_of_all_versions(kind: str) -> dict[str, Any]:
    return reduce(_merged, (schema.schema for schema in supported() if schema.kind == kind), {})


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two schemas: the result has the fields of both, and int-or-string takes precedence over integer."""
    if not first or expected_kind(second) == "int-or-string":
        return second
    if not second or expected_kind(first) == "int-or-string":
        return first
    merged = {**second, **first}
    merged |= {
        key: _merged(first[key], second[key])
        for key in ("items", "additionalProperties")
        if isinstance(first.get(key), dict) and isinstance(second.get(key), dict)
    }
    properties = [schema.get("properties", {}) for schema in (first, second)]
    if any(properties):
        names = {**properties[1], **properties[0]}
        merged["properties"] = {name: _merged(*(schema.get(name, {}) for schema in properties)) for name in names}
    return merged


def expected_kind(schema: dict[str, Any]) -> str | None:
    """Return the type that a schema expects: object, array, or a key of `_SCALARS`; None if any type is allowed."""
    pattern = schema.get("pattern", "")
    if "KMGTP" in pattern and "%" not in pattern:  # a threshold may be a quantity or a percentage
        return "quantity"
    if schema.get("x-kubernetes-int-or-string"):
        return "int-or-string"
    return cast("str | None", schema.get("type"))


def _well_typed(value: Any, schema: dict[str, Any]) -> Any:
    """Return `value` without parts of the wrong type, or None."""
    kind = expected_kind(schema)
    if kind == "array":
        if not isinstance(value, list):
            return None
        items = [_well_typed(item, schema.get("items", {})) for item in value]
        return [item for item in items if item is not None]
    if kind == "object":
        if not isinstance(value, dict):
            return None
        fields = {key: _well_typed(item, schema_below(schema, key)) for key, item in value.items() if item is not None}
        return {key: item for key, item in fields.items() if item is not None}
    if kind == "string" and isinstance(value, datetime.date):
        return value.isoformat()  # the API server reads YAML dates as text
    if kind is None or _SCALARS[kind](value):
        return value
    if kind == "string" and isinstance(value, bool | int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return None


def schema_below(schema: dict[str, Any], key: Any) -> dict[str, Any]:
    """Return the schema of field `key` in a mapping; {} for an unknown field, and if any value is allowed."""
    more = schema.get("additionalProperties")
    return schema.get("properties", {}).get(key) or (more if isinstance(more, dict) else {})
