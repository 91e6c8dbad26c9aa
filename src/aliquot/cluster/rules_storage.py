"""Rules about volumes, claims and storage classes of FSx for Lustre."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.job_view import job_views
from aliquot.cluster.manifests import ManifestObject, listed, mapping, select_kinds
from aliquot.cluster.quantity import GIB, parse_bytes

_DRIVER = "fsx.csi.aws.com"
_SMALLEST_BYTES, _MULTIPLE_BYTES = 1200 * GIB, 2400 * GIB


def check_storage(manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    volumes = select_kinds(manifests, "PersistentVolume")
    claims = select_kinds(manifests, "PersistentVolumeClaim")
    for volume in volumes:
        if volume.get("spec", "csi", "driver") == _DRIVER:
            yield from _volume(volume)
    for storage_class in select_kinds(manifests, "StorageClass"):
        if storage_class.get("provisioner") == _DRIVER:
            yield from _storage_class(storage_class)
    classes = {item.name for item in select_kinds(manifests, "StorageClass") if item.get("provisioner") == _DRIVER}
    mounted = {mapping(volume.get("persistentVolumeClaim")).get("claimName")
               for job in job_views(list(manifests)) for volume in job.volumes}  # fmt: skip
    for claim in claims:
        bound = next((item for item in volumes if item.name == claim.get("spec", "volumeName")), None)
        lustre = claim.get("spec", "storageClassName") in classes
        lustre |= bound is not None and bound.get("spec", "csi", "driver") == _DRIVER
        if lustre or claim.name in mounted:
            yield from _claim(claim, volumes, lustre)


def _volume(volume: ManifestObject) -> Iterator[RuleFinding]:
    attributes = mapping(volume.get("spec", "csi", "volumeAttributes"))
    identity = str(volume.get("spec", "csi", "volumeHandle") or "")
    for key in ("dnsname", "mountname"):
        if not attributes.get(key):
            yield finding(
                "storage-address", volume, f"spec.csi.volumeAttributes.{key} is missing",
                "take it from `aws fsx describe-file-systems`",
            )  # fmt: skip
    if (dnsname := attributes.get("dnsname")) and identity and not str(dnsname).startswith(f"{identity}."):
        yield finding(
            "storage-address", volume, f"dnsname {dnsname} does not belong to {identity}",
            "take both from one file system", "warning",
        )  # fmt: skip
    yield from _access(volume)
    if "flock" not in listed(volume.get("spec", "mountOptions")):
        yield finding("storage-lock", volume, "mountOptions lack flock", "mountOptions: [flock]")


def _storage_class(storage_class: ManifestObject) -> Iterator[RuleFinding]:
    parameters = mapping(storage_class.get("parameters"))
    for key in ("subnetId", "securityGroupIds"):
        if not parameters.get(key):
            yield finding(
                "storage-address", storage_class, f"parameters.{key} is missing", "the nodes' own, of one zone"
            )
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
        yield finding(
            "storage-binding", claim, f"volumeName {name!r} is not among the manifests", "check it, too", "warning"
        )
        return
    if (volume.get("spec", "storageClassName") or "") != (claim.get("spec", "storageClassName") or ""):
        yield finding(
            "storage-binding", claim, "storageClassName differs from the volume's", 'storageClassName: "" in both'
        )
    elif claim.get("spec", "storageClassName") is None:
        yield finding(
            "storage-binding", claim, "storageClassName is missing, so the cluster's default class is taken",
            'storageClassName: ""',
        )  # fmt: skip
    bound = mapping(volume.get("spec", "claimRef"))
    spaces = [bound.get("namespace"), claim.get("metadata", "namespace")]
    differ = all(isinstance(space, str) for space in spaces) and spaces[0] != spaces[1]
    if bound and (bound.get("name") != claim.name or differ):
        yield finding(
            "storage-binding", claim,
            f"the volume is kept for another claim: claimRef {bound.get('namespace', 'default')}/{bound.get('name')}",
            "this claim's name and namespace in the volume's claimRef",
        )  # fmt: skip
    capacity = parse_bytes(volume.get("spec", "capacity", "storage"))
    if size is not None and capacity is not None and size > capacity:
        yield finding("storage-binding", claim, "asks for more than the volume's capacity", "the same size in both")


def _access(manifest: ManifestObject) -> Iterator[RuleFinding]:
    modes = listed(manifest.get("spec", "accessModes"))
    if "ReadWriteMany" not in modes:
        yield finding("storage-access", manifest, f"accessModes are {modes}", "accessModes: [ReadWriteMany]")
