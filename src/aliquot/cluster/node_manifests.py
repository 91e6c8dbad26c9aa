"""The nodes of a job: Karpenter's NodePool and EC2NodeClass."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aliquot.cluster.job import AMX_TAINT, GPU, Job
from aliquot.cluster.manifest_yaml import Document, compact

POOL_LABEL = "aliquot.io/pool"
_DISCOVERY = "karpenter.sh/discovery"
# Of a gp3 volume with states of the run on it. Without, it has 125 MiB/s, a quarter of what the plan reckons with; an
# operation is of 256 KiB at most.
_OF_GPUS = {"nvidia.com/gpu.present": "true"}  # by which NVIDIA's device plugin finds its nodes
_FAST = {"throughput": 1000, "iops": 4000}


def taint(job: Job) -> Document:
    """Keeps all pods away that were not made for these nodes."""
    key = GPU if job.gpu_nodes else AMX_TAINT if job.types[0].amx else POOL_LABEL
    return {"key": key, "value": "present", "effect": "NoSchedule"}


def node_pool(job: Job) -> Document:
    """Only these types, tainted and labelled, one more than the job has at most; nodes live until they are empty, or
    taken back."""
    section = job.section
    requirements = [
        _one_of("kubernetes.io/arch", [job.types[0].arch]),
        _one_of("kubernetes.io/os", ["linux"]),
        _one_of("karpenter.sh/capacity-type", section.capacity),
        # By whole type: family and size as two lists would also allow the pairs that nobody chose.
        _one_of("node.kubernetes.io/instance-type", [each.name for each in job.types]),
    ]
    if section.zone is not None:
        requirements.append(_one_of("topology.kubernetes.io/zone", [section.zone]))
    nodes = section.most_nodes + 1  # a lost node's successor need not wait until the lost one is gone from the books
    limits = {
        "cpu": str(nodes * max(each.vcpus for each in job.types)),
        "memory": f"{nodes * max(each.memory_bytes for each in job.types) >> 20}Mi",
    }
    if job.gpu_nodes:
        limits[GPU] = str(nodes * job.types[0].gpus)
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": job.name, "labels": labels(job)},
        "spec": {
            "template": {
                "metadata": {"labels": {POOL_LABEL: job.name, **(_OF_GPUS if job.gpu_nodes else {})}},
                "spec": {
                    "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": job.name},
                    "requirements": requirements,
                    "taints": [taint(job)],
                    "expireAfter": "Never",
                },
            },
            "limits": limits,
            # Not by karpenter.sh/do-not-disrupt on the pods: it would not pass a spot notice on to them.
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
            # An alias picks the standard or the NVIDIA image by the type; a version does not drift under a run.
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
                        **(_FAST if job.scratch_bytes and not job.local_disks else {}),
                        "encrypted": True,
                        "deleteOnTermination": True,
                    },
                }
            ],
            instanceStorePolicy="RAID0" if job.local_disks else None,  # pods have the local disks then, as one
            metadataOptions={"httpEndpoint": "enabled", "httpPutResponseHopLimit": 1, "httpTokens": "required"},
            userData=section.user_data,
        ),
    }


def _placement_group(given: str | None) -> Document | None:
    if given is None:
        return None
    return {"id" if re.fullmatch(r"pg-[0-9a-z]+", given) else "name": given}


def labels(job: Job) -> dict[str, str]:
    return {"app.kubernetes.io/name": job.name, "app.kubernetes.io/managed-by": "aliquot"}


def _one_of(key: str, values: Sequence[str]) -> Document:
    return {"key": key, "operator": "In", "values": list(values)}
