"""Parts of rendered documents, for tests that spoil them, and the findings of the check about the result."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from aliquot.cluster.findings import RuleFinding
from aliquot.cluster.manifests import ManifestObject

Documents = dict[str, dict[str, Any]]
TYPE = "node.kubernetes.io/instance-type"


def rules(findings: list[RuleFinding]) -> set[str]:
    return {each.rule for each in findings}


def errors(findings: list[RuleFinding]) -> set[str]:
    return {each.rule for each in findings if each.level == "error"}


def manifests_of(found: Documents) -> list[ManifestObject]:
    return [_manifest(json.dumps(document), name) for name, document in found.items()]


@cache
def _manifest(document: str, name: str) -> ManifestObject:
    """Most tests change one document of a render; the views of the others stay, and nothing is written as YAML."""
    return ManifestObject(json.loads(document), f"{name}:1")


def pool(found: Documents) -> dict[str, Any]:
    return found["node-pool.yaml"]["spec"]


def pod(found: Documents) -> dict[str, Any]:
    patch = found["train-job.yaml"]["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]
    return patch["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def trainer(found: Documents) -> dict[str, Any]:
    return found["train-job.yaml"]["spec"]["trainer"]


def both(found: Documents, resource: str, value: str) -> None:
    for part in ("requests", "limits"):
        trainer(found)["resourcesPerNode"][part][resource] = value


def shm(found: Documents, **empty_dir: Any) -> None:
    pod(found)["volumes"].append({"name": "shm", "emptyDir": empty_dir})
    pod(found)["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})


def requirement(found: Documents, key: str) -> dict[str, Any]:
    requirements: list[dict[str, Any]] = pool(found)["template"]["spec"]["requirements"]
    return next(each for each in requirements if each["key"] == key)


def node_spec(found: Documents) -> dict[str, Any]:
    return pool(found)["template"]["spec"]


def job_set(found: Documents) -> dict[str, Any]:
    return found["training-runtime.yaml"]["spec"]["template"]["spec"]


def volume(found: Documents, kind: str) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [each[kind] for each in pod(found)["volumes"] if kind in each]
    return volumes[0]


def runtime_pod(found: Documents) -> dict[str, Any]:
    return job_set(found)["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def deny(direction: str) -> dict[str, Any]:
    """Return the NetworkPolicy with which guides begin: no pod of the namespace sends or receives anything."""
    return {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "deny"},
        "spec": {"podSelector": {}, "policyTypes": [direction]},
    }  # fmt: skip


def node_class(found: Documents) -> dict[str, Any]:
    return found["node-class.yaml"]["spec"]
