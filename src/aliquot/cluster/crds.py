"""Read the schemas of CustomResourceDefinitions with their CEL rules, which the API server applies to objects.

facts.json next to this file holds the schemas, without descriptions, of the supported versions and of the core kinds
that aliquot renders; `python -m tests.tools.cluster_facts` writes it. Other schemas come from files or the cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from aliquot.core.decode import BoundedFastLoader
from aliquot.core.errors import ManifestError

_SUFFIXES = (".yaml", ".yml", ".json")
_CORE = re.compile(r"^([a-z]*|[a-z.]+\.k8s\.io)$")  # groups of Kubernetes itself; x-k8s.io is for others


@dataclass(frozen=True, eq=False)
class KindSchema:
    api_version: str
    kind: str
    source: str  # "Karpenter 1.14.1", or the file
    schema: dict[str, Any]  # structural: spec.versions[].schema.openAPIV3Schema of a CRD
    shipped: bool = False  # part of facts.json, so known to be a valid schema

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]


def is_core(group: str) -> bool:
    return bool(_CORE.match(group)) and not group.endswith(".x-k8s.io")


def supported() -> list[KindSchema]:
    """Return the shipped schemas, the newest version of each kind first."""
    return list(_facts())


def read_crds(directory: Path) -> list[KindSchema]:
    """Read all CRDs below `directory`, or in one file. Raises UserError if there is none, or one cannot be read."""
    paths = sorted(directory.rglob("*")) if directory.is_dir() else [directory]
    schemas: list[KindSchema] = []
    for file in paths:
        if file.is_file() and (file.suffix in _SUFFIXES or file == directory):
            schemas += schemas_of(_documents(file), str(file))
    if not schemas:
        raise ManifestError("no CustomResourceDefinition here", directory)
    return schemas


def schemas_of(documents: Iterable[Any], source: str) -> Iterator[KindSchema]:
    """Yield each served version of the CRDs among `documents`. Raises UserError for an incomplete CRD."""
    for document in documents:
        if not isinstance(document, dict) or document.get("kind") != "CustomResourceDefinition":
            continue
        try:
            spec = document["spec"]
            for version in spec["versions"]:
                schema: dict[str, Any] = {**version["schema"]["openAPIV3Schema"]}
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
    lists = [
        document["items"]
        for document in documents
        if isinstance(document, dict) and isinstance(document.get("items"), list)
    ]
    return [*documents, *(item for document in lists for item in document)]


@cache
def _facts() -> Sequence[KindSchema]:
    loaded = json.loads(files("aliquot.cluster").joinpath("facts.json").read_text())
    shared: list[Any] = []
    for entry in loaded["shared"]:  # an entry refers only to earlier entries
        shared.append(_resolved(entry, shared))
    return [
        KindSchema(
            entry["apiVersion"], entry["kind"], entry["source"], _resolved(entry["schema"], shared), shipped=True
        )
        for entry in loaded["kinds"]
    ]


def _resolved(value: Any, shared: list[Any]) -> Any:
    """Replace each {"$ref": N} in `value` by item N of `shared`."""
    if isinstance(value, dict):
        if "$ref" in value:
            return shared[value["$ref"]]
        return {key: _resolved(item, shared) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, shared) for item in value]
    return value
