"""Write the objects that connect the pods of a job: the claim of the shared file system, and the NetworkPolicy.

The claim takes an existing file system of FSx for Lustre, or makes one through the CSI driver. Formats:
github.com/kubernetes-sigs/aws-fsx-csi-driver, examples of v1.9.0.
"""

from __future__ import annotations

from aliquot.cluster import pod
from aliquot.cluster.job import Job
from aliquot.cluster.manifest_yaml import Document, compact
from aliquot.cluster.node_manifests import labels
from aliquot.cluster.pod import claim_name

_DRIVER = "fsx.csi.aws.com"


def storage(job: Job) -> dict[str, Document]:
    """Return the manifests by file name; none for an existing claim."""
    kind = job.section.storage.kind
    if kind == "claim":
        return {}
    if kind == "fsx-static":
        return {"persistent-volume.yaml": _volume(job), "persistent-volume-claim.yaml": _claim(job)}
    return {"storage-class.yaml": _storage_class(job), "persistent-volume-claim.yaml": _claim(job)}


def _name(job: Job) -> str:
    """Volumes and storage classes have no namespace, so they carry it in their names."""
    return f"{job.section.namespace}-{job.name}-fsx"


def _volume(job: Job) -> Document:
    settings = job.section.storage
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": _name(job), "labels": labels(job)},
        "spec": {
            "capacity": {"storage": f"{settings.size_gib}Gi"},
            "volumeMode": "Filesystem",
            "accessModes": ["ReadWriteMany"],
            "mountOptions": ["flock"],  # the run directory is locked against a second run
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {"namespace": job.section.namespace, "name": claim_name(job)},
            "csi": {
                "driver": _DRIVER,
                "volumeHandle": settings.file_system_id,
                "volumeAttributes": {"dnsname": settings.dnsname, "mountname": settings.mountname},
            },
        },
    }


def _claim(job: Job) -> Document:
    static = job.section.storage.kind == "fsx-static"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim_name(job), "namespace": job.section.namespace, "labels": labels(job)},
        "spec": compact(
            accessModes=["ReadWriteMany"],
            storageClassName="" if static else _name(job),
            resources={"requests": {"storage": f"{job.section.storage.size_gib}Gi"}},
            volumeName=_name(job) if static else None,
        ),
    }


def _storage_class(job: Job) -> Document:
    settings = job.section.storage
    persistent = settings.deployment_type == "PERSISTENT_2"
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": _name(job), "labels": labels(job)},
        "provisioner": _DRIVER,
        "parameters": compact(
            subnetId=settings.subnet_id,
            securityGroupIds=",".join(settings.security_group_ids),
            deploymentType=settings.deployment_type,
            perUnitStorageThroughput=str(settings.throughput_mb_per_tib) if persistent else None,
            fileSystemTypeVersion="2.15",
        ),
        "reclaimPolicy": "Retain",  # deleting the claim must not delete checkpoints
        "volumeBindingMode": "Immediate",
        "mountOptions": ["flock"],
    }


def network_policy(job: Job, any_job: bool = False) -> Document:
    """Restrict incoming connections to the job's pods; outgoing connections (DNS, the hub, S3) are not restricted.

    gloo and NCCL authenticate nobody and choose their ports, so the job's pods reach all ports of each other. The
    Prometheus port is open to every pod and node, because the place of the server is unknown.

    Args:
        any_job: for all jobs of the runtime in this namespace, not only for the job with this name.
    """
    pods = {"podSelector": {"matchLabels": pod.pod_labels(job, any_job)}}
    ingress: list[Document] = [{"from": [pods]}]
    if (port := job.config.observe.prometheus) is not None:
        ingress.append({"ports": [{"protocol": "TCP", "port": port}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": job.name, "namespace": job.section.namespace, "labels": labels(job)},
        "spec": {**pods, "policyTypes": ["Ingress"], "ingress": ingress},
    }
