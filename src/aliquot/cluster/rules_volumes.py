"""Rules about FSx for Lustre volumes, claims and storage classes, and about the objects to which a job's pods refer.

Pods refer to claims, ConfigMaps, Secrets and a runtime by name. An object that is not among the manifests may exist on
the cluster. A reference to it is reported only if the manifests contain an unused object of the same kind, because then
the name is probably wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.job_view import JobView, containers, pod_patches, runtime_pod
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, namespaces_differ, select_kinds
from aliquot.cluster.quantity import GIB, parse_bytes

_DRIVER = "fsx.csi.aws.com"
_SMALLEST_BYTES, _MULTIPLE_BYTES = 1200 * GIB, 2400 * GIB
# (kind, path of keys to the object's name) for references in a volume and in an environment variable
_IN_VOLUMES = (
    ("PersistentVolumeClaim", ("persistentVolumeClaim", "claimName")),
    ("ConfigMap", ("configMap", "name")),
    ("Secret", ("secret", "secretName")),
)
_IN_VARIABLES = (
    ("ConfigMap", ("valueFrom", "configMapKeyRef", "name")),
    ("Secret", ("valueFrom", "secretKeyRef", "name")),
)


def check_storage(jobs: Sequence[JobView], manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    volumes = select_kinds(manifests, "PersistentVolume")
    lustre_volumes = [volume for volume in volumes if volume.get("spec", "csi", "driver") == _DRIVER]
    for volume in lustre_volumes:
        yield from _volume(volume)
    classes = [item for item in select_kinds(manifests, "StorageClass") if item.get("provisioner") == _DRIVER]
    for storage_class in classes:
        yield from _storage_class(storage_class)
    lustre_names = {volume.name for volume in lustre_volumes}, {storage_class.name for storage_class in classes}
    mounted = {dig(volume, "persistentVolumeClaim", "claimName") for job in jobs for volume in job.volumes}
    for claim in select_kinds(manifests, "PersistentVolumeClaim"):
        names = claim.get("spec", "volumeName"), claim.get("spec", "storageClassName")
        lustre = any(name in known for name, known in zip(names, lustre_names, strict=True))
        if lustre or claim.name in mounted:
            yield from _claim(claim, volumes, lustre)


def _volume(volume: ManifestObject) -> Iterator[RuleFinding]:
    attributes = mapping(volume.get("spec", "csi", "volumeAttributes"))
    identity = str(volume.get("spec", "csi", "volumeHandle") or "")
    for key in ("dnsname", "mountname"):
        if not attributes.get(key):
            fix = "take it from `aws fsx describe-file-systems`"
            yield finding("storage-address", volume, f"spec.csi.volumeAttributes.{key} is missing", fix)
    if (dnsname := attributes.get("dnsname")) and identity and not str(dnsname).startswith(f"{identity}."):
        fix = "take both from one file system"
        yield finding("storage-address", volume, f"dnsname {dnsname} does not belong to {identity}", fix, "warning")
    yield from _access(volume)
    if "flock" not in listed(volume.get("spec", "mountOptions")):
        yield finding("storage-lock", volume, "mountOptions lack flock", "mountOptions: [flock]")


def _storage_class(storage_class: ManifestObject) -> Iterator[RuleFinding]:
    parameters = mapping(storage_class.get("parameters"))
    for key in ("subnetId", "securityGroupIds"):
        if not parameters.get(key):
            fix = "the nodes' own, of one zone"
            yield finding("storage-subnet", storage_class, f"parameters.{key} is missing", fix)
    if "flock" not in listed(storage_class.get("mountOptions")):
        yield finding("storage-lock", storage_class, "mountOptions lack flock", "mountOptions: [flock]")


def _claim(claim: ManifestObject, volumes: Sequence[ManifestObject], lustre: bool) -> Iterator[RuleFinding]:
    yield from _access(claim)
    size = parse_bytes(claim.get("spec", "resources", "requests", "storage"))
    if lustre and size is not None and size != _SMALLEST_BYTES and size % _MULTIPLE_BYTES:
        yield finding("storage-size", claim, f"{size / GIB:g} GiB", "1200Gi, 2400Gi, 4800Gi, ...")
    name = claim.get("spec", "volumeName")
    if name is None:
        return
    volume = next((candidate for candidate in volumes if candidate.name == name), None)
    if volume is None:
        fix = "check it, too"
        yield finding("storage-binding", claim, f"volumeName {name!r} is not among the manifests", fix, "warning")
        return
    if (volume.get("spec", "storageClassName") or "") != (claim.get("spec", "storageClassName") or ""):
        fix = 'storageClassName: "" in both'
        yield finding("storage-binding", claim, "storageClassName differs from the volume's", fix)
    elif claim.get("spec", "storageClassName") is None:
        message = "storageClassName is missing, so the cluster's default class is taken"
        yield finding("storage-binding", claim, message, 'storageClassName: ""')
    bound = mapping(volume.get("spec", "claimRef"))
    differ = namespaces_differ(bound.get("namespace"), claim.get("metadata", "namespace"))
    if bound and (bound.get("name") != claim.name or differ):
        other = f"{bound.get('namespace', 'default')}/{bound.get('name')}"
        fix = "this claim's name and namespace in the volume's claimRef"
        yield finding("storage-binding", claim, f"the volume is kept for another claim: claimRef {other}", fix)
    capacity = parse_bytes(volume.get("spec", "capacity", "storage"))
    if size is not None and capacity is not None and size > capacity:
        yield finding("storage-binding", claim, "asks for more than the volume's capacity", "the same size in both")


def _access(manifest: ManifestObject) -> Iterator[RuleFinding]:
    modes = listed(manifest.get("spec", "accessModes"))
    if "ReadWriteMany" not in modes:
        yield finding("storage-access", manifest, f"accessModes are {modes}", "accessModes: [ReadWriteMany]")


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
        yield _namespaces_differ(job, named[0])
    nearby = [item.name for item in candidates if not item.in_other_namespace(job.manifest)]
    unused = [other for other in nearby if (kind, other) not in used]
    if not named and unused:
        message = f"{kind}/{name} is not among the manifests, and nobody uses {', '.join(unused)}"
        yield finding("reference", job.manifest, message, f"{unused[0]}, or check {name}, too", "warning")


def _runtime(job: JobView) -> Iterator[RuleFinding]:
    runtime = job.runtime
    if runtime is not None and runtime.kind == "TrainingRuntime" and runtime.in_other_namespace(job.manifest):
        yield _namespaces_differ(job, runtime)


def _namespaces_differ(job: JobView, other: ManifestObject) -> RuleFinding:
    message = f"{other.kind}/{other.name} lies in the namespace {other.namespace}, the job in {job.manifest.namespace}"
    return finding("reference", job.manifest, message, "the same metadata.namespace in both")


def _mounts(job: JobView) -> Iterator[RuleFinding]:
    if job.runtime is None:  # a runtime outside the manifests may define the volumes
        return
    volumes = {str(volume.get("name")) for volume in job.volumes}
    pods = [mapping(runtime_pod(job.runtime).get("spec")), *(spec for _, spec in pod_patches(job.manifest))]
    keys = ("initContainers", "containers")
    for container in (item for pod in pods for key in keys for item in containers(pod, key)):
        name, mounts = container.get("name"), [mapping(item) for item in listed(container.get("volumeMounts"))]
        for mount in mounts:
            if str(mount.get("name")) not in volumes:
                message = f"the container {name} mounts {mount.get('name')!r}, and there is no such volume"
                fix = f"one of {', '.join(sorted(volumes))}" if volumes else "a volume of that name"
                yield finding("reference", job.manifest, message, fix)
        for path, count in Counter(str(mount.get("mountPath")) for mount in mounts).items():
            if count > 1:
                message = f"the container {name} mounts {count} volumes at {path}"
                yield finding("reference", job.manifest, message, "a path each")
