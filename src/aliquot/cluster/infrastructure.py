"""Write the manifests of a job's nodes (Karpenter's NodePool and EC2NodeClass) and of its shared file system.

The PersistentVolumeClaim uses an existing file system of FSx for Lustre, or creates one through the CSI driver. The
formats are those of the examples in github.com/kubernetes-sigs/aws-fsx-csi-driver v1.9.0.

A Kubernetes Job creates the directories of the run. Only the pod of this Job runs as root, so that the training pods
pass Pod Security `restricted`. Init containers of the training pods wait until the directories exist.
"""

from __future__ import annotations

import hashlib
import json
import re

from aliquot.cluster import pod
from aliquot.cluster.job import GPU, POOL_LABEL, Job
from aliquot.cluster.manifests import Document, compact, literal, to_yaml

_DISCOVERY = "karpenter.sh/discovery"
_GPU_LABELS = {"nvidia.com/gpu.present": "true"}  # NVIDIA's device plugin selects its nodes by this label
# Settings of a gp3 volume that holds offloaded optimizer states. The default throughput of 125 MiB/s is a quarter of
# the rate that the planner assumes. One I/O operation transfers at most 256 KiB, so the throughput needs these IOPS.
_FAST_VOLUME = {"throughput": 1000, "iops": 4000}
# User data of Amazon Linux 2023. Pods inherit containerd's limit of 8 MiB of locked memory, and pods of user 1000 have
# no capability that lifts the limit. The list replaces the image's, so it repeats the limit of open files. nodeadm
# reads numbers as floating point, so "unlimited" (2^64 - 1) would become invalid; 2^62 is exact. Both documents are
# merged with Karpenter's (amazon-eks-ami, nodeadm/doc/examples.md).
_LIMITS = [
    {"type": "RLIMIT_NOFILE", "soft": 65536, "hard": 1 << 20},
    {"type": "RLIMIT_MEMLOCK", "soft": 1 << 62, "hard": 1 << 62},
]
_NODE_CONFIG = {
    "apiVersion": "node.eks.aws/v1alpha1",
    "kind": "NodeConfig",
    "spec": {
        "kubelet": {"config": {"cpuManagerPolicy": "static"}},  # the whole CPUs of a pod belong to the pod alone
        "containerd": {"baseRuntimeSpec": {"process": {"rlimits": _LIMITS}}},
    },
}
_DRIVER = "fsx.csi.aws.com"
_PROGRAM = ["python3", "-P", "-m", "aliquot.cluster.make_directories"]
_WAIT_S = 900  # init containers wait this long, because the Job may need a new node, which pulls the image
_KEEP_S = 86400  # a finished Job is deleted after this time; until then its log can be read


def node_pool(job: Job) -> Document:
    """Write a NodePool with the job's instance types, taint and label, limited to one node more than the job has.

    Karpenter removes nodes only if they are empty or if EC2 reclaims them.
    """
    section = job.section
    allowed = {
        "kubernetes.io/arch": [job.types[0].arch],
        "kubernetes.io/os": ["linux"],
        "karpenter.sh/capacity-type": list(section.capacity),
        # List whole type names, because lists of families and of sizes would also allow other combinations.
        "node.kubernetes.io/instance-type": [node_type.name for node_type in job.types],
        **({} if section.zone is None else {"topology.kubernetes.io/zone": [section.zone]}),
    }
    nodes = section.most_nodes + 1  # a lost node still counts towards the limit while its replacement starts
    limits = {
        "cpu": str(nodes * max(node_type.vcpus for node_type in job.types)),
        "memory": f"{nodes * max(node_type.memory_bytes for node_type in job.types) >> 20}Mi",
        **({GPU: str(nodes * job.types[0].gpus)} if job.gpus else {}),
    }
    spec = {
        "template": {
            "metadata": {"labels": {POOL_LABEL: job.name, **(_GPU_LABELS if job.gpus else {})}},
            "spec": {
                "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": job.name},
                "requirements": [{"key": key, "operator": "In", "values": values} for key, values in allowed.items()],
                "taints": [job.taint],
                "expireAfter": "Never",
            },
        },
        "limits": limits,
        # karpenter.sh/do-not-disrupt on the pods is no alternative: after a spot notice, Karpenter would not evict the
        # pods, so that they would not save a checkpoint.
        "disruption": {
            "consolidationPolicy": "WhenEmpty",
            "consolidateAfter": "10m",
            "budgets": [{"nodes": "0", "reasons": ["Drifted", "Underutilized"]}],
        },
    }
    return job.manifest("karpenter.sh/v1", "NodePool", namespaced=False, spec=spec)


