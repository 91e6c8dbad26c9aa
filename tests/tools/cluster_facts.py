"""Writes src/aliquot/cluster/facts.json from CRDs: `python -m tests.tools.cluster_facts --crds DIR`.

DIR has a folder for each project and version (karpenter-aws-v1.14.1, trainer-v2.3.0, ...), with its CRDs as they are
released. Kept is what decides whether an object is taken: no words, no status; what occurs twice is written once.
tests/cluster/test_crd_schemas.py fails when the file is not what this would write.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from aliquot.cluster.check import KUBERNETES
from aliquot.cluster.kind_schemas import read_crds

FILE = Path(__file__).resolve().parents[2] / "src" / "aliquot" / "cluster" / "facts.json"

# Folder -> the project's name for people and its kinds; the newest version first.
_SOURCES: dict[str, tuple[str, frozenset[str]]] = {
    "karpenter-aws-v1.14.1": ("Karpenter 1.14.1", frozenset({"NodePool", "EC2NodeClass"})),
    "trainer-v2.3.0": ("Kubeflow Trainer 2.3.0", frozenset({"TrainJob", "TrainingRuntime", "ClusterTrainingRuntime"})),
    "trainer-v2.1.0": ("Kubeflow Trainer 2.1.0", frozenset({"TrainJob", "TrainingRuntime", "ClusterTrainingRuntime"})),
    "jobset-v0.12.0": ("JobSet 0.12.0", frozenset({"JobSet"})),
    "jobset-v0.10.1": ("JobSet 0.10.1", frozenset({"JobSet"})),
    "kueue-v0.19.2": ("Kueue 0.19.2", frozenset({"LocalQueue", "ClusterQueue", "ResourceFlavor", "Topology"})),
}
_CORE = ("configmap-v1", "job-batch-v1", "namespace-v1", "networkpolicy-networking-v1", "persistentvolume-v1",
         "persistentvolumeclaim-v1", "secret-v1", "serviceaccount-v1", "storageclass-storage-v1")  # fmt: skip
_QUANTITY = {
    "anyOf": [{"type": "string"}, {"type": "number"}],
    "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|"
    r"(\.[0-9]+))))?$",
}
# What the API server's own code asks of core kinds, k8s.io/kubernetes/pkg/apis/core/validation, and no schema says.
_ACCESS = {"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]}
_MODE = {"enum": ["Filesystem", "Block"]}
_KEYS = {
    "x-kubernetes-validations": [
        {"rule": "self.all(k, k.matches('^[-._a-zA-Z0-9]{1,253}$') && k != '.' && k != '..')",
         "message": "a key is at most 253 letters, digits, -, _ and ."}
    ]
}  # fmt: skip
_STORAGE = {"x-kubernetes-validations": [{"rule": "'storage' in self", "message": "storage is missing"}]}
_CLASS = {"pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)?$", "maxLength": 253}
_PROVISIONER = {"pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"}
_SECRETS_OF_CSI = ("controllerExpand", "controllerPublish", "nodeExpand", "nodePublish")
_SOURCES_OF_A_VOLUME = ("awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "csi", "fc", "flexVolume",
    "flocker", "gcePersistentDisk", "glusterfs", "hostPath", "iscsi", "local", "nfs", "photonPersistentDisk",
    "portworxVolume", "quobyte", "rbd", "scaleIO", "storageos", "vsphereVolume")  # fmt: skip
_ONE_SOURCE = {
    "rule": f"[{', '.join(f'has(self.{each})' for each in _SOURCES_OF_A_VOLUME)}].filter(x, x).size() == 1",
    "message": "a volume has exactly one source",
}
_HAND_WRITTEN: dict[str, dict[str, dict[str, Any]]] = {
    "PersistentVolume": {
        "": {"required": ["spec"]},
        "spec": {"required": ["accessModes", "capacity"], "x-kubernetes-validations": [_ONE_SOURCE]},
        "spec.accessModes": {"minItems": 1},
        "spec.accessModes.[]": _ACCESS,
        "spec.capacity": _STORAGE,
        "spec.nodeAffinity": {"required": ["required"]},
        "spec.storageClassName": _CLASS,
        "spec.csi.volumeHandle": {"minLength": 1},
        "spec.csi.driver": {"pattern": r"^[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?$", "maxLength": 63},
        **{f"spec.csi.{name}SecretRef": {"required": ["name", "namespace"]} for name in _SECRETS_OF_CSI},
        "spec.persistentVolumeReclaimPolicy": {"enum": ["Retain", "Delete", "Recycle", ""]},
        "spec.volumeMode": _MODE,
    },
    "PersistentVolumeClaim": {
        "": {"required": ["spec"]},
        "spec": {"required": ["accessModes", "resources"]},
        "spec.accessModes": {"minItems": 1},
        "spec.accessModes.[]": _ACCESS,
        "spec.resources": {"required": ["requests"]},
        "spec.resources.requests": _STORAGE,
        "spec.storageClassName": _CLASS,
        "spec.volumeMode": _MODE,
    },
    "StorageClass": {
        "provisioner": _PROVISIONER,
        "reclaimPolicy": {"enum": ["Retain", "Delete", ""]},
        "volumeBindingMode": {"enum": ["Immediate", "WaitForFirstConsumer"]},
    },
    "ConfigMap": {"data": _KEYS, "binaryData": _KEYS},
    "Secret": {"data": _KEYS, "stringData": _KEYS},
}
_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}  # a status is the controllers' own
_KEPT = ("required", "format", "x-kubernetes-list-type", "x-kubernetes-list-map-keys")
_WORDS = ("description", "title", "example", "externalDocs")
_MAPS, _SCHEMAS, _LISTS = ("properties",), ("items", "additionalProperties", "not"), ("anyOf", "allOf", "oneOf")
_SMALLEST = 60  # characters of what is worth a reference


def facts(crds: Path) -> str:
    kinds = [*_custom(crds), *_core()]
    counts: Counter[str] = Counter()
    for kind in kinds:
        _count(kind["schema"], counts)
    shared: dict[str, int] = {}
    lines: list[str] = []
    whole = [{**kind, "schema": _shortened(kind["schema"], counts, shared, lines)} for kind in kinds]
    text = [",\n".join(lines), ",\n".join(map(_line, whole))]
    return f'{{"shared": [\n{text[0]}\n],\n"kinds": [\n{text[1]}\n]}}\n'


def _custom(crds: Path) -> Iterator[dict[str, Any]]:
    for folder, (name, kinds) in _SOURCES.items():
        for each in read_crds(crds / folder):
            if each.kind in kinds:
                schema = _without_words(each.schema)
                schema["properties"]["status"] = _ANYTHING
                yield {"apiVersion": each.api_version, "kind": each.kind, "source": name, "schema": schema}


def _core() -> Iterator[dict[str, Any]]:
    """From kubernetes-validate's strict schemas, as structural ones."""
    folder = files("kubernetes_validate").joinpath(f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict")
    definitions = json.loads(folder.joinpath("_definitions.json").read_text())["$defs"]
    for name in _CORE:
        given = json.loads(folder.joinpath(f"{name}.json").read_text())
        (meant,) = given["x-kubernetes-group-version-kind"]
        api_version = "/".join(filter(None, (meant["group"], meant["version"])))
        schema = _structural(given, definitions)
        schema["properties"] |= {"metadata": {"type": "object"}}
        schema["properties"]["status"] = _ANYTHING
        for path, more in _HAND_WRITTEN.get(meant["kind"], {}).items():
            _at(schema, path).update(more)
        yield {"apiVersion": api_version, "kind": meant["kind"], "source": f"Kubernetes {KUBERNETES}", "schema": schema}


def _at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    for key in path.split("."):
        schema = schema["items"] if key == "[]" else schema["properties"][key] if key else schema
    return schema


def _structural(given: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in given:
        name = given["$ref"].rpartition("/")[2]
        if name.endswith(".Quantity"):
            return _QUANTITY
        return _structural(definitions[name], definitions)
    if "oneOf" in given:
        return {"x-kubernetes-int-or-string": True}
    found: dict[str, Any] = {key: given[key] for key in _KEPT if key in given}
    if "type" in given:
        found["type"] = given["type"] if isinstance(given["type"], str) else given["type"][0]  # beside "null"
    if "properties" in given:
        found["properties"] = {key: _structural(each, definitions) for key, each in given["properties"].items()}
    for key in ("items", "additionalProperties"):
        if given.get(key):
            found[key] = _structural(given[key], definitions)
    return found


def _without_words(schema: Any) -> Any:
    kept = {key: value for key, value in schema.items() if key not in _WORDS}
    return _mapped(kept, _without_words)


def _mapped(schema: dict[str, Any], change: Any) -> dict[str, Any]:
    """`schema` with `change` made to every schema directly below it."""
    found = dict(schema)
    for key in _MAPS:
        if key in schema:
            found[key] = {name: change(each) for name, each in schema[key].items()}
    for key in _SCHEMAS:
        if isinstance(schema.get(key), dict):
            found[key] = change(schema[key])
    for key in _LISTS:
        if key in schema:
            found[key] = [change(each) for each in schema[key]]
    return found


def _count(schema: dict[str, Any], counts: Counter[str]) -> dict[str, Any]:
    line = _line(schema)
    counts[line] += 1
    if counts[line] == 1:
        _mapped(schema, lambda each: _count(each, counts))
    return schema


def _shortened(schema: dict[str, Any], counts: Counter[str], shared: dict[str, int], lines: list[str]) -> Any:
    whole = _line(schema)
    if whole not in shared:
        short = _mapped(schema, lambda each: _shortened(each, counts, shared, lines))
        if counts[whole] == 1 or len(whole) < _SMALLEST:
            return short
        shared[whole] = len(lines)
        lines.append(_line(short))
    return {"$ref": shared[whole]}


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crds", type=Path, required=True, help="where the folders of CRDs are")
    FILE.write_text(facts(parser.parse_args().crds))
    print(f"wrote {FILE}: {FILE.stat().st_size >> 10} KiB")
