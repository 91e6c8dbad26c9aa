"""The shipped names and kinds of fields are those of the real CRDs."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from tests.cluster.crd import needs_crds, schema_of


def shipped(known: Any, path: str = "") -> dict[str, object]:
    """path -> the names of a mapping, or the kind of anything else, for every level that is not left open."""
    if isinstance(known, list):
        return {path: "array"} | shipped(known[0], f"{path}[]")
    if not isinstance(known, dict):
        return {} if known == 1 else {path: known}
    if set(known) == {"*"}:
        return {path: "object"} | shipped(known["*"], f"{path}.*")
    found: dict[str, object] = {path: set(known)}
    for key, below in known.items():
        found |= shipped(below, f"{path}.{key}")
    return found


def at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    for key in path.replace("[]", ".[]").split(".")[1:]:
        if key == "[]":
            schema = schema.get("items", {})
        elif key == "*":
            schema = schema.get("additionalProperties", {})
        else:
            schema = schema.get("properties", {}).get(key, {})
    return schema


def kind(schema: dict[str, Any]) -> object:
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity" if "KMGTP" in schema.get("pattern", "") else "integer or text"
    return "text" if schema.get("type") == "string" else schema.get("type")


@needs_crds
@pytest.mark.parametrize(
    "api_version, name",
    [
        ("karpenter.sh/v1", "NodePool"),
        ("karpenter.k8s.aws/v1", "EC2NodeClass"),
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
        ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
    ],
)
def test_names_and_kinds(api_version: str, name: str) -> None:
    fields = json.loads(files("aliquot.cluster").joinpath("fields.json").read_text())[name]
    schemas = [schema_of(api_version, name, trainer) for trainer in ("2.1", "2.3")]
    for path, known in shipped(fields).items():
        own = [at(schema, path) for schema in schemas]
        if isinstance(known, set):
            assert known == {key for each in own for key in each.get("properties", {})}, path
        else:
            kinds = {kind(each) for each in own if each}
            assert kinds == {known} or kinds == {known, "integer"}, path  # numProcPerNode: one version has no words
