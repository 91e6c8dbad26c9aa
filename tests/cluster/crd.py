"""Objects against the real CustomResourceDefinitions: types, unknown fields, formats, and every CEL rule.

As the API server does it: defaults first, then the structural schema, then the rules of each value that is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

from tests.conftest import SHARED

CRDS = SHARED / "crds"
TRAINERS = ("2.1", "2.3")
_JOBSETS = {"2.1": "jobset-v0.10.1", "2.3": "jobset-v0.12.0"}  # that Trainer brings

needs_crds = pytest.mark.skipif(not CRDS.is_dir(), reason="needs ../shared/crds (not part of the repository)")

_FOLDERS = {
    "karpenter.sh": "karpenter-aws-v1.14.1",
    "karpenter.k8s.aws": "karpenter-aws-v1.14.1",
}
_TYPES: dict[str, Any] = {
    "string": str, "object": dict, "array": list, "boolean": bool, "integer": int, "number": (int, float),
}  # fmt: skip


def problems(document: dict[str, Any], trainer: str = "2.3") -> list[str]:
    """What the API server would say about `document`; empty: it would take it."""
    schema = schema_of(document["apiVersion"], document["kind"], trainer)
    return list(_check(_defaulted(document, schema), schema, document["kind"]))


def is_custom(document: dict[str, Any]) -> bool:
    group = document["apiVersion"].partition("/")[0]
    return group in _FOLDERS or group == "trainer.kubeflow.org"


def schema_of(api_version: str, kind: str, trainer: str) -> dict[str, Any]:
    group, _, version = api_version.partition("/")
    own = {"trainer.kubeflow.org": f"trainer-v{trainer}.0", "jobset.x-k8s.io": _JOBSETS[trainer]}
    folder = CRDS / {**_FOLDERS, **own}[group]
    crd = _crd(folder / f"{group}_{_plural(kind)}.yaml")
    (found,) = (each for each in crd["spec"]["versions"] if each["name"] == version)
    schema: dict[str, Any] = found["schema"]["openAPIV3Schema"]
    return schema


def _plural(kind: str) -> str:
    return f"{kind.lower()}es" if kind.endswith("Class") else f"{kind.lower()}s"


@cache
def _crd(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return loaded


def _defaulted(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_defaulted(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    with_defaults = {**{key: each["default"] for key, each in properties.items() if "default" in each}, **value}
    return {key: _defaulted(item, properties.get(key, more or {})) for key, item in with_defaults.items()}


def _check(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    if value is None and schema.get("nullable"):
        return
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{where}: {value!r} is neither an integer nor a string"
            return
    elif "type" in schema and (
        not isinstance(value, _TYPES[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean")
    ):
        yield f"{where}: {value!r} is not of type {schema['type']}"
        return
    yield from _scalar(value, schema, where)
    if isinstance(value, list):
        yield from _list(value, schema, where)
    if isinstance(value, dict):
        yield from _map(value, schema, where)
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"] and not _holds(rule["rule"], value):
            yield f"{where}: {rule.get('message', rule['rule'])}"


def _scalar(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is not one of {schema['enum']}"
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where}: {value!r} does not match {schema['pattern']}"
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            yield f"{where}: {value!r} is too short or too long"
    if isinstance(value, int | float) and not isinstance(value, bool):
        out_of_range = not schema.get("minimum", value) <= value <= schema.get("maximum", value)
        if out_of_range:
            yield f"{where}: {value} is out of range"


def _list(value: list[Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield f"{where}: {len(value)} items"
    if keys := schema.get("x-kubernetes-list-map-keys"):
        names = [tuple(item.get(key) for key in keys) for item in value]
        if len(set(names)) != len(names):
            yield f"{where}: the same {keys} twice"
    for index, item in enumerate(value):
        yield from _check(item, schema.get("items", {}), f"{where}[{index}]")


def _map(value: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    for key in schema.get("required", []):
        if key not in value:
            yield f"{where}.{key} is missing"
    for key, item in value.items():
        if key in properties or more:
            yield from _check(item, properties.get(key) or (more if isinstance(more, dict) else {}), f"{where}.{key}")
        elif not schema.get("x-kubernetes-preserve-unknown-fields") and properties:
            yield f"{where}.{key} is not a known field"


def _find(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    return match.group() if match else ""


@cache
def _environment() -> Any:
    string, dyn = cel.Type.STRING, cel.Type.DYN
    find = cel.FunctionDecl(
        "find", [cel.Overload("string_find", string, [string, string], is_member=True, impl=_find)]
    )  # one of Kubernetes' own
    return cel.NewEnv(variables={"self": dyn}, extensions=[ext_strings.ExtStrings()], functions=[find])


@cache
def _compiled(rule: str) -> Any:
    return _environment().compile(rule)


def _holds(rule: str, value: Any) -> bool:
    result = _compiled(rule).eval(data={"self": value}).plain_value()
    if not isinstance(result, bool):
        raise AssertionError(f"{rule}: {result}")
    return result
