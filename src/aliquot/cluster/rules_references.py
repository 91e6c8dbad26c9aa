"""Rules about what a job's pods name: volumes, claims, ConfigMaps, Secrets, a runtime in their namespace.

What is not among the manifests may be on the cluster already: it is a finding only where one of that kind is here that
nobody uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.job_view import JobView, containers, pod_patches, runtime_pod
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, of_kind

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
    volumes = {str(volume.get("name")): volume for volume in job.volumes}  # a patch's counts, not the runtime's
    for items, places in ((list(volumes.values()), _IN_VOLUMES), (job.env, _IN_VARIABLES)):
        for item in items:
            for kind, path in places:
                if isinstance(name := dig(item, *path), str):
                    yield kind, name


def _reference(
    job: JobView, kind: str, name: str, used: set[tuple[str, str]], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    given = of_kind(manifests, kind)
    named = [each for each in given if each.name == name]
    if named and all(each.apart_from(job.manifest) for each in named):
        yield finding(
            "reference", job.manifest,
            f"{kind}/{name} lies in the namespace {named[0].namespace}, the job in {job.manifest.namespace}",
            "the same metadata.namespace in both",
        )  # fmt: skip
    unused = [each.name for each in given if (kind, each.name) not in used and not each.apart_from(job.manifest)]
    if not named and unused:
        yield finding(
            "reference", job.manifest, f"{kind}/{name} is not among the manifests, and nobody uses {', '.join(unused)}",
            f"{unused[0]}, or check {name}, too", "warning",
        )  # fmt: skip


def _runtime(job: JobView) -> Iterator[RuleFinding]:
    if job.runtime is not None and job.runtime.kind == "TrainingRuntime" and job.runtime.apart_from(job.manifest):
        yield finding(
            "reference", job.manifest,
            f"TrainingRuntime/{job.runtime.name} lies in the namespace {job.runtime.namespace}, the job in"
            f" {job.manifest.namespace}", "the same metadata.namespace in both",
        )  # fmt: skip


def _mounts(job: JobView) -> Iterator[RuleFinding]:
    if job.runtime is None:  # which may have the volumes
        return
    volumes = {str(volume.get("name")) for volume in job.volumes}
    pods = [mapping(runtime_pod(job.runtime).get("spec")), *(spec for _, spec in pod_patches(job.manifest))]
    keys = ("initContainers", "containers")
    for container in (each for pod in pods for key in keys for each in containers(pod, key)):
        mounts = [mapping(each) for each in listed(container.get("volumeMounts"))]
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
