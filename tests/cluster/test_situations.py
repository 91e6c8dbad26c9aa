"""Mistakes of people who write their own manifests for EKS: what `cluster check DIR` says of each, without a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import yaml

from aliquot.cluster.check import check_manifests
from aliquot.cluster.job import Job, describe
from aliquot.cluster.render import documents
from tests.cluster.cases import GIB, cluster_section, config, cpu_job, disk_job, dynamic_storage, gpu_job, plan
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
    volume,
)  # fmt: skip

ZONE = "topology.kubernetes.io/zone"


def eight_gpus() -> Job:
    foreseen = plan(engine="fsdp", device="cuda", ranks_per_node=8, threads_per_rank=12, instance="p5.48xlarge",
                    limit_bytes_per_node=600 * GIB, shm_bytes_per_node=8 * GIB)  # fmt: skip
    return describe(config(cluster_section(instance_types=["p5.48xlarge"]), launch={"device": "cuda"}), foreseen)


def b300() -> Job:
    foreseen = plan(engine="fsdp", device="cuda", ranks_per_node=8, threads_per_rank=12, instance="p6-b300.48xlarge",
                    limit_bytes_per_node=2000 * GIB)  # fmt: skip
    return describe(config(cluster_section(instance_types=["p6-b300.48xlarge"]), launch={"device": "cuda"}), foreseen)


def add_cluster_queue(found: Documents, queue: str = "all", cohort: str | None = None, **quotas: object) -> None:
    """Add Kueue's objects; a quota of `quotas` takes the place of one that is large enough, and None leaves it out."""
    add_queue(found, "gpus")
    found["LocalQueue.yaml"]["spec"]["clusterQueue"] = queue
    amounts = {"cpu": 10000, "memory": "100Ti", "nvidia.com/gpu": 100, "vpc.amazonaws.com/efa": 1000} | {
        name.replace("GPU", "nvidia.com/gpu").replace("EFA", "vpc.amazonaws.com/efa"): amount
        for name, amount in quotas.items()
    }
    resources = [{"name": name, "nominalQuota": amount} for name, amount in amounts.items() if amount is not None]
    group = {
        "coveredResources": [each["name"] for each in resources],
        "flavors": [{"name": "nodes", "resources": resources}],
    }
    add(found, "kueue.x-k8s.io/v1beta2", "ClusterQueue", "all", None, spec={
        "namespaceSelector": {}, "resourceGroups": [group], **({"cohortName": cohort} if cohort else {})})  # fmt: skip


def split_gpus(found: Documents, *quotas: int) -> None:
    """Give GPUs and EFA a resource group of their own, with a flavor for each quota of GPUs."""
    add_cluster_queue(found)
    (group,) = found["ClusterQueue.yaml"]["spec"]["resourceGroups"]
    devices = ["nvidia.com/gpu", "vpc.amazonaws.com/efa"]
    group["coveredResources"] = ["cpu", "memory"]
    group["flavors"][0]["resources"] = [
        item for item in group["flavors"][0]["resources"] if item["name"] not in devices
    ]
    found["ClusterQueue.yaml"]["spec"]["resourceGroups"].append({"coveredResources": devices, "flavors": [
        {"name": f"gpu-{quota}", "resources": [{"name": name, "nominalQuota": quota} for name in devices]}
        for quota in quotas
    ]})  # fmt: skip


def node_config(found: Documents, **settings: Any) -> None:
    values = yaml.safe_load(node_class(found)["userData"])
    values["spec"]["kubelet"]["config"].update(settings)
    node_class(found)["userData"] = yaml.safe_dump(values)


def egress(found: Documents, *rules: Any) -> None:
    add(found, "networking.k8s.io/v1", "NetworkPolicy", "trainer", spec={
        "podSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "llama3-8b"}},
        "policyTypes": ["Egress"], "egress": list(rules)})  # fmt: skip


def volume_zone(found: Documents, zone: str) -> None:
    found["persistent-volume.yaml"]["spec"]["nodeAffinity"] = {
        "required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": ZONE, "operator": "In", "values": [zone]}]}]}
    }