def node_class(job: Job) -> Document:
    section, group = job.section, job.section.placement_group
    discovered = [{"tags": {_DISCOVERY: section.discovery}}]
    bottlerocket = section.ami.startswith("bottlerocket@")
    volume = {
        "volumeSize": f"{section.volume_gib}Gi",
        "volumeType": "gp3",
        **(_FAST_VOLUME if job.scratch_bytes and not job.local_disks else {}),
        "encrypted": True,
        "deleteOnTermination": True,
    }
    spec = compact(
        role=section.node_role,
        # An alias selects the standard or the NVIDIA image by instance type; its pinned version prevents node drift.
        amiSelectorTerms=[{"alias": section.ami}],
        subnetSelectorTerms=discovered,
        securityGroupSelectorTerms=discovered,
        networkInterfaces=_network_interfaces(job),
        capacityReservationSelectorTerms=section.capacity_reservation and [{"id": section.capacity_reservation}],
        placementGroupSelector=group and {"id" if re.fullmatch(r"pg-[0-9a-z]+", group) else "name": group},
        blockDeviceMappings=[{"deviceName": "/dev/xvdb" if bottlerocket else "/dev/xvda", "ebs": volume}],
        instanceStorePolicy="RAID0" if job.local_disks else None,  # combines the local disks for the pods
        metadataOptions={"httpEndpoint": "enabled", "httpPutResponseHopLimit": 1, "httpTokens": "required"},
        userData=section.user_data or (None if bottlerocket else to_yaml(_NODE_CONFIG)),
    )
    return job.manifest("karpenter.k8s.aws/v1", "EC2NodeClass", namespaced=False, spec=spec)


def _network_interfaces(job: Job) -> list[Document]:
    """Return the interfaces of nodes whose network card 0 has no EFA; other nodes get theirs from the pods' requests.

    From requests alone, Karpenter puts EFA on the first cards, which EC2 refuses for such a type.
    """
    if not job.efa_interfaces or job.types[0].first_card_has_efa:
        return []
    kinds = ["interface", *["efa-only"] * job.efa_interfaces]
    return [{"networkCardIndex": card, "deviceIndex": 0, "interfaceType": kind} for card, kind in enumerate(kinds)]


def storage(job: Job) -> dict[str, Document]:
    """Return the manifests of the shared file system by file name; none if the config names an existing claim."""
    kind = job.section.storage.kind
    if kind == "claim":
        return {}
    if kind == "fsx-static":
        return {"persistent-volume.yaml": _volume(job), "persistent-volume-claim.yaml": _claim(job)}
    return {"storage-class.yaml": _storage_class(job), "persistent-volume-claim.yaml": _claim(job)}


def _name(job: Job) -> str:
    """Return a name for volumes and storage classes, with the namespace in it, because they belong to no namespace."""
    return f"{job.section.namespace}-{job.name}-fsx"


