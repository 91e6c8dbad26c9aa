"""Mistakes of people who write their own manifests for EKS: what `cluster check DIR` says of each, without a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import yaml

from aliquot.cluster.check import check_manifests
from aliquot.cluster.job import Job
from aliquot.cluster.render import documents
from tests.cluster.cases import cpu_job, dynamic_storage, gpu_job
from tests.cluster.edits import (
    TYPE,
    Documents,
    both,
    job_set,
    manifests_of,
    node_class,
    pod,
    pool,
    requirement,
    rules,
    runtime_pod,
    trainer,
)  # fmt: skip

ZONE = "topology.kubernetes.io/zone"


def dynamic_job() -> Job:
    return cpu_job(storage=dynamic_storage())


def training_job() -> Job:
    return cpu_job(namespace="training")


def old_job() -> Job:
    return cpu_job(trainer="2.1")


def add(found: Documents, api: str, kind: str, name: str, namespace: str | None = "default", **fields: Any) -> None:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    found[f"{kind}.yaml"] = {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def set_variable(found: Documents, name: str, value: str) -> None:
    trainer(found)["env"] = [each for each in trainer(found)["env"] if each["name"] != name]
    trainer(found)["env"].append({"name": name, "value": value})


def change_config(found: Documents, section: str, **values: Any) -> None:
    config = yaml.safe_load(found["config-map.yaml"]["data"]["config.yaml"])
    config[section].update(values)
    found["config-map.yaml"]["data"]["config.yaml"] = yaml.safe_dump(config)


def add_pool(found: Documents, type_: str) -> None:
    found["other.yaml"] = copy.deepcopy(found["node-pool.yaml"])
    found["other.yaml"]["metadata"]["name"] = "other"
    requirement({"node-pool.yaml": found["other.yaml"]}, TYPE).update(values=[type_])


def add_queue(found: Documents, name: str, namespace: str = "default") -> None:
    found["train-job.yaml"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    add(found, "kueue.x-k8s.io/v1beta2", "LocalQueue", name, namespace, spec={"clusterQueue": "all"})


def mount(found: Documents, name: str) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = pod(found)["containers"][0]["volumeMounts"]
    return next(each for each in mounts if each["name"] == name)


def runtime(found: Documents) -> dict[str, Any]:
    return found["training-runtime.yaml"]["spec"]


def replicated(found: Documents) -> dict[str, Any]:
    return job_set(found)["replicatedJobs"][0]


def parameters(found: Documents, **values: Any) -> None:
    found["storage-class.yaml"]["parameters"].update(values)


def attributes(found: Documents, **values: Any) -> None:
    found["persistent-volume.yaml"]["spec"]["csi"]["volumeAttributes"].update(values)


def disk(found: Documents) -> dict[str, Any]:
    return node_class(found)["blockDeviceMappings"][0]


# What a person did, of which job, and the rule that says so. None: nothing says so, as docs/guides/eks-jobs.md admits.
SITUATIONS: dict[str, tuple[str | None, Callable[[], Job], Callable[[Documents], Any]]] = {
    # nodes
    "a NodePool of the beta API": ("unknown-kind", cpu_job, lambda d: d["node-pool.yaml"].update(
        apiVersion="karpenter.sh/v1beta1")),
    "Windows nodes": ("no-type-left", cpu_job, lambda d: requirement(d, "kubernetes.io/os").update(values=["windows"])),
    "more families than the types have": ("no-type-left", cpu_job, lambda d: pool(d)["template"]["spec"][
        "requirements"].append({"key": "karpenter.k8s.aws/instance-family", "operator": "Exists", "minValues": 3})),
    "empty nodes that stay": ("idle-nodes", cpu_job, lambda d: pool(d)["disruption"].update(consolidateAfter="Never")),
    "Amazon Linux 2": ("node-image-eks", cpu_job, lambda d: node_class(d).update(
        amiSelectorTerms=[{"alias": "al2@v20260903"}])),
    "the root device of another image": ("volume-size", cpu_job, lambda d: disk(d).update(deviceName="/dev/sda1")),
    "a disk without a unit": ("malformed", cpu_job, lambda d: disk(d)["ebs"].update(volumeSize=100)),
    "a role by its ARN": ("node-role", cpu_job, lambda d: node_class(d).update(
        role="arn:aws:iam::123456789012:role/KarpenterNodeRole-training")),
    "a kubelet that keeps a quarter": ("request-too-large", cpu_job, lambda d: node_class(d).update(
        kubelet={"kubeReserved": {"memory": "64Gi"}})),
    "no security group": ("missing-field", cpu_job, lambda d: node_class(d).pop("securityGroupSelectorTerms")),
    "a reservation without its prefix": ("field-value", cpu_job, lambda d: node_class(d).update(
        capacityReservationSelectorTerms=[{"id": "0123456789abcdef0"}])),
    # nodes and pods
    "a selector for spot on on-demand nodes": ("node-selector", cpu_job, lambda d: pod(d)["nodeSelector"].update(
        {"karpenter.sh/capacity-type": "spot"})),
    "a toleration of another effect": ("taint", cpu_job, lambda d: pod(d)["tolerations"][0].update(effect="NoExecute")),
    "GPU nodes that the pods do not tolerate": ("taint", gpu_job, lambda d: pod(d).update(tolerations=[])),
    "a second pool with larger nodes": ("unequal-nodes", cpu_job, lambda d: add_pool(d, "r7i.16xlarge")),
    "CPU nodes for a job on GPUs": ("request-too-large", gpu_job, lambda d: requirement(d, TYPE).update(
        values=["r7i.8xlarge"])),
    "GPU nodes for a job without GPUs": ("gpu-unused", gpu_job, lambda d: [
        trainer(d)["resourcesPerNode"][part].pop("nvidia.com/gpu") for part in ("requests", "limits")]),
    "GPUs that are newer than the driver of the image": ("node-image-kind", gpu_job, lambda d: requirement(
        d, TYPE).update(values=["g7.8xlarge"])),
    # resources
    "EFA among the requests only": ("resource-amount", gpu_job, lambda d: trainer(d)["resourcesPerNode"][
        "limits"].pop("vpc.amazonaws.com/efa")),
    "half a GPU": ("resource-amount", gpu_job, lambda d: both(d, "nvidia.com/gpu", "500m")),
    "more requested than allowed": ("resource-amount", cpu_job, lambda d: trainer(d)["resourcesPerNode"][
        "limits"].update(memory="64Gi")),
    "bytes without a unit": ("resource-amount", cpu_job, lambda d: both(d, "memory", "230")),
    "thousandths of a byte": ("resource-amount", cpu_job, lambda d: both(d, "memory", "230m")),
    "thousandths of a CPU without a unit": ("request-too-large", cpu_job, lambda d: both(d, "cpu", "31000")),
    "memory in Gb": ("malformed", cpu_job, lambda d: both(d, "memory", "230Gb")),
    "NCCL on sockets": ("efa-unused", gpu_job, lambda d: set_variable(d, "NCCL_NET", "Socket")),
    "libfabric over TCP": ("efa-unused", gpu_job, lambda d: set_variable(d, "FI_PROVIDER", "tcp")),
    # storage
    "a deployment type of no kind": ("storage-parameters", dynamic_job, lambda d: parameters(
        d, deploymentType="PERSISTENT2")),
    "a parameter that the driver ignores": ("storage-parameters", dynamic_job, lambda d: parameters(
        d, perUnitStoragethroughput="250")),
    "a throughput that FSx does not sell": ("storage-parameters", dynamic_job, lambda d: parameters(
        d, perUnitStorageThroughput="300")),
    "FSx's default version of Lustre": ("storage-parameters", dynamic_job, lambda d: (
        parameters(d, deploymentType="SCRATCH_2"), d["storage-class.yaml"]["parameters"].pop("fileSystemTypeVersion"))),
    "a space between security groups": ("storage-parameters", dynamic_job, lambda d: parameters(
        d, securityGroupIds="sg-0a, sg-0b")),
    "checkpoints deleted with their claim": ("storage-safety", dynamic_job, lambda d: d["storage-class.yaml"].pop(
        "reclaimPolicy")),
    "an EBS volume for four nodes": ("storage-access", dynamic_job, lambda d: d["storage-class.yaml"].update(
        provisioner="ebs.csi.aws.com", parameters={"type": "gp3"})),
    "the address of an EFS": ("storage-address", cpu_job, lambda d: attributes(
        d, dnsname="fs-0199e5a63bd90f796.efs.us-east-1.amazonaws.com")),
    "a mount name with a slash": ("storage-address", cpu_job, lambda d: attributes(d, mountname="/fsx")),
    # the config that the pods mount
    "a config of another name": ("config-file", cpu_job, lambda d: trainer(d).update(
        command=["aliquot", "train", "/etc/aliquot/config.yml"])),
    "a config that is not mounted": ("config-file", cpu_job, lambda d: pod(d)["containers"][0]["volumeMounts"].remove(
        mount(d, "config"))),
    "a key that does not exist": ("config-file", cpu_job, lambda d: change_config(d, "train", max_step=10)),
    "a config for GPUs on CPU nodes": ("processes", cpu_job, lambda d: change_config(d, "launch", device="cuda")),
    "a config for CPUs on GPU nodes": ("gpu-unused", gpu_job, lambda d: change_config(d, "launch", device="cpu")),
    "data on a laptop": ("not-shared", cpu_job, lambda d: change_config(
        d, "data", dataset=None, dataset_config=None, path="/home/me/chats.jsonl")),
    "results beside the file system": ("not-shared", cpu_job, lambda d: mount(d, "shared").update(mountPath="/data")),
    "results where nobody may write": ("not-shared", cpu_job, lambda d: mount(d, "shared").update(readOnly=True)),
    # the runtime and the job
    "a reference without its kind": ("runtime", cpu_job, lambda d: d["train-job.yaml"]["spec"]["runtimeRef"].pop(
        "kind")),
    "a runtime of no framework": ("no-trainer", cpu_job, lambda d: runtime(d)["mlPolicy"].pop("torch")),
    "a runtime without the trainer's label": ("container-name", cpu_job, lambda d: replicated(d)["template"].pop(
        "metadata")),
    "a runtime with another container": ("container-name", cpu_job, lambda d: runtime_pod(d)["containers"][0].update(
        name="trainer")),
    "nodes as replicas": ("container-name", cpu_job, lambda d: replicated(d).update(replicas=4)),
    "an override of another job": ("container-name", old_job, lambda d: d["train-job.yaml"]["spec"][
        "podTemplateOverrides"][0]["targetJobs"][0].update(name="worker")),
    "an image that moves": ("image-tag", cpu_job, lambda d: trainer(d).update(image="registry:5000/aliquot")),
    "an hour for a run of days": ("deadline", cpu_job, lambda d: replicated(d)["template"]["spec"].update(
        activeDeadlineSeconds=3600)),
    "a job that nobody resumes": ("suspended", cpu_job, lambda d: d["train-job.yaml"]["spec"].update(suspend=True)),
    "no node": ("processes", cpu_job, lambda d: trainer(d).update(numNodes=0)),
    # names and the namespace
    "a queue of another name": ("reference", cpu_job, lambda d: add_queue(d, "gpu")),
    "a queue of another namespace": ("reference", cpu_job, lambda d: add_queue(d, "gpus", "team")),
    "a service account of another name": ("reference", cpu_job, lambda d: (
        pod(d).update(serviceAccountName="trainer"), add(d, "v1", "ServiceAccount", "training"))),
    "a priority class of another name": ("reference", cpu_job, lambda d: (
        runtime_pod(d).update(priorityClassName="high"),
        add(d, "scheduling.k8s.io/v1", "PriorityClass", "higher", None, value=1000))),
    "a namespace of another name": ("reference", training_job, lambda d: add(d, "v1", "Namespace", "train", None)),
    "a quota for two nodes": ("quota", cpu_job, lambda d: add(
        d, "v1", "ResourceQuota", "team", spec={"hard": {"requests.cpu": "64"}})),
    "a limit for small pods": ("quota", cpu_job, lambda d: add(
        d, "v1", "LimitRange", "team", spec={"limits": [{"type": "Container", "max": {"memory": "64Gi"}}]})),
    "the node's network": ("pod-security", cpu_job, lambda d: runtime_pod(d).update(hostNetwork=True)),
    "a policy that opens DNS alone": ("network-policy", cpu_job, lambda d: add(
        d, "networking.k8s.io/v1", "NetworkPolicy", "dns", spec={
            "podSelector": {}, "policyTypes": ["Egress"], "egress": [{"ports": [{"port": 53, "protocol": "UDP"}]}]})),
    # not caught
    "a startup taint that nobody removes": (None, cpu_job, lambda d: pool(d)["template"]["spec"].update(
        startupTaints=[{"key": "team", "effect": "NoSchedule"}])),
    "a budget that forbids every eviction": (None, cpu_job, lambda d: add(
        d, "policy/v1", "PodDisruptionBudget", "all", spec={"maxUnavailable": 0, "selector": {}})),
    "a probe shorter than a step": (None, cpu_job, lambda d: runtime_pod(d)["containers"][0].update(
        livenessProbe={"exec": {"command": ["true"]}, "periodSeconds": 1})),
    "more IOPS than EBS has": (None, cpu_job, lambda d: disk(d)["ebs"].update(iops=10**6)),
}  # fmt: skip


@cache
def rendered(make: Callable[[], Job]) -> Documents:
    return documents(make())


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situation(situation: str) -> None:
    rule, make, change = SITUATIONS[situation]
    spoiled = copy.deepcopy(rendered(make))
    change(spoiled)
    findings = check_manifests(manifests_of(spoiled))
    assert rule in rules(findings) if rule is not None else findings == []
