"""What the API server holds objects of a kind to: the schemas of CustomResourceDefinitions, with their CEL rules.

facts.json beside this file has them, without words, of the versions that aliquot supports, and those of the core kinds
that it renders; `python -m tests.cluster_facts` writes it. A person's own come from files or from the cluster.
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
    shipped: bool = False  # known to be a schema

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]


def is_core(group: str) -> bool:
    return bool(_CORE.match(group)) and not group.endswith(".x-k8s.io")


def supported() -> list[KindSchema]:
    """Of the versions that aliquot supports, the newest of each kind first."""
    return list(_facts())


def read_crds(directory: Path) -> list[KindSchema]:
    """Of all files below `directory`, or of one file. Raises UserError where there is no CRD, or one cannot be read."""
    paths = sorted(directory.rglob("*")) if directory.is_dir() else [directory]
    found: list[KindSchema] = []
    for file in paths:
        if file.is_file() and (file.suffix in _SUFFIXES or file == directory):
            found += schemas_of(_documents(file), str(file))
    if not found:
        raise ManifestError("no CustomResourceDefinition here", directory)
    return found


def schemas_of(documents: Iterable[Any], source: str) -> Iterator[KindSchema]:
    """Each served version of those of `documents` that are CRDs. Raises UserError where one is not whole."""
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
        found = list(yaml.load_all(text, Loader=BoundedFastLoader))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ManifestError(f"cannot read this CRD: {' '.join(str(error).split())}", file) from None
    lists = [each["items"] for each in found if isinstance(each, dict) and isinstance(each.get("items"), list)]
    return [*found, *(item for each in lists for item in each)]


@cache
def _facts() -> Sequence[KindSchema]:
    loaded = json.loads(files("aliquot.cluster").joinpath("facts.json").read_text())
    shared: list[Any] = []
    for each in loaded["shared"]:  # refers only to what is before it
        shared.append(_resolved(each, shared))
    return [
        KindSchema(each["apiVersion"], each["kind"], each["source"], _resolved(each["schema"], shared), shipped=True)
        for each in loaded["kinds"]
    ]


def _resolved(value: Any, shared: list[Any]) -> Any:
    """`value` with each {"$ref": N} replaced by that one of `shared`."""
    if isinstance(value, dict):
        if "$ref" in value:
            return shared[value["$ref"]]
        return {key: _resolved(item, shared) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, shared) for item in value]
    return value
