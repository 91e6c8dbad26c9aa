"""Fields of volumes, claims and storage classes, above all of FSx for Lustre, and how claim and volume meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.cluster.findings import (
    Check,
    Field,
    RuleFinding,
    did_you_mean,
    failures,
    finding,
    holds,
    judge_fields,
    like,
    none_of,
)
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, namespaces_differ, select_kinds
from aliquot.cluster.quantity import GIB, parse_bytes

_DRIVER = "fsx.csi.aws.com"
_ONE_NODE_DRIVERS = ("ebs.csi.aws.com", "ebs.csi.eks.amazonaws.com", "kubernetes.io/aws-ebs")
# The version of a file system that no kernel of Amazon Linux 2023 can mount; FSx makes it by default, except for
# PERSISTENT_2. Sources: FSx for Lustre's guide, "Lustre file system and client kernel compatibility"; CreateFileSystem.
TOO_OLD_LUSTRE = "2.10"
_SMALLEST_BYTES, _MULTIPLE_BYTES = 1200 * GIB, 2400 * GIB
_DESCRIBE = "take it from `aws fsx describe-file-systems`"

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
# The parameters that FSx refuses for a deployment type, and the throughputs per TiB that it sells for one.
_S3 = {"s3ImportPath", "s3ExportPath", "autoImportPolicy"}
_BACKUPS = {"automaticBackupRetentionDays", "copyTagsToBackups", "dailyAutomaticBackupStartTime"}
_NEWEST = {"metadataConfigurationMode", "metadataIops", "efaEnabled"}
_SCRATCH = {"perUnitStorageThroughput", "kmsKeyId", "driveCacheType", *_BACKUPS, *_NEWEST}
_REFUSED = {
    None: _SCRATCH,
    "SCRATCH_1": _SCRATCH,
    "SCRATCH_2": _SCRATCH,
    "PERSISTENT_1": _NEWEST,
    "PERSISTENT_2": _S3,
}
_THROUGHPUTS = {"PERSISTENT_1": ("12", "40", "50", "100", "200"), "PERSISTENT_2": ("125", "250", "500", "1000")}
_NEEDED = {
    "s3ExportPath": "s3ImportPath",
    "autoImportPolicy": "s3ImportPath",
    "metadataIops": "metadataConfigurationMode",
}


def _conflicts(parameters: Any) -> list[str]:
    """Return what FSx refuses in parameters that are valid alone."""
    values = {str(key): str(value) for key, value in mapping(parameters).items() if _PARAMETERS.get(str(key))}
    kind, throughput = values.get("deploymentType"), values.get("perUnitStorageThroughput")
    wrong = {
        f"{kind} with {throughput} MB/s per TiB, of which there are {', '.join(_THROUGHPUTS.get(str(kind), ()))}":
            throughput is not None and throughput not in _THROUGHPUTS.get(str(kind), (throughput,)),
        f"{kind} without perUnitStorageThroughput": throughput is None and kind in _THROUGHPUTS,
        f"HDD with {kind or 'SCRATCH_1'}": values.get("storageType") == "HDD" and kind != "PERSISTENT_1",
    }  # fmt: skip
    return [
        *(f"{key} with {kind or 'SCRATCH_1'}" for key in sorted(_REFUSED.get(kind, set()) & values.keys())),
        *(f"{key} without {other}" for key, other in _NEEDED.items() if key in values and other not in values),
        *(reason for reason, is_wrong in wrong.items() if is_wrong),
    ]


def _lustre_version(parameters: Any) -> object:
    default = "2.12" if dig(parameters, "deploymentType") == "PERSISTENT_2" else TOO_OLD_LUSTRE
    return dig(parameters, "fileSystemTypeVersion") or default


_WRITABLE = "ReadWriteMany, and neither readOnly nor the mount option ro"
_ACCESS = Field("spec/accessModes", "storage-access", holds("ReadWriteMany"), "accessModes: [ReadWriteMany]")
_DELETED = "the file system is deleted together with its claim"
_VOLUME = (
    Field("spec/csi/volumeAttributes/dnsname", "storage-address",
          lambda name: like(r"fs-[0-9a-f]+\.fsx\.[a-z0-9-]+\.amazonaws\.com(\.cn)?")(name or ""), _DESCRIBE),
    Field("spec/csi/volumeAttributes/mountname", "storage-address", lambda name: like("[a-z0-9]{1,16}")(name or ""),
          _DESCRIBE, "{path} is {value}; without its own name the driver mounts `fsx`"),
    Field("spec/csi", "storage-address", lambda csi: not (name := str(dig(csi, "volumeAttributes", "dnsname") or ""))
          or name.startswith(f"{dig(csi, 'volumeHandle')}."), "take both from one file system",
          "dnsname is of another file system than volumeHandle", level="warning"),
    Field("spec/csi/readOnly", "storage-access", none_of(True), _WRITABLE),
    Field("spec/mountOptions", "storage-access", lambda options: "ro" not in listed(options), _WRITABLE),
    Field("spec/mountOptions", "storage-lock", holds("flock"), "mountOptions: [flock]"),
    Field("spec/persistentVolumeReclaimPolicy", "storage-safety", none_of("Delete"), "Retain", _DELETED),
    _ACCESS,
)  # fmt: skip
_STORAGE_CLASS = (
    *(Field(f"parameters/{key}", "storage-subnet", bool, "the nodes' own, of one zone")
      for key in ("subnetId", "securityGroupIds")),
    *(Field(f"parameters/{key}", "storage-parameters", like(pattern), f"text like {pattern}")
      for key, pattern in _PARAMETERS.items()),
    Field("parameters", "storage-parameters", lambda values: mapping(values).keys() <= _PARAMETERS.keys(),
          lambda values: "; ".join(did_you_mean(key, _PARAMETERS, f"leave {key} out")
                                  for key in mapping(values) if key not in _PARAMETERS),
          "the driver ignores a name that it does not know: {value}"),
    Field("parameters", "storage-parameters", lambda values: not _conflicts(values),
          lambda values: f"FSx has no {' and no '.join(_conflicts(values))}", "FSx refuses the parameters {value}"),
    Field("parameters", "storage-parameters", lambda values: _lustre_version(values) != TOO_OLD_LUSTRE,
          'fileSystemTypeVersion: "2.15"',
          f"FSx makes a file system of Lustre {TOO_OLD_LUSTRE}, which Amazon Linux 2023 cannot mount"),
    Field("reclaimPolicy", "storage-safety", none_of("Delete"), "reclaimPolicy: Retain", _DELETED, absent="Delete"),
    Field("mountOptions", "storage-lock", holds("flock"), "mountOptions: [flock]"),
    Field("mountOptions", "storage-access", lambda options: "ro" not in listed(options), _WRITABLE),
)  # fmt: skip
_SHARED = Field(
    "", "storage-access", lambda item: (item.get("provisioner") or dig(item, "spec", "csi", "driver"))
    not in _ONE_NODE_DRIVERS, "FSx for Lustre, or another shared file system", "only one node can mount an EBS volume",
)  # fmt: skip
_SIZE = Field(
    "spec/resources/requests/storage", "storage-size", lambda size: (amount := parse_bytes(size)) is None
    or amount == _SMALLEST_BYTES or not amount % _MULTIPLE_BYTES, "1200Gi, 2400Gi, 4800Gi, ...",
)  # fmt: skip


def check_storage(jobs: Sequence[JobView], manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    volumes, classes = select_kinds(manifests, "PersistentVolume"), select_kinds(manifests, "StorageClass")
    lustre = [
        item for item in (*volumes, *classes) if _DRIVER in (item.get("provisioner"), item.get("spec", "csi", "driver"))
    ]
    for item in lustre:
        yield from judge_fields(_VOLUME if item in volumes else _STORAGE_CLASS, item.get(), item)
    mounted = {dig(volume, "persistentVolumeClaim", "claimName") for job in jobs for volume in job.volumes.values()}
    for claim in select_kinds(manifests, "PersistentVolumeClaim"):
        names = claim.get("spec", "storageClassName"), claim.get("spec", "volumeName")
        sources = [item for item in (*classes, *volumes) if item.name in names]
        is_lustre = any(item in lustre for item in sources)
        if not is_lustre and claim.name not in mounted:
            continue
        yield from judge_fields((_ACCESS, _SIZE) if is_lustre else (_ACCESS,), claim.get(), claim)
        for item in sources:
            yield from _SHARED.judge(item.document, claim)
        yield from _binding(claim, volumes)


def _binding(claim: ManifestObject, volumes: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    name, class_name = claim.get("spec", "volumeName"), claim.get("spec", "storageClassName")
    if name is None:
        return
    volume = next((candidate for candidate in volumes if candidate.name == name), None)
    if volume is None:
        yield finding(
            "storage-binding", claim, f"volumeName {name!r} is not among the manifests", "check it, too", "warning"
        )
        return
    bound = mapping(volume.get("spec", "claimRef"))
    is_other_namespace = namespaces_differ(bound.get("namespace"), claim.get("metadata", "namespace"))
    size, capacity = (
        parse_bytes(item.get("spec", *path, "storage")) or 0
        for item, path in ((claim, ("resources", "requests")), (volume, ("capacity",)))
    )
    is_missing = class_name is None and not volume.get("spec", "storageClassName")
    yield from failures(
        claim,
        Check(
            is_missing or (volume.get("spec", "storageClassName") or "") != (class_name or ""),
            "storage-binding",
            "storageClassName is missing, so the default class"
            if is_missing
            else "storageClassName is not the volume's",
            'storageClassName: "" in both',
        ),
        Check(
            bound and (bound.get("name") != claim.name or is_other_namespace),
            "storage-binding",
            f"the volume is kept for another claim: claimRef {bound.get('namespace', 'default')}/{bound.get('name')}",
            "this claim's name and namespace in the volume's claimRef",
        ),
        Check(
            size > capacity > 0, "storage-binding", "asks for more than the volume's capacity", "the same size in both"
        ),
    )
