"""Rules about the objects to which the pods of a job refer by name: claims, Secrets, queues, a runtime, a namespace.

An object that is not among the manifests may exist on the cluster. A reference to it is reported only if the manifests
contain an unused object of the same kind, because then the name is probably wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from aliquot.cluster.findings import Check, RuleFinding, did_you_mean, failures, values
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
    ("PriorityClass", "priorityClassName"),
    ("ServiceAccount", "serviceAccountName"),
)
_DEFAULT_NAMESPACE = ("Namespace", "default")  # exists on every cluster


def check_pods_references(jobs: Sequence[JobView], manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    used = {reference for job in jobs for reference in references(job)}
    used |= {("Namespace", item.namespace) for item in manifests}
    for job in jobs:
        if job.runtime is not None:  # a runtime outside the manifests may define the volumes
            yield from _mounts(job)
        yield from _keys(job, manifests)
        for kind, name in dict.fromkeys(references(job)):
            yield from _reference(job, kind, name, used, manifests)


def references(job: JobView) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of each object that the job and its pods need."""
    references = [(kind, value) for kind, path in _REFERENCES for _, value in values(job.pod, path.split("/"))]
    references += [("LocalQueue", job.queue), ("Namespace", job.manifest.get("metadata", "namespace"))]
    references += [(item.kind, item.name) for item in [job.runtime] if item and item.kind == "TrainingRuntime"]
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
                yield from failures(
                    job.manifest,
                    Check(
                        str(key) not in known,
                        "reference",
                        f"env {variable.get('name')} takes {key!r} of {kind}/{name}, which has {', '.join(known)}",
                        did_you_mean(key, known, "a key that it has", 0.0),
                    ),
                )


def _reference(
    job: JobView, kind: str, name: str, used: set[tuple[str, str]], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    candidates = select_kinds(manifests, kind)
    named = [item for item in candidates if item.name == name]
    nearby = [item.name for item in candidates if not item.in_other_namespace(job.manifest)]
    unused = [other for other in nearby if (kind, other) not in used]
    return failures(
        job.manifest,
        Check(
            named and all(item.in_other_namespace(job.manifest) for item in named),
            "reference",
            f"{kind}/{name} lies in the namespace {named and named[0].namespace}, the job in {job.manifest.namespace}",
            "the same metadata.namespace in both",
        ),
        Check(
            not named and unused,
            "reference",
            f"{kind}/{name} is not among the manifests, and nobody uses {', '.join(unused)}",
            f"{''.join(unused[:1])}, or check {name}, too",
            "warning",
        ),
    )


def _mounts(job: JobView) -> Iterator[RuleFinding]:
    """Check that the containers of a pod mount only its volumes, and a single volume at each path."""
    for container in (item for key in ("initContainers", "containers") for item in mappings(job.pod, key)):
        subject, mounts = f"the container {container.get('name')} mounts", mappings(container, "volumeMounts")
        counts = Counter(str(mount.get("mountPath")) for mount in mounts)
        yield from failures(
            job.manifest,
            *(
                Check(
                    str(name) not in job.volumes,
                    "reference",
                    f"{subject} {name!r}, and there is no such volume",
                    f"one of {', '.join(sorted(job.volumes))}" if job.volumes else "a volume of that name",
                )
                for name in (mount.get("name") for mount in mounts)
            ),
            *(
                Check(count > 1, "reference", f"{subject} {count} volumes at {path}", "a path each")
                for path, count in counts.items()
            ),
        )
