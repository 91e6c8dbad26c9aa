"""Rules about the references of a job's pods: volumes, claims, ConfigMaps, Secrets and the runtime.

An object that is not among the manifests may exist on the cluster. It is a finding only if an object of its kind among
the manifests is unused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.job_view import JobView, containers, pod_patches, runtime_pod
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, select_kinds

# (kind, path to its name) in a volume and in a variable
_IN_VOLUMES = (
    ("PersistentVolumeClaim", ("persistentVolumeClaim", "claimName")),
    ("ConfigMap", ("configMap", "name")),
    ("Secret", ("secret", "secretName")),
)
_IN_VARIABLES = (
    ("ConfigMap", ("valueFrom", "configMapKeyRef", "name")),
    ("Secret", ("valueFrom", "secretKeyRef", "name")),
)


def check_pods_references(jobs: Sequence[JobView], manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    used = {reference for job in jobs for reference in _references(job)}
    for job in jobs:
        yield from _mounts(job)
        yield from _runtime(job)
        for kind, name in dict.fromkeys(_references(job)):
            yield from _reference(job, kind, name, used, manifests)


def _references(job: JobView) -> Iterator[tuple[str, str]]:
    volumes = {str(volume.get("name")): volume for volume in job.volumes}  # a patch overrides the runtime
    for items, places in ((list(volumes.values()), _IN_VOLUMES), (job.env, _IN_VARIABLES)):
        for item in items:
            for kind, path in places:
                if isinstance(name := dig(item, *path), str):
                    yield kind, name


def _reference(
    job: JobView, kind: str, name: str, used: set[tuple[str, str]], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    candidates = select_kinds(manifests, kind)
    named = [item for item in candidates if item.name == name]
    if named and all(item.in_other_namespace(job.manifest) for item in named):
        yield finding(
            "reference", job.manifest,
            f"{kind}/{name} lies in the namespace {named[0].namespace}, the job in {job.manifest.namespace}",
            "the same metadata.namespace in both",
        )  # fmt: skip
    unused = [
        item.name for item in candidates if (kind, item.name) not in used and not item.in_other_namespace(job.manifest)
    ]
    if not named and unused:
        yield finding(
            "reference", job.manifest, f"{kind}/{name} is not among the manifests, and nobody uses {', '.join(unused)}",
            f"{unused[0]}, or check {name}, too", "warning",
        )  # fmt: skip


def _runtime(job: JobView) -> Iterator[RuleFinding]:
    if (
        job.runtime is not None
        and job.runtime.kind == "TrainingRuntime"
        and job.runtime.in_other_namespace(job.manifest)
    ):
        yield finding(
            "reference", job.manifest,
            f"TrainingRuntime/{job.runtime.name} lies in the namespace {job.runtime.namespace}, the job in"
            f" {job.manifest.namespace}", "the same metadata.namespace in both",
        )  # fmt: skip


def _mounts(job: JobView) -> Iterator[RuleFinding]:
    if job.runtime is None:  # an unknown runtime may have the volumes
        return
    volumes = {str(volume.get("name")) for volume in job.volumes}
    pods = [mapping(runtime_pod(job.runtime).get("spec")), *(spec for _, spec in pod_patches(job.manifest))]
    keys = ("initContainers", "containers")
    for container in (item for pod in pods for key in keys for item in containers(pod, key)):
        mounts = [mapping(item) for item in listed(container.get("volumeMounts"))]
        for mount in mounts:
            if str(mount.get("name")) not in volumes:
                yield finding(
                    "reference", job.manifest,
                    f"the container {container.get('name')} mounts {mount.get('name')!r}, and there is no such volume",
                    f"one of {', '.join(sorted(volumes))}" if volumes else "a volume of that name",
                )  # fmt: skip
        for path, count in Counter(str(mount.get("mountPath")) for mount in mounts).items():
            if count > 1:
                yield finding(
                    "reference", job.manifest,
                    f"the container {container.get('name')} mounts {count} volumes at {path}", "a path each",
                )  # fmt: skip
