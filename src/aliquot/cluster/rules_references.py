"""Rules about the objects to which the pods of a job refer by name: claims, Secrets, queues, a runtime, a namespace.

An object that is not among the manifests may exist on the cluster. A reference to it is reported only if the manifests
contain an unused object of the same kind, because then the name is probably wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.cluster.fields import values
from aliquot.cluster.findings import RuleFinding, did_you_mean, finding
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, mapping, mappings, select_kinds

# The references in a pod spec: kind, and path to the name; `*` stands for all items of a list.
_REFERENCES = (
    ("PersistentVolumeClaim", "volumes/*/persistentVolumeClaim/claimName"),
    ("ConfigMap", "volumes/*/configMap/name"),
    ("Secret", "volumes/*/secret/secretName"),
    ("ConfigMap", "volumes/*/projected/sources/*/configMap/name"),
    ("Secret", "volumes/*/projected/sources/*/secret/name"),
    ("ConfigMap", "containers/*/env/*/valueFrom/configMapKeyRef/name"),
    ("Secret", "containers/*/env/*/valueFrom/secretKeyRef/name"),
    ("ConfigMap", "containers/*/envFrom/*/configMapRef/name"),
    ("Secret", "containers/*/envFrom/*/secretRef/name"),
    ("Secret", "imagePullSecrets/*/name"),
    ("ServiceAccount", "serviceAccountName"),
    ("PriorityClass", "priorityClassName"),
)
_DEFAULT_NAMESPACE = ("Namespace", "default")  # exists on every cluster


def check_pods_references(jobs: Sequence[JobView], manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    used = {reference for job in jobs for reference in references(job)}
    used |= {("Namespace", item.namespace) for item in manifests}
    for job in jobs:
        if (runtime := job.runtime) is not None:  # a runtime outside the manifests may define the volumes
            yield from check_mounts(job.manifest, [job.pod], list(job.volumes.values()))
            if runtime.kind == "TrainingRuntime" and runtime.in_other_namespace(job.manifest):
                yield _namespaces_differ(job, runtime)
        yield from _keys(job, manifests)
        for kind, name in dict.fromkeys(references(job)):
            yield from _reference(job, kind, name, used, manifests)


def references(job: JobView) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of each object that the job and its pods need."""
    references = [(kind, value) for kind, path in _REFERENCES for _, value in values(job.pod, path.split("/"))]
    references += [("LocalQueue", job.queue), ("Namespace", job.manifest.get("metadata", "namespace"))]
    yield from (
        (kind, name) for kind, name in references if isinstance(name, str) and (kind, name) != _DEFAULT_NAMESPACE
    )


def _keys(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Check the keys of Secrets and ConfigMaps from which variables come."""
    for variable in job.env:
        for source, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
            reference = mapping(dig(variable, "valueFrom", source))
            name, key = reference.get("name"), reference.get("key")
            for item in (
                item for item in select_kinds(manifests, kind) if item.name == name and not reference.get("optional")
            ):
                known = [str(word) for part in ("data", "stringData", "binaryData") for word in mapping(item.get(part))]
                if str(key) not in known:
                    message = f"env {variable.get('name')} takes {key!r} of {kind}/{name}, which has {', '.join(known)}"
                    yield finding(
                        "reference", job.manifest, message, did_you_mean(key, known, "a key that it has", 0.0)
                    )


def _reference(
    job: JobView, kind: str, name: str, used: set[tuple[str, str]], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    candidates = select_kinds(manifests, kind)
    named = [item for item in candidates if item.name == name]
    if named and all(item.in_other_namespace(job.manifest) for item in named):
        yield _namespaces_differ(job, named[0])
    nearby = [item.name for item in candidates if not item.in_other_namespace(job.manifest)]
    unused = [other for other in nearby if (kind, other) not in used]
    if not named and unused:
        message = f"{kind}/{name} is not among the manifests, and nobody uses {', '.join(unused)}"
        yield finding("reference", job.manifest, message, f"{unused[0]}, or check {name}, too", "warning")


def _namespaces_differ(job: JobView, other: ManifestObject) -> RuleFinding:
    message = f"{other.kind}/{other.name} lies in the namespace {other.namespace}, the job in {job.manifest.namespace}"
    return finding("reference", job.manifest, message, "the same metadata.namespace in both")


def check_mounts(
    where: ManifestObject, pods: Sequence[dict[str, Any]], volumes: Sequence[dict[str, Any]]
) -> Iterator[RuleFinding]:
    """Check that the containers of pod specs mount only `volumes`, and a single volume at each path."""
    names = sorted({str(volume.get("name")) for volume in volumes})
    keys = ("initContainers", "containers")
    for container in (item for pod in pods for key in keys for item in mappings(pod, key)):
        subject, mounts = f"the container {container.get('name')} mounts", mappings(container, "volumeMounts")
        for name in (mount.get("name") for mount in mounts):
            if str(name) not in names:
                fix = f"one of {', '.join(names)}" if names else "a volume of that name"
                yield finding("reference", where, f"{subject} {name!r}, and there is no such volume", fix)
        for path, count in Counter(str(mount.get("mountPath")) for mount in mounts).items():
            if count > 1:
                yield finding("reference", where, f"{subject} {count} volumes at {path}", "a path each")
