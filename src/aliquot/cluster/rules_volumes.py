"""Rules about the file system of a job: volumes, claims and storage classes, above all of FSx for Lustre."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from aliquot.cluster.findings import Check, RuleFinding, did_you_mean, failures, finding
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, namespaces_differ, select_kinds
from aliquot.cluster.quantity import GIB, parse_bytes

_DRIVER = "fsx.csi.aws.com"
_ONE_NODE_DRIVERS = ("ebs.csi.aws.com", "ebs.csi.eks.amazonaws.com", "kubernetes.io/aws-ebs")
# The version of a file system that no kernel of Amazon Linux 2023 can mount; FSx makes it by default, except for
# PERSISTENT_2. Sources: FSx for Lustre's guide, "Lustre file system and client kernel compatibility"; CreateFileSystem.
TOO_OLD_LUSTRE = "2.10"
_SMALLEST_BYTES, _MULTIPLE_BYTES = 1200 * GIB, 2400 * GIB
# The attributes of a volume by which the driver mounts it: pattern, and the effect if the attribute is missing.
_ATTRIBUTES = {
    "dnsname": (r"fs-[0-9a-f]+\.fsx\.[a-z0-9-]+\.amazonaws\.com(\.cn)?", "the driver has no address to mount"),
    "mountname": (r"[a-z0-9]{1,16}", "the driver mounts `fsx`, which is another name on most file systems"),
}
# The parameters of a storage class that the driver passes to FSx, with their values. Sources: aws-fsx-csi-driver,
# pkg/driver/controller.go, and FSx's API reference, CreateFileSystemLustreConfiguration.
_BOOLEAN, _NUMBER, _ANY = "true|false", "[0-9]+", ".*"
_PARAMETERS = {
    "subnetId": "subnet-[0-9a-f]+", "securityGroupIds": "sg-[0-9a-f]+(,sg-[0-9a-f]+)*",
    "deploymentType": "SCRATCH_1|SCRATCH_2|PERSISTENT_1|PERSISTENT_2", "storageType": "SSD|HDD|INTELLIGENT_TIERING",
    "perUnitStorageThroughput": "12|40|50|100|125|200|250|500|1000", "fileSystemTypeVersion": r"2\.1[025]",
    "dataCompressionType": "NONE|LZ4", "driveCacheType": "NONE|READ", "s3ImportPath": "s3://.+",
    "s3ExportPath": "s3://.+", "autoImportPolicy": "NONE|NEW|NEW_CHANGED|NEW_CHANGED_DELETED",
    "metadataConfigurationMode": "AUTOMATIC|USER_PROVISIONED", "metadataIops": _NUMBER, "efaEnabled": _BOOLEAN,
    "copyTagsToBackups": _BOOLEAN, "automaticBackupRetentionDays": _NUMBER, "dailyAutomaticBackupStartTime": _ANY,
    "weeklyMaintenanceStartTime": _ANY, "kmsKeyId": _ANY, "extraTags": _ANY,
}  # fmt: skip


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
            yield from _driver(claim, manifests)


def _volume(volume: ManifestObject) -> Iterator[RuleFinding]:
    attributes = mapping(volume.get("spec", "csi", "volumeAttributes"))
    identity, dnsname = str(volume.get("spec", "csi", "volumeHandle") or ""), attributes.get("dnsname")
    fix = "take it from `aws fsx describe-file-systems`"
    for key, (pattern, effect) in _ATTRIBUTES.items():
        value = attributes.get(key)
        missing = f"spec.csi.volumeAttributes.{key} is missing, so {effect}"
        wrong = f"{key} {value} is not that of a file system of FSx"
        is_right = value and re.fullmatch(pattern, str(value))
        yield from failures(volume, Check(not is_right, "storage-address", wrong if value else missing, fix))
    yield from failures(
        volume,
        Check(
            dnsname and identity and not str(dnsname).startswith(f"{identity}."),
            "storage-address",
            f"dnsname {dnsname} is of another file system than volumeHandle {identity}",
            "take both from one file system",
            "warning",
        ),
    )
    yield from _access(volume)
    policy = volume.get("spec", "persistentVolumeReclaimPolicy") or "Retain"
    yield from _lasting(volume, policy, volume.get("spec", "mountOptions"))


def _storage_class(storage_class: ManifestObject) -> Iterator[RuleFinding]:
    parameters = mapping(storage_class.get("parameters"))
    for key in ("subnetId", "securityGroupIds"):
        if not parameters.get(key):
            message = f"parameters.{key} is missing"
            yield finding("storage-subnet", storage_class, message, "the nodes' own, of one zone")
    for key, value in parameters.items():
        pattern = _PARAMETERS.get(str(key))
        if pattern is None:
            fix = did_you_mean(key, _PARAMETERS, "leave it out")
            yield finding("storage-parameters", storage_class, f"the driver does not know parameters.{key}", fix)
        elif not re.fullmatch(pattern, str(value)):
            yield finding("storage-parameters", storage_class, f"parameters.{key} is {value!r}", f"text like {pattern}")
    default = "2.12" if parameters.get("deploymentType") == "PERSISTENT_2" else TOO_OLD_LUSTRE
    if parameters.get("fileSystemTypeVersion", default) == TOO_OLD_LUSTRE:
        message = f"FSx makes a file system of Lustre {TOO_OLD_LUSTRE}, which Amazon Linux 2023 cannot mount"
        yield finding("storage-parameters", storage_class, message, 'fileSystemTypeVersion: "2.15"')
    policy = storage_class.get("reclaimPolicy") or "Delete"
    yield from _lasting(storage_class, policy, storage_class.get("mountOptions"))


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
        message = f"volumeName {name!r} is not among the manifests"
        yield finding("storage-binding", claim, message, "check it, too", "warning")
        return
    class_name, bound = claim.get("spec", "storageClassName"), mapping(volume.get("spec", "claimRef"))
    is_other_class = (volume.get("spec", "storageClassName") or "") != (class_name or "")
    is_other_namespace = namespaces_differ(bound.get("namespace"), claim.get("metadata", "namespace"))
    capacity = parse_bytes(volume.get("spec", "capacity", "storage"))
    yield from failures(
        claim,
        Check(
            is_other_class,
            "storage-binding",
            "storageClassName differs from the volume's",
            'storageClassName: "" in both',
        ),
        Check(
            class_name is None and not is_other_class,
            "storage-binding",
            "storageClassName is missing, so the cluster's default class is taken",
            'storageClassName: ""',
        ),
        Check(
            bound and (bound.get("name") != claim.name or is_other_namespace),
            "storage-binding",
            f"the volume is kept for another claim: claimRef {bound.get('namespace', 'default')}/{bound.get('name')}",
            "this claim's name and namespace in the volume's claimRef",
        ),
        Check(
            size is not None and capacity is not None and size > capacity,
            "storage-binding",
            "asks for more than the volume's capacity",
            "the same size in both",
        ),
    )


def _lasting(manifest: ManifestObject, reclaim_policy: object, mount_options: object) -> Iterator[RuleFinding]:
    """Check the settings that a volume and the storage class of a volume share."""
    yield from failures(
        manifest,
        Check(
            reclaim_policy == "Delete",
            "storage-safety",
            "the file system is deleted together with its claim",
            "reclaimPolicy: Retain; persistentVolumeReclaimPolicy in a PersistentVolume",
        ),
        Check("flock" not in listed(mount_options), "storage-lock", "mountOptions lack flock", "mountOptions: [flock]"),
    )


def _driver(claim: ManifestObject, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Check that the class or the volume of a claim belongs to a driver whose volumes several nodes can mount."""
    objects = [*select_kinds(manifests, "StorageClass"), *select_kinds(manifests, "PersistentVolume")]
    names = claim.get("spec", "storageClassName"), claim.get("spec", "volumeName")
    for item in (item for item in objects if item.name in names):
        if (driver := item.get("provisioner") or item.get("spec", "csi", "driver")) in _ONE_NODE_DRIVERS:
            message = f"{item.kind}/{item.name} is of {driver}, whose volumes only one node can mount"
            yield finding("storage-access", claim, message, "FSx for Lustre, or another shared file system")


def _access(manifest: ManifestObject) -> Iterator[RuleFinding]:
    modes = listed(manifest.get("spec", "accessModes"))
    if "ReadWriteMany" not in modes:
        yield finding("storage-access", manifest, f"accessModes are {modes}", "accessModes: [ReadWriteMany]")