def _volume(job: Job) -> Document:
    settings = job.section.storage
    spec = {
        "capacity": {"storage": f"{settings.size_gib}Gi"},
        "volumeMode": "Filesystem",
        "accessModes": ["ReadWriteMany"],
        "mountOptions": ["flock"],  # aliquot locks the run directory against a second run
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "claimRef": {"namespace": job.section.namespace, "name": job.claim_name},
        "csi": {
            "driver": _DRIVER,
            "volumeHandle": settings.file_system_id,
            "volumeAttributes": {"dnsname": settings.dnsname, "mountname": settings.mountname},
        },
    }
    return job.manifest("v1", "PersistentVolume", _name(job), namespaced=False, spec=spec)


def _claim(job: Job) -> Document:
    static = job.section.storage.kind == "fsx-static"
    spec = compact(
        accessModes=["ReadWriteMany"],
        storageClassName="" if static else _name(job),
        resources={"requests": {"storage": f"{job.section.storage.size_gib}Gi"}},
        volumeName=_name(job) if static else None,
    )
    return job.manifest("v1", "PersistentVolumeClaim", job.claim_name, spec=spec)


def _storage_class(job: Job) -> Document:
    settings = job.section.storage
    persistent = settings.deployment_type == "PERSISTENT_2"
    fields: Document = {
        "provisioner": _DRIVER,
        "parameters": compact(
            subnetId=settings.subnet_id,
            securityGroupIds=",".join(settings.security_group_ids),
            deploymentType=settings.deployment_type,
            s3ImportPath=settings.s3_import_path,
            s3ExportPath=settings.s3_export_path,
            perUnitStorageThroughput=str(settings.throughput_mb_per_tib) if persistent else None,
            fileSystemTypeVersion="2.15",
        ),
        "reclaimPolicy": "Retain",  # deleting the claim must not delete checkpoints
        "volumeBindingMode": "Immediate",
        "mountOptions": ["flock"],
    }
    return job.manifest("storage.k8s.io/v1", "StorageClass", _name(job), namespaced=False, **fields)


def directory_job(job: Job, any_run: bool = False) -> Document | None:
    """Write the Job that creates the directories of the run; None for an existing claim, whose owner creates them.

    The spec of a Job is immutable. The name of the Job therefore contains a digest of the spec, so that changed
    manifests create a new Job.

    Args:
        any_run: create directories that runs of other jobs can use, too.
    """
    if job.section.storage.kind == "claim":
        return None
    paths = [literal(path) for path in (job.section.storage.mount_path, *pod.directories(job, any_run))]
    security = {
        "runAsUser": 0,
        "runAsGroup": 0,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        # DAC_OVERRIDE, because parent directories may belong to the trainer's user.
        "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE"]},
    }
    pod_spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        # Any node of the image's architecture can run the Job, including the nodes of the training job.
        "nodeSelector": {"kubernetes.io/arch": job.types[0].arch, "kubernetes.io/os": "linux"},
        "tolerations": pod.tolerations(job),
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(job, ["own", str(pod.USER), *paths], security)],
        "volumes": [pod.shared_volume(job)],
    }
    spec = {
        "backoffLimit": 3,
        "ttlSecondsAfterFinished": _KEEP_S,
        "template": {"metadata": {"labels": job.labels}, "spec": pod_spec},
    }
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:6]
    return job.manifest("batch/v1", "Job", f"{job.name}-dirs-{digest}", spec=spec)


def wait_containers(job: Job, any_run: bool = False) -> list[Document]:
    """Write the init container with which a training pod waits for the directories; none for an existing claim."""
    if job.section.storage.kind == "claim":
        return []
    paths = [literal(path) for path in pod.directories(job, any_run)]
    return [_container(job, ["await", str(_WAIT_S), *paths], pod.container_security())]


def _container(job: Job, arguments: list[str], security: Document) -> Document:
    return {
        "name": "directories",
        "image": job.section.image,
        "imagePullPolicy": job.section.image_pull_policy,
        "command": [*_PROGRAM, *arguments],
        "resources": {name: {"cpu": "250m", "memory": "256Mi"} for name in ("requests", "limits")},
        "volumeMounts": [pod.shared_mount(job)],
        "securityContext": security,
    }
