"""Write the nodes of a job: Karpenter's NodePool and EC2NodeClass."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aliquot.cluster.job import AMX_TAINT, GPU, Job
from aliquot.cluster.manifest_yaml import Document, compact

POOL_LABEL = "aliquot.io/pool"
_DISCOVERY = "karpenter.sh/discovery"
_GPU_LABELS = {"nvidia.com/gpu.present": "true"}  # NVIDIA's device plugin selects its nodes by this label
# For a gp3 volume with optimizer states. The default of 125 MiB/s is a quarter of the rate in the plan; an operation
# has 256 KiB at most.
_FAST_VOLUME = {"throughput": 1000, "iops": 4000}


def taint(job: Job) -> Document:
    """Return the taint that keeps all other pods away from these nodes."""
    key = GPU if job.gpu_nodes else AMX_TAINT if job.types[0].amx else POOL_LABEL
    return {"key": key, "value": "present", "effect": "NoSchedule"}


def node_pool(job: Job) -> Document:
    """Write a NodePool of the job's types, with taint, label, and a limit of one node more than the job has.

    Nodes stay until they are empty or reclaimed.
    """
    section = job.section
    requirements = [
        _one_of("kubernetes.io/arch", [job.types[0].arch]),
        _one_of("kubernetes.io/os", ["linux"]),
        _one_of("karpenter.sh/capacity-type", section.capacity),
        # Whole type names: lists of families and sizes would also allow other combinations.
        _one_of("node.kubernetes.io/instance-type", [node_type.name for node_type in job.types]),
    ]
    if section.zone is not None:
        requirements.append(_one_of("topology.kubernetes.io/zone", [section.zone]))
    nodes = section.most_nodes + 1  # a lost node still counts while its successor starts
    limits = {
        "cpu": str(nodes * max(node_type.vcpus for node_type in job.types)),
        "memory": f"{nodes * max(node_type.memory_bytes for node_type in job.types) >> 20}Mi",
    }
    if job.gpu_nodes:
        limits[GPU] = str(nodes * job.types[0].gpus)
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": job.name, "labels": labels(job)},
        "spec": {
            "template": {
                "metadata": {"labels": {POOL_LABEL: job.name, **(_GPU_LABELS if job.gpu_nodes else {})}},
                "spec": {
                    "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": job.name},
                    "requirements": requirements,
                    "taints": [taint(job)],
                    "expireAfter": "Never",
                },
            },
            "limits": limits,
            # karpenter.sh/do-not-disrupt on the pods is no alternative: it would withhold spot notices from them.
            "disruption": {
                "consolidationPolicy": "WhenEmpty",
                "consolidateAfter": "10m",
                "budgets": [{"nodes": "0", "reasons": ["Drifted", "Underutilized"]}],
            },
        },
    }


def node_class(job: Job) -> Document:
    section = job.section
    discovered = [{"tags": {_DISCOVERY: section.discovery}}]
    bottlerocket = section.ami.startswith("bottlerocket@")
    return {
        "apiVersion": "karpenter.k8s.aws/v1",
        "kind": "EC2NodeClass",
        "metadata": {"name": job.name, "labels": labels(job)},
        "spec": compact(
            role=section.node_role,
            # An alias selects the standard or the NVIDIA image by type; a pinned version does not change in a run.
            amiSelectorTerms=[{"alias": section.ami}],
            subnetSelectorTerms=discovered,
            securityGroupSelectorTerms=discovered,
            placementGroupSelector=_placement_group(section.placement_group),
            blockDeviceMappings=[
                {
                    "deviceName": "/dev/xvdb" if bottlerocket else "/dev/xvda",
                    "ebs": {
                        "volumeSize": f"{section.volume_gib}Gi",
                        "volumeType": "gp3",
                        **(_FAST_VOLUME if job.scratch_bytes and not job.local_disks else {}),
                        "encrypted": True,
                        "deleteOnTermination": True,
                    },
                }
            ],
            instanceStorePolicy="RAID0" if job.local_disks else None,  # pods see the local disks as one
            metadataOptions={"httpEndpoint": "enabled", "httpPutResponseHopLimit": 1, "httpTokens": "required"},
            userData=section.user_data,
        ),
    }


def _placement_group(group: str | None) -> Document | None:
    if group is None:
        return None
    return {"id" if re.fullmatch(r"pg-[0-9a-z]+", group) else "name": group}


def labels(job: Job) -> dict[str, str]:
    return {"app.kubernetes.io/name": job.name, "app.kubernetes.io/managed-by": "aliquot"}


def _one_of(key: str, values: Sequence[str]) -> Document:
    return {"key": key, "operator": "In", "values": list(values)}
