"""The shipped names of fields are those of the real CRDs."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from tests.cluster.crd import needs_crds, schema_of


def names(known: Any, path: str = "") -> dict[str, set[str]]:
    """path -> the names that are known there, for every level that is not left open."""
    if not isinstance(known, dict):
        return {}
    found = {path: set(known)}
    for key, below in known.items():
        found |= names(below, f"{path}.{key}")
    return found


def at(schema: dict[str, Any], path: str) -> set[str]:
    for key in path.split(".")[1:]:
        schema = schema.get("properties", {}).get(key, {})
        while schema.get("type") == "array":
            schema = schema["items"]
    return set(schema.get("properties", {}))


@needs_crds
@pytest.mark.parametrize(
    "api_version, kind",
    [
        ("karpenter.sh/v1", "NodePool"),
        ("karpenter.k8s.aws/v1", "EC2NodeClass"),
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
        ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
    ],
)
def test_names(api_version: str, kind: str) -> None:
    shipped = json.loads(files("aliquot.cluster").joinpath("fields.json").read_text())[kind]
    schemas = [schema_of(api_version, kind, trainer) for trainer in ("2.1", "2.3")]
    for path, known in names(shipped).items():
        assert known == at(schemas[0], path) | at(schemas[1], path), path