def epochs_job() -> Job:
    return describe(config(train={"num_train_epochs": 2}), plan(steps=0))


dynamic_job = partial(cpu_job, storage=dynamic_storage())


def add(found: Documents, api: str, kind: str, name: str, namespace: str | None = "default", **fields: Any) -> None:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    found[f"{kind}.yaml"] = {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def set_variable(found: Documents, name: str, value: str) -> None:
    trainer(found)["env"] = [each for each in trainer(found)["env"] if each["name"] != name]
    trainer(found)["env"].append({"name": name, "value": value})


def change_config(found: Documents, section: str, **values: Any) -> None:
    change_file(found, "config.yaml", lambda config: config[section].update(values))


def change_file(found: Documents, name: str, change: Callable[[Any], Any]) -> None:
    values = yaml.safe_load(found["config-map.yaml"]["data"][name])
    change(values)
    found["config-map.yaml"]["data"][name] = yaml.safe_dump(values)


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


# What a person did, of which job, and the rule that says so. None: there is no finding.
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
    # https://github.com/kubernetes-sigs/aws-fsx-csi-driver/issues/437
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
    "a config for GPUs on CPU nodes": ("planned-config", cpu_job, lambda d: change_config(d, "launch", device="cuda")),
    "a config for CPUs on GPU nodes": ("planned-config", gpu_job, lambda d: change_config(d, "launch", device="cpu")),
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
    "an override of another job": ("container-name", partial(cpu_job, trainer="2.1"),
        lambda d: d["train-job.yaml"]["spec"][
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
    "a namespace of another name": ("reference", partial(cpu_job, namespace="training"),
        lambda d: add(d, "v1", "Namespace", "train", None)),
    "a quota for two nodes": ("quota", cpu_job, lambda d: add(
        d, "v1", "ResourceQuota", "team", spec={"hard": {"requests.cpu": "64"}})),
    "a limit for small pods": ("quota", cpu_job, lambda d: add(
        d, "v1", "LimitRange", "team", spec={"limits": [{"type": "Container", "max": {"memory": "64Gi"}}]})),
    "the node's network": ("pod-security", cpu_job, lambda d: runtime_pod(d).update(
        hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet")),
    "a policy that opens DNS alone": ("network-policy", cpu_job, lambda d: add(
        d, "networking.k8s.io/v1", "NetworkPolicy", "dns", spec={
            "podSelector": {}, "policyTypes": ["Egress"], "egress": [{"ports": [{"port": 53, "protocol": "UDP"}]}]})),
    # edits of what was rendered: signals and exit codes
    "a shell with a pipe": ("signals", cpu_job, lambda d: trainer(d).update(
        command=["sh", "-c", "aliquot train /etc/aliquot/config.yaml | tee /fsx/log"])),
    "a shell that goes on": ("signals", cpu_job, lambda d: trainer(d).update(
        command=["/bin/bash", "-lc", "aliquot train /etc/aliquot/config.yaml; echo done"])),
    "a hook longer than the grace period": ("grace", cpu_job,
        lambda d: runtime_pod(d)["containers"][0].update(lifecycle={"preStop": {"sleep": {"seconds": 60}}})),
    "a hook that sleeps in a shell": ("grace", cpu_job,
        lambda d: runtime_pod(d)["containers"][0].update(
            lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "sleep 90"]}}})),
    "failure rules in swapped order": ("failure-rules", cpu_job,
        lambda d: replicated(d)["template"]["spec"][
        "podFailurePolicy"]["rules"].reverse()),
    "bad input that restarts": ("failure-rules", cpu_job, lambda d: job_set(d)["failurePolicy"]["rules"].pop()),
    "a pod policy without exit codes": ("failure-rules", cpu_job, lambda d: replicated(d)["template"]["spec"].pop(
        "podFailurePolicy")),
    # https://github.com/kubeflow/trainer/issues/3779
    "a job set that is deleted": ("ended-job", cpu_job, lambda d: job_set(d).update(ttlSecondsAfterFinished=600)),
    "a job that is deleted": ("ended-job", cpu_job, lambda d: replicated(d)["template"]["spec"].update(
        ttlSecondsAfterFinished=0)),
    # the pod fits the node
    "a kubelet that reserves memory": ("request-too-large", cpu_job, lambda d: node_class(d).update(
        kubelet={"systemReserved": {"memory": "40Gi"}})),
    "a kubelet that reserves CPUs": ("request-too-large", cpu_job, lambda d: node_class(d).update(
        kubelet={"kubeReserved": {"cpu": "2"}})),
    "a kubelet that evicts early": ("request-too-large", cpu_job, lambda d: node_class(d).update(
        kubelet={"evictionHard": {"memory.available": "25%"}})),
    "a kubelet that keeps memory free": ("request-too-large", cpu_job, lambda d: node_class(d).update(
        kubelet={"evictionHard": {"memory.available": "32Gi"}})),
    "three pods a node": ("request-too-large", cpu_job, lambda d: node_class(d).update(kubelet={"maxPods": 3})),
    "one pod for eight CPUs": ("request-too-large", cpu_job, lambda d: node_config(d, maxPods=2)),
    "a pod within one NUMA node": ("request-too-large", eight_gpus, lambda d: node_config(
        d, topologyManagerPolicy="single-numa-node")),
    # https://github.com/aws/karpenter-provider-aws/pull/5666
    "a public address beside 32 EFAs": ("request-too-large", eight_gpus, lambda d: node_class(d).update(
        associatePublicIPAddress=True)),
    "interfaces without EFA": ("efa", gpu_job, lambda d: node_class(d).update(networkInterfaces=[
        {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"}])),
    "memory below the plan": ("memory-limit", cpu_job, lambda d: both(d, "memory", "64Gi")),
    "a small /dev/shm": ("shm", eight_gpus, lambda d: pod(d)["volumes"][-1]["emptyDir"].update(sizeLimit="32Mi")),
    "less /dev/shm than planned": ("shm", eight_gpus,
        lambda d: pod(d)["volumes"][-1]["emptyDir"].update(sizeLimit="4Gi")),
    # all pods are admitted, or none
    "a queue without GPUs": ("queue", gpu_job, lambda d: add_cluster_queue(d, GPU=None)),
    "a queue without EFA": ("queue", gpu_job, lambda d: add_cluster_queue(d, EFA=None)),
    "a queue without disks": ("queue", disk_job, add_cluster_queue),
    "half the quota": ("queue", cpu_job, lambda d: add_cluster_queue(d, cpu=62)),
    "a queue for two GPUs": ("queue", gpu_job, lambda d: add_cluster_queue(d, GPU=2)),
    "a queue of a queue that is not there": ("reference", cpu_job, lambda d: add_cluster_queue(d, "training")),
    "a queue for no namespace": ("queue", cpu_job, lambda d: (
        add_cluster_queue(d), d["ClusterQueue.yaml"]["spec"].pop("namespaceSelector"))),
    "a queue that holds": ("queue", cpu_job, lambda d: (
        add_cluster_queue(d), d["ClusterQueue.yaml"]["spec"].update(stopPolicy="Hold"))),
    "a quota of three pods": ("quota", cpu_job,
        lambda d: add(d, "v1", "ResourceQuota", "team", spec={"hard": {"pods": 3}})),
    "a quota of two GPUs": ("quota", gpu_job,
        lambda d: add(d, "v1", "ResourceQuota", "team", spec={"hard": {"requests.nvidia.com/gpu": 2}})),
    # names resolve
    "an egress policy without DNS": ("name-resolution", cpu_job, lambda d: egress(d, {"to": [{"podSelector": {}}]})),
    "no host names": ("name-resolution", cpu_job, lambda d: job_set(d).update(network={"enableDNSHostnames": False})),
    "a subdomain of another name": ("name-resolution", cpu_job, lambda d: job_set(d).update(
        network={"subdomain": "workers"})),
    "a subdomain of the pods": ("name-resolution", cpu_job, lambda d: runtime_pod(d).update(subdomain="workers")),
    "the names of the node": ("name-resolution", cpu_job, lambda d: runtime_pod(d).update(dnsPolicy="Default")),
    "a key of a Secret that is not there": ("reference", cpu_job, lambda d: add(
        d, "v1", "Secret", "hf-token", stringData={"HF_TOKEN": "x"})),
    # data can be written
    "a volume that is read-only": ("storage-access", cpu_job, lambda d: d["persistent-volume.yaml"]["spec"][
        "csi"].update(readOnly=True)),
    "a mount that is read-only": ("storage-access", cpu_job, lambda d: d["persistent-volume.yaml"]["spec"][
        "mountOptions"].append("ro")),
    "a volume of another zone": ("region", cpu_job, lambda d: volume_zone(d, "us-east-1b")),
    # https://github.com/kubernetes-sigs/aws-fsx-csi-driver/issues/288
    "SCRATCH_2 with a throughput": ("storage-parameters", dynamic_job, lambda d: parameters(
        d, deploymentType="SCRATCH_2")),
    "PERSISTENT_2 with S3": ("storage-parameters", dynamic_job,
        lambda d: parameters(d, s3ImportPath="s3://chats/data")),
    "PERSISTENT_1 of 500": ("storage-parameters", dynamic_job, lambda d: parameters(
        d, deploymentType="PERSISTENT_1", perUnitStorageThroughput="500")),
    "PERSISTENT_2 without a throughput": ("storage-parameters", dynamic_job, lambda d: d["storage-class.yaml"][
        "parameters"].pop("perUnitStorageThroughput")),
    # the fabric, and the environment
    "an interface of the node": ("fabric", gpu_job, lambda d: set_variable(d, "NCCL_SOCKET_IFNAME", "ens5")),
    "an interface for gloo": ("fabric", cpu_job, lambda d: set_variable(d, "GLOO_SOCKET_IFNAME", "eno1,ens5")),
    "one GPU of eight": ("gpu-unused", eight_gpus, lambda d: set_variable(d, "CUDA_VISIBLE_DEVICES", "0")),
    "GPUs that do not see each other": ("fabric", eight_gpus, lambda d: set_variable(d, "NCCL_P2P_DISABLE", "1")),
    "a hub that is offline": ("reference", cpu_job, lambda d: set_variable(d, "HF_HUB_OFFLINE", "1")),
    "another engine than planned": ("planned-config", cpu_job, lambda d: change_config(d, "shard", engine="fsdp")),
    "other ranks than planned": ("planned-config", cpu_job, lambda d: change_config(d, "launch", ranks=4)),
    # what a reader of the tutorial edited
    "a config of longer sequences": ("planned-config", cpu_job, lambda d: change_config(
        d, "data", sequence_length=8192)),
    "results in a directory that nobody makes": ("planned-config", cpu_job, lambda d: change_config(
        d, "run", directory="/fsx/elsewhere")),
    "more steps by an override": ("planned-config", cpu_job, lambda d: trainer(d)["command"].append(
        "train.max_steps=2000")),
    "an adapter that was not planned": ("planned-config", cpu_job, lambda d: change_file(d, "config.yaml",
        lambda config: config.update(adapter={"r": 8}))),
    "fewer EFA interfaces than planned": ("fabric", eight_gpus, lambda d: both(d, "vpc.amazonaws.com/efa", "8")),
    "fewer GPUs than planned": ("gpu-unused", eight_gpus, lambda d: both(d, "nvidia.com/gpu", "4")),
    "a quarter of the CPUs": ("threads", cpu_job, lambda d: both(d, "cpu", "16")),
    "less disk than planned": ("resource-amount", disk_job, lambda d: both(d, "ephemeral-storage", "8Gi")),
    "a role of another name": ("rendered-field", cpu_job, lambda d: node_class(d).update(role="trainning")),
    "subnets of another tag": ("rendered-field", cpu_job, lambda d: node_class(d).update(
        subnetSelectorTerms=[{"tags": {"karpenter.sh/discovery": "trainning"}}])),
    "another mount name": ("rendered-field", cpu_job, lambda d: attributes(d, mountname="fsx1")),
    "no /tmp": ("scratch", cpu_job, lambda d: pod(d)["containers"][0]["volumeMounts"].remove(mount(d, "tmp"))),
    "a /tmp that is read-only": ("scratch", cpu_job, lambda d: mount(d, "tmp").update(readOnly=True)),
    "a disk for states of another path": ("scratch", disk_job, lambda d: mount(d, "offload").update(
        mountPath="/scratch")),
    "a small disk for states": ("scratch", disk_job, lambda d: next(
        each for each in pod(d)["volumes"] if each["name"] == "offload")["emptyDir"].update(sizeLimit="1Gi")),
    # https://github.com/aws/amazon-vpc-cni-k8s/pull/664
    "the node's names": ("name-resolution", cpu_job, lambda d: runtime_pod(d).update(hostNetwork=True)),
    "a deadline of a run in epochs": ("deadline", epochs_job, lambda d: replicated(d)["template"]["spec"].update(
        activeDeadlineSeconds=3600)),
    "a Secret of another name": ("environment", cpu_job, lambda d: next(
        each for each in trainer(d)["env"] if each["name"] == "HF_TOKEN")["valueFrom"]["secretKeyRef"].update(
            name="hf-tokn")),
    "no home": ("environment", cpu_job, lambda d: trainer(d)["env"].remove({"name": "HOME", "value": "/tmp"})),
    "another claim than the config's": ("reference", partial(cpu_job, storage={"kind": "claim", "claim": "own"}),
        lambda d: volume(d, "persistentVolumeClaim").update(claimName="others")),
    "another service account than the config's": ("reference", partial(cpu_job, service_account="training"),
        lambda d: pod(d).pop("serviceAccountName")),
    "no queue": ("reference", partial(cpu_job, queue="gpus"), lambda d: d["train-job.yaml"]["metadata"]["labels"].pop(
        "kueue.x-k8s.io/queue-name")),
    "no runtime": ("runtime", cpu_job, lambda d: d.pop("training-runtime.yaml")),
    "no config": ("config-file", cpu_job, lambda d: d.pop("config-map.yaml")),
    "no nodes": ("not-applied", cpu_job, lambda d: d.pop("node-pool.yaml")),
    "no policy": ("not-applied", cpu_job, lambda d: d.pop("network-policy.yaml")),
    "nobody who makes the directories": ("not-applied", cpu_job, lambda d: d.pop("directories-job.yaml")),
    # from public issues
    # https://github.com/aws/aws-parallelcluster/issues/7143
    "EFA on the first card of a P6-B300": ("efa", b300, lambda d: node_class(d).pop("networkInterfaces")),
    # https://github.com/kubernetes-sigs/kueue/issues/2096
    "no host names, and a subdomain": ("name-resolution", cpu_job, lambda d: job_set(d).update(
        network={"enableDNSHostnames": False, "subdomain": "some-subdomain"})),
    # https://github.com/kubernetes-sigs/kueue/issues/2612
    "a queue for three pods": ("queue", cpu_job, lambda d: add_cluster_queue(d, pods=3)),
    # https://github.com/kubernetes-sigs/kueue/issues/1726
    "GPUs split over two flavors": ("queue", gpu_job, lambda d: split_gpus(d, 3, 1)),
    # https://github.com/kubeflow/trainer/issues/2981
    "a job set that never restarts, and is deleted": ("ended-job", cpu_job, lambda d: job_set(d).update(
        failurePolicy={"restartStrategy": "Recreate", "maxRestarts": 0}, ttlSecondsAfterFinished=60)),
    # https://github.com/kubernetes-sigs/jobset/pull/601
    "every failure for the host's maintenance": ("failure-rules", cpu_job, lambda d: job_set(d)["failurePolicy"].update(
        rules=[{"name": "maintenance", "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"]}])),
    # https://github.com/kubeflow/website/pull/4216
    "variables in an override": ("node-env", partial(cpu_job, trainer="2.1"), lambda d: d["train-job.yaml"]["spec"][
        "podTemplateOverrides"][0]["spec"]["containers"][0].update(env=[{"name": "A", "value": "b"}])),
    # https://github.com/kubernetes-sigs/aws-fsx-csi-driver/issues/287
    "SCRATCH_2 of 1400 GiB with a throughput": ("storage-size", dynamic_job, lambda d: (parameters(
        d, deploymentType="SCRATCH_2", perUnitStorageThroughput="200", autoImportPolicy="NEW_CHANGED_DELETED"),
        d["persistent-volume-claim.yaml"]["spec"]["resources"]["requests"].update(storage="1400Gi"))),
    # https://github.com/kubernetes-sigs/aws-fsx-csi-driver/issues/459
    "intelligent tiering": ("storage-parameters", dynamic_job, lambda d: parameters(
        d, storageType="INTELLIGENT_TIERING", throughputCapacity="4000",
        readCacheSizingMode="PROPORTIONAL_TO_THROUGHPUT_CAPACITY")),
    # https://github.com/kubernetes-sigs/aws-fsx-csi-driver/pull/232
    "PERSISTENT_1 without a throughput": ("storage-parameters", dynamic_job, lambda d: (parameters(
        d, deploymentType="PERSISTENT_1"), d["storage-class.yaml"]["parameters"].pop("perUnitStorageThroughput"))),
    # https://github.com/aws/karpenter-provider-aws/issues/7729
    "a tenth of the nodes replaced at any time": ("consolidation", cpu_job, lambda d: pool(d).update(disruption={
        "consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "0s", "budgets": [{"nodes": "10%"}]})),
    # https://github.com/kubernetes-sigs/karpenter/issues/1611
    "nodes of nineteen minutes": ("node-expiry", cpu_job, lambda d: pool(d)["template"]["spec"].update(
        expireAfter="19m", terminationGracePeriod="20m")),
    # https://github.com/NVIDIA/nccl/issues/525
    "eight GPUs without /dev/shm": ("shm", eight_gpus, lambda d: pod(d)["containers"][0]["volumeMounts"].remove(
        mount(d, "shm"))),
    "a V100 in the pool": ("node-image-kind", gpu_job, lambda d: requirement(d, TYPE).update(values=["p3dn.24xlarge"])),
    # not caught
    "a startup taint that nobody removes": (None, cpu_job, lambda d: pool(d)["template"]["spec"].update(
        startupTaints=[{"key": "team", "effect": "NoSchedule"}])),
    "a budget that forbids every eviction": (None, cpu_job, lambda d: add(
        d, "policy/v1", "PodDisruptionBudget", "all", spec={"maxUnavailable": 0, "selector": {}})),
    "a probe shorter than a step": (None, cpu_job, lambda d: runtime_pod(d)["containers"][0].update(
        livenessProbe={"exec": {"command": ["true"]}, "periodSeconds": 1})),
    "more IOPS than EBS has": (None, cpu_job, lambda d: disk(d)["ebs"].update(iops=10**6)),
    # harmless
    "a P6-B300 as rendered": (None, b300, lambda d: None),
    "GPUs of one flavor that suffice": (None, gpu_job, lambda d: split_gpus(d, 3, 4)),
    "labels and annotations": (None, cpu_job, lambda d: d["train-job.yaml"]["metadata"].update(
        labels={"team": "nlp"}, annotations={"note": "x"})),
    "one more toleration": (None, cpu_job,
        lambda d: pod(d)["tolerations"].append({"key": "team", "operator": "Exists"})),
    "a config on the shared file system": (None, cpu_job, lambda d: trainer(d).update(
        command=["aliquot", "train", "/fsx/config.yaml"])),
    "the log of NCCL": (None, gpu_job, lambda d: set_variable(d, "NCCL_DEBUG", "WARN")),
    "a CPU for other daemonsets": (None, cpu_job, lambda d: both(d, "cpu", "30")),
    "a larger /tmp": (None, cpu_job, lambda d: next(
        each for each in pod(d)["volumes"] if each["name"] == "tmp")["emptyDir"].update(sizeLimit="4Gi")),
    "a longer grace period": (None, cpu_job, lambda d: pod(d).update(terminationGracePeriodSeconds=900)),
    "a hook within the grace period": (None, cpu_job, lambda d: (
        pod(d).update(terminationGracePeriodSeconds=180), runtime_pod(d)["containers"][0].update(
            lifecycle={"preStop": {"sleep": {"seconds": 30}}}))),
    "another tag": (None, cpu_job, lambda d: trainer(d).update(
        image="123456789012.dkr.ecr.us-east-1.amazonaws.com/aliquot:0.1.1")),
    "less memory, above the plan": (None, cpu_job, lambda d: both(d, "memory", "200Gi")),
    "a shell that becomes aliquot": (None, cpu_job, lambda d: trainer(d).update(
        command=["sh", "-c", "ulimit -c 0; exec aliquot train /etc/aliquot/config.yaml"])),
    "an override": (None, cpu_job, lambda d: trainer(d)["command"].append("train.learning_rate=1e-5")),
    "host names": (None, cpu_job, lambda d: job_set(d).update(network={"enableDNSHostnames": True})),
    "a queue that is large enough": (None, gpu_job, add_cluster_queue),
    "a queue that borrows": (None, gpu_job, lambda d: add_cluster_queue(d, cohort="all", GPU=2)),
    "a quota of four pods": (None, cpu_job,
        lambda d: add(d, "v1", "ResourceQuota", "team", spec={"hard": {"pods": 4}})),
    # https://github.com/aws/karpenter-provider-aws/issues/6890
    "a kubelet that collects images": (None, cpu_job, lambda d: node_class(d).update(
        kubelet={"imageGCHighThresholdPercent": 80})),
    "an egress policy with DNS": (None, cpu_job, lambda d: egress(d, {"to": [{"podSelector": {}}]}, {
        "to": [{"namespaceSelector": {}}], "ports": [{"port": 53, "protocol": "UDP"}]})),
    "a zone of the volume": (None, cpu_job, lambda d: volume_zone(d, "us-east-1a")),
    "any interface but one": (None, gpu_job, lambda d: set_variable(d, "NCCL_SOCKET_IFNAME", "^docker0,lo")),
    "all GPUs by number": (None, eight_gpus, lambda d: set_variable(d, "CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")),
    "more restarts": (None, cpu_job, lambda d: job_set(d)["failurePolicy"].update(maxRestarts=50)),
    "a larger root volume": (None, cpu_job, lambda d: disk(d)["ebs"].update(volumeSize="200Gi")),
    "a larger /dev/shm": (None, eight_gpus, lambda d: pod(d)["volumes"][-1]["emptyDir"].update(sizeLimit="64Gi")),
    "a volume that is on the cluster": (None, cpu_job, lambda d: (
        d.pop("persistent-volume.yaml"), d.pop("persistent-volume-claim.yaml"))),
    "a ConfigMap that is applied wherever kubectl is": (None, cpu_job,
        lambda d: d["config-map.yaml"]["metadata"].pop("namespace")),
    "a ConfigMap that is on the cluster": (None, cpu_job, lambda d: trainer(d)["env"].append(
        {"name": "X", "valueFrom": {"configMapKeyRef": {"name": "others", "key": "x"}}})),
    "nodes that wait longer than their pods": (None, cpu_job,
        lambda d: pool(d)["template"]["spec"].update(terminationGracePeriod="2h")),
    "a claim that no pod mounts": (None, cpu_job, lambda d: d.update(x={
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "database", "namespace": "default"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}}})),
    "Karpenter's label of the pool": (None, cpu_job, lambda d: pod(d)["nodeSelector"].update(
        {"karpenter.sh/nodepool": d["node-pool.yaml"]["metadata"]["name"]})),
    "a word like a secret": (None, cpu_job,
        lambda d: trainer(d)["env"].append({"name": "TOKENIZERS_PARALLELISM", "value": "false"})),
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
