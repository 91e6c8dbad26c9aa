"""The rules: nothing is found in what is rendered, and each mistake is found where it is made."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.cli.instances_command import instance_planner
from aliquot.cluster.check import check_job_of_config, check_manifests
from aliquot.cluster.findings import RULES
from aliquot.cluster.job import Job, describe, placed
from aliquot.cluster.manifests import ManifestObject, parse_manifests, read_manifests, to_yaml
from aliquot.cluster.render import documents, render, write
from aliquot.cluster.trainjob import cluster_training_runtime
from aliquot.config.read_config import read_config
from aliquot.core.errors import ManifestError, UserError
from aliquot.planner.plan import PhaseMemory
from aliquot.planner.planned_machine import Machine, limit_to_pod
from tests.cluster.cases import cluster_section, config, cpu_job, disk_job, dynamic_storage, gpu_job, plan
from tests.cluster.crd import TRAINERS, is_custom, needs_crds, problems
from tests.cluster.edits import (
    TYPE,
    Documents,
    both,
    deny,
    errors,
    job_set,
    manifests_of,
    node_class,
    node_spec,
    pod,
    pool,
    requirement,
    rules,
    runtime_pod,
    shm,
    trainer,
    volume,
)  # fmt: skip
from tests.cluster.test_situations import SITUATIONS
from tests.conftest import REPOSITORY
from tests.examples import examples
from tests.planner.shapes import LLAMA

GIB = 1 << 30

# The hand-written NodePool that most guides begin with, and a job for it.
HAND_WRITTEN = """
apiVersion: karpenter.sh/v1
kind: NodePool
metadata:
  name: cpu-amx
spec:
  template:
    spec:
      requirements:
        - key: karpenter.sh/capacity-type
          operator: In
          values: ["spot", "on-demand"]
        - key: karpenter.k8s.aws/instance-family
          operator: In
          values: ["c7i", "m7i"]
        - key: karpenter.k8s.aws/instance-size
          operator: In
          values: ["8xlarge"]
      nodeClassRef:
        group: karpenter.k8s.aws
        kind: EC2NodeClass
        name: cpu-amx
      expireAfter: 720h
      taints:
        - key: intel.com/amx
          value: present
          effect: NoSchedule
  limits:
    cpu: 100
  disruption:
    consolidationPolicy: WhenEmpty
    consolidateAfter: 20m
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: hand-written
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    numNodes: 4
    numProcPerNode: auto
    image: example.com/train:cuda13.0
    command: [torchrun, run/train.py]
    env:
      - name: HF_TOKEN
        value: hf_abcdefghijklmnopqrstuvwxyz
      - name: PET_NNODES
        value: "4"
    resourcesPerNode:
      requests: {cpu: 32, memory: 64Gi}
      limits: {cpu: 32, memory: 64Gi}
  podTemplateOverrides:
    - targetJobs: [{name: node}]
      spec:
        tolerations: [{key: intel.com/amx, operator: Exists}]
        containers:
          - name: trainer
"""


@pytest.mark.few(6)
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("make", [cpu_job, disk_job, gpu_job])
@pytest.mark.parametrize("changes", [{}, {"storage": dynamic_storage(), "zone": None}])
def test_rendered_manifests_have_no_finding(make: Callable[..., Job], trainer: str, changes: dict[str, Any]) -> None:
    job = make(trainer=trainer, **changes)
    assert check_job_of_config(job) == []
    assert check_manifests(manifests_of(documents(job))) == []  # nor without the plan


def test_sidecars_count_towards_pod_memory() -> None:
    job = cpu_job()
    fuller = replace(job, plan=replace(job.plan, beside_bytes=job.memory_bytes))
    assert rules(check_job_of_config(fuller)) == {"memory-limit"}


@pytest.mark.parametrize(
    "name, ranks, device", [("llama3-8b-cpu", 2, "cpu"), ("qwen3-30b-a3b-cpu", 2, "cpu"), ("llama3-8b-gpu", 1, "cuda")]
)
def test_examples(name: str, ranks: int, device: str) -> None:
    """They need no network, no hub and no account to render."""
    settings = read_config(REPOSITORY / "examples" / f"{name}.yaml")
    assert settings.cluster is not None
    foreseen = plan(
        device=device, ranks_per_node=ranks, engine="host" if device == "cpu" else "fsdp",
        instance=settings.cluster.instance_types[0],
    )  # fmt: skip
    assert check_job_of_config(describe(settings, foreseen)) == []


def test_hand_written() -> None:
    found = check_manifests(list(parse_manifests(HAND_WRITTEN, "hand.yaml")))
    assert errors(found) == {
        "request-too-large", "processes", "secret-value", "reserved-env", "container-name", "image-kind"
    }  # fmt: skip
    assert {"spot", "node-expiry", "unequal-nodes", "zone-spread", "runtime", "node-class"} <= rules(found)
    assert all(each.where.startswith("hand.yaml:") for each in found)


def test_nodes_of_the_seed_job(shared: Path) -> None:
    text = (shared / "seeds" / "cpu-amx-on-eks.md").read_text()
    match = re.search(r"kubectl apply -f -\s*\n(.*?)\nEOF", text, re.DOTALL)
    assert match is not None
    found = check_manifests(list(parse_manifests(match.group(1), "seed.yaml")))
    assert errors(found) == {"label-value", "node-image-kind", "node-image-eks"}
    assert rules(found) - errors(found) == {
        "unequal-nodes", "spot", "node-expiry", "node-image-drift", "user-data-packages", "discontinued"
    }  # fmt: skip
    two_in_one = next(each for each in found if each.rule == "label-value")
    assert two_in_one.fix == 'write 2 values: ["24xlarge", "48xlarge"]'


def test_64_gib_on_a_node_of_64_gib() -> None:
    """Requests that equal the node's size: nothing that Kubernetes refuses, and the pod stays Pending for ever."""
    found = documents(smaller())
    trainer = found["train-job.yaml"]["spec"]["trainer"]
    for part in ("requests", "limits"):
        trainer["resourcesPerNode"][part] = {"cpu": "32", "memory": "64Gi"}
    (finding,) = check_manifests(manifests_of(found))
    assert finding.rule == "request-too-large"
    assert "64.0 GiB of memory requested, a pod can have 56.0 GiB" in finding.message
    assert "32 cpu requested" in finding.message


def smaller() -> Job:
    return describe(
        config(cluster_section(instance_types=["c7i.8xlarge"])),
        plan(instance="c7i.8xlarge", phases=(PhaseMemory("steady peak", {"moments": 20 * GIB}, {}),)),
    )


MISTAKES: dict[str, tuple[str, Callable[[Documents], Any]]] = {
    "a misspelt field": ("unknown-field", lambda d: pool(d).update(limit={})),
    "a field deep in a patch": ("unknown-field", lambda d: pod(d).update(nodeSelectors={})),
    "env as text": ("malformed", lambda d: trainer(d).update(env=["A=b"])),
    "null in env": ("malformed", lambda d: trainer(d).update(env=[None])),
    "a number as a label": ("malformed", lambda d: pod(d)["nodeSelector"].update({"aliquot.io/pool": 7})),
    "tolerations as text": ("malformed", lambda d: pod(d).update(tolerations="all")),
    "volumes as text": ("malformed", lambda d: pod(d).update(volumes="x")),
    "limits as a list": ("malformed", lambda d: pool(d).update(limits=["cpu"])),
    "an amount of words": ("malformed", lambda d: pool(d).update(limits={"cpu": "many"})),
    "an operator as a list": ("malformed", lambda d: requirement(d, TYPE).update(operator=["In"])),
    "a kind of others": ("not-read", lambda d: d.update(
        x={"apiVersion": "example.com/v1", "kind": "Box", "metadata": {"name": "x"}})),
    "a misspelt kind": ("unknown-kind", lambda d: d["node-class.yaml"].update(kind="EC2NodeClas")),
    "no provisioner": ("missing-field", lambda d: d.update(
        x={"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "x"}})),
    "an unknown image family": ("field-value", lambda d: d["node-class.yaml"]["spec"].update(amiFamily="AL2024")),
    "a requirement without values": ("cel-rule", lambda d: requirement(d, TYPE).pop("values")),
    "a restricted label": ("cel-rule", lambda d: pool(d)["template"]["metadata"]["labels"].update(
        {"karpenter.sh/x": "y"})),
    "a role and a profile": ("cel-rule", lambda d: d["node-class.yaml"]["spec"].update(instanceProfile="x")),
    "two root volumes": ("cel-rule", lambda d: d["node-class.yaml"]["spec"].update(
        blockDeviceMappings=2 * [{"deviceName": "/dev/xvda", "rootVolume": True, "ebs": {"volumeSize": "50Gi"}}])),
    "two types in one string": ("label-value", lambda d: requirement(d, TYPE).update(values=["r7i.8xlarge, x"])),
    "a type that does not exist": ("instance-type", lambda d: requirement(d, TYPE).update(values=["r7i.9xlarge"])),
    "requirements that exclude": ("no-type-left", lambda d: requirement(d, "kubernetes.io/arch").update(
        values=["arm64"])),
    "unequal types": ("unequal-nodes", lambda d: requirement(d, TYPE).update(values=["r7i.8xlarge", "r7i.16xlarge"])),
    "a type without AMX": ("no-amx", lambda d: requirement(d, TYPE).update(values=["r6i.8xlarge"])),
    "another node class": ("node-class", lambda d: node_spec(d)["nodeClassRef"].update(name="other")),
    "latest image": ("node-image-drift", lambda d: d["node-class.yaml"]["spec"].update(
        amiSelectorTerms=[{"alias": "al2023@latest"}])),
    "a GPU image": ("node-image-kind", lambda d: d["node-class.yaml"]["spec"].update(
        amiSelectorTerms=[{"name": "amazon-eks-node-al2023-x86_64-nvidia-1.34-v20260903"}])),
    "no EKS image": ("node-image-eks", lambda d: d["node-class.yaml"]["spec"].update(
        amiSelectorTerms=[{"name": "ubuntu-24.04"}])),
    "packages on the node": ("user-data-packages", lambda d: d["node-class.yaml"]["spec"].update(
        userData="#!/bin/bash\ndnf install -y gperftools\n")),
    "nodes that expire": ("node-expiry", lambda d: node_spec(d).update(expireAfter="24h")),
    "no expiry said": ("node-expiry", lambda d: node_spec(d).pop("expireAfter")),
    "consolidation": ("consolidation", lambda d: pool(d)["disruption"].update(
        consolidationPolicy="WhenEmptyOrUnderutilized")),
    "no consolidation said": ("consolidation", lambda d: pool(d)["disruption"].pop("consolidationPolicy")),
    "spot": ("spot", lambda d: requirement(d, "karpenter.sh/capacity-type").update(values=["spot"])),
    "a label that no node has": ("node-selector", lambda d: pod(d)["nodeSelector"].update({"aliquot.io/pool": "x"})),
    "a taint": ("taint", lambda d: pod(d).update(tolerations=[])),
    "another value of the taint": ("taint", lambda d: pod(d)["tolerations"][0].update(value="absent")),
    "too much memory": ("request-too-large", lambda d: both(d, "memory", "256Gi")),
    "more disk than the volume lets a pod have": ("request-too-large", lambda d: both(d, "ephemeral-storage", "95Gi")),
    "too much memory in a container before": ("request-too-large", lambda d: runtime_pod(d)["initContainers"][0].update(
        resources={"limits": {"memory": "300Gi"}})),
    "a large container beside": ("request-too-large", lambda d: runtime_pod(d)["containers"].append(
        {"name": "beside", "image": "x", "resources": {"requests": {"cpu": "8", "memory": "1Gi"}}})),
    "a name that leaves pods none": ("name-too-long", lambda d: d["train-job.yaml"]["metadata"].update(name=49 * "a")),
    "types without spot": ("not-sold", lambda d: (
        requirement(d, TYPE).update(values=["hpc7a.48xlarge"]),
        requirement(d, "karpenter.sh/capacity-type").update(values=["spot"]))),
    "a type of another region": ("not-sold", lambda d: requirement(d, TYPE).update(values=["hpc7a.48xlarge"])),
    "a claim that is not there": ("reference", lambda d: volume(d, "persistentVolumeClaim").update(claimName="x")),
    "a ConfigMap that is not there": ("reference", lambda d: volume(d, "configMap").update(name="x")),
    "a volume that is nowhere": ("reference", lambda d: pod(d)["containers"][0]["volumeMounts"].append(
        {"name": "x", "mountPath": "/x"})),
    "two volumes at one path": ("reference", lambda d: pod(d)["containers"][0]["volumeMounts"].append(
        {"name": "tmp", "mountPath": "/fsx"})),
    "a claim of another namespace": ("reference", lambda d: d["persistent-volume-claim.yaml"]["metadata"].update(
        namespace="other")),
    "a runtime of another namespace": ("reference", lambda d: d["training-runtime.yaml"]["metadata"].update(
        namespace="other")),
    "a capacity that is none": ("not-sold", lambda d: requirement(d, "karpenter.sh/capacity-type").update(
        values=["ondemand"])),
    "pods that restart by themselves": ("restart-policy", lambda d: runtime_pod(d).update(restartPolicy="OnFailure")),
    "pods that are said nothing of": ("restart-policy", lambda d: runtime_pod(d).pop("restartPolicy")),
    "a node class of old": ("node-class", lambda d: node_spec(d)["nodeClassRef"].update(kind="AWSNodeTemplate")),
    "nodes that go before their pods": ("grace", lambda d: node_spec(d).update(terminationGracePeriod="1m30s")),
    "a volume for another claim": ("storage-binding", lambda d: d["persistent-volume.yaml"]["spec"]["claimRef"].update(
        name="x")),
    "EFA on a small type": ("efa", lambda d: both(d, "vpc.amazonaws.com/efa", "1")),
    "limits for three nodes": ("pool-limit", lambda d: pool(d)["limits"].update(cpu="96")),
    "memory for three nodes": ("pool-limit", lambda d: pool(d)["limits"].update(memory="768Gi")),
    "another zone": ("node-selector", lambda d: pod(d)["nodeSelector"].update({"topology.kubernetes.io/zone": "x"})),
    "any zone": ("zone-spread", lambda d: (pod(d)["nodeSelector"].pop("topology.kubernetes.io/zone"),
                                           requirement(d, "topology.kubernetes.io/zone").update(values=["a", "b"]))),
    "auto processes": ("processes", lambda d: trainer(d).update(numProcPerNode="auto")),
    "no processes": ("processes", lambda d: trainer(d).pop("numProcPerNode")),
    "other processes than planned": ("processes", lambda d: trainer(d).update(numProcPerNode=4)),
    "more threads than CPUs": ("threads", lambda d: both(d, "cpu", "8")),
    "half a CPU": ("threads", lambda d: both(d, "cpu", "500m")),
    "a little less CPU than the limit": ("requests-and-limits", lambda d: trainer(d)["resourcesPerNode"].update(
        requests=trainer(d)["resourcesPerNode"]["requests"] | {"cpu": "30900m"})),
    "no trainer": ("no-trainer", lambda d: d["train-job.yaml"]["spec"].pop("trainer")),
    "both dialects": ("unknown-field", lambda d: d["train-job.yaml"]["spec"].update(podTemplateOverrides=[])),
    "another container": ("container-name", lambda d: pod(d)["containers"][0].update(name="trainer")),
    "env in a patch": ("node-env", lambda d: pod(d)["containers"][0].update(env=[{"name": "A", "value": "b"}])),
    "reserved env": ("reserved-env", lambda d: trainer(d)["env"].append({"name": "PET_NODE_RANK", "value": "0"})),
    "a runtime elsewhere": ("runtime", lambda d: d["train-job.yaml"]["spec"]["runtimeRef"].update(name="torch")),
    "a memory limit below the plan": ("memory-limit", lambda d: both(d, "memory", "64Gi")),
    "limits above requests": ("requests-and-limits", lambda d: trainer(d)["resourcesPerNode"]["limits"].update(
        cpu="32")),
    "no resources": ("requests-and-limits", lambda d: trainer(d).pop("resourcesPerNode")),
    "/dev/shm on disk": ("shm", lambda d: shm(d, sizeLimit="1Gi")),
    "/dev/shm as large as the pod": ("shm-limit", lambda d: shm(d, medium="Memory", sizeLimit="500Gi")),
    "a short grace period": ("grace", lambda d: pod(d).update(terminationGracePeriodSeconds=60)),
    "the default grace period": ("grace", lambda d: pod(d).pop("terminationGracePeriodSeconds")),
    "notices kept away": ("do-not-disrupt", lambda d: job_set(d)["replicatedJobs"][0]["template"]["spec"]["template"][
        "metadata"].update(annotations={"karpenter.sh/do-not-disrupt": "true"})),
    "drift": ("drift", lambda d: pool(d)["disruption"].pop("budgets")),
    "drift at night": ("drift", lambda d: pool(d)["disruption"]["budgets"][0].update(
        schedule="0 0 * * *", duration="1h")),
    "a size that FSx has not": ("storage-size", lambda d: d["persistent-volume-claim.yaml"]["spec"]["resources"][
        "requests"].update(storage="3600Gi")),
    "no restarts": ("restarts", lambda d: job_set(d).pop("failurePolicy")),
    "a CUDA image": ("image-kind", lambda d: trainer(d).update(image="pytorch/pytorch:2.13.0-cuda13.0-runtime")),
    "a pod that may become root": ("pod-security", lambda d: runtime_pod(d)["containers"][0]["securityContext"].pop(
        "allowPrivilegeEscalation")),
    "two volumes of one name": ("field-value", lambda d: d["directories-job.yaml"]["spec"]["template"]["spec"][
        "volumes"].append({"name": "shared", "emptyDir": {}})),
    "a password in the configuration": ("secret-value", lambda d: d["config-map.yaml"]["data"].update(
        {"config.yaml": "checkpoint: {mirror: 's3://me:hunter2@bucket/x'}"})),
    "a token": ("secret-value", lambda d: trainer(d)["env"].append({"name": "X", "value": "hf_" + 24 * "a"})),
    "no mountname": ("storage-address", lambda d: d["persistent-volume.yaml"]["spec"]["csi"]["volumeAttributes"].pop(
        "mountname")),
    "another file system's name": ("storage-address", lambda d: d["persistent-volume.yaml"]["spec"]["csi"].update(
        volumeHandle="fs-1")),
    "one writer": ("storage-access", lambda d: d["persistent-volume-claim.yaml"]["spec"].update(
        accessModes=["ReadWriteOnce"])),
    "a volume that is not there": ("storage-binding", lambda d: d["persistent-volume-claim.yaml"]["spec"].update(
        volumeName="x")),
    "another class": ("storage-binding", lambda d: d["persistent-volume-claim.yaml"]["spec"].update(
        storageClassName="gp3")),
    "a file system of another region": ("region", lambda d: d["persistent-volume.yaml"]["spec"]["csi"][
        "volumeAttributes"].update(dnsname="fs-0199e5a63bd90f796.fsx.eu-west-1.amazonaws.com")),
    "zones of another region": ("region", lambda d: requirement(d, "topology.kubernetes.io/zone").update(
        values=["eu-west-1a"])),
    "an image of another region": ("region", lambda d: trainer(d).update(
        image="123456789012.dkr.ecr.eu-west-1.amazonaws.com/aliquot:0.1.0")),
    "reserved without a reservation": ("reservation", lambda d: requirement(d, "karpenter.sh/capacity-type").update(
        values=["reserved"])),
    "arm64 nodes": ("architecture", lambda d: (requirement(d, TYPE).update(values=["r8g.8xlarge"]),
                                             requirement(d, "kubernetes.io/arch").update(values=["arm64"]))),
    "an arm64 image": ("architecture", lambda d: trainer(d).update(image="aliquot:0.1.0-arm64")),
    "huge pages": ("request-too-large", lambda d: both(d, "hugepages-2Mi", "5120Mi")),
    "a namespace without outgoing traffic": ("network-policy", lambda d: d.update(x=deny("Egress"))),
    "a namespace without incoming traffic": ("network-policy", lambda d: (
        d.pop("network-policy.yaml"), d.update(x=deny("Ingress")))),
    "another pool by Karpenter's label": ("node-selector", lambda d: pod(d)["nodeSelector"].update(
        {"karpenter.sh/nodepool": "another"})),
    "an API key": ("secret-value", lambda d: trainer(d)["env"].append({"name": "WANDB_API_KEY", "value": "0123"})),
    "another runtime than that of the directory": ("runtime", lambda d: d["train-job.yaml"]["spec"][
        "runtimeRef"].update(name="llama3-8")),
    "no subnet": ("storage-subnet", lambda d: d.update(x={
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "x"},
        "provisioner": "fsx.csi.aws.com", "mountOptions": ["flock"]})),
    "no lock": ("storage-lock", lambda d: d["persistent-volume.yaml"]["spec"].pop("mountOptions")),
    "a PodGroup for the default scheduler": ("gang-scheduling", lambda d: d["training-runtime.yaml"]["spec"].update(
        podGroupPolicy={"volcano": {}})),
    "an odd size": ("storage-size", lambda d: d["persistent-volume-claim.yaml"]["spec"]["resources"]["requests"].update(
        storage="1000Gi")),
}  # fmt: skip


GPU_MISTAKES: dict[str, tuple[str, Callable[[Documents], Any]]] = {
    "the default limit of locked memory": ("locked-memory", lambda d: node_class(d).pop("userData")),
    "a script without a limit": ("locked-memory", lambda d: node_class(d).update(userData="#!/bin/bash\ntrue\n")),
    "four processes on one GPU": ("processes", lambda d: trainer(d).update(numProcPerNode=4)),
    "no label of GPU nodes": ("gpu-label", lambda d: pool(d)["template"]["metadata"]["labels"].pop(
        "nvidia.com/gpu.present")),
    "a disk as small as its default": ("volume-size", lambda d: node_class(d).pop("blockDeviceMappings")),
    "TCP without a message": ("efa-unused", lambda d: trainer(d).update(
        env=[each for each in trainer(d)["env"] if each["name"] != "NCCL_NET"])),
}  # fmt: skip


@pytest.mark.parametrize("mistake", [*MISTAKES, *GPU_MISTAKES])
def test_check_finds_a_mistake(mistake: str) -> None:
    job = cpu_job() if mistake in MISTAKES else gpu_job()
    rule, change = (MISTAKES | GPU_MISTAKES)[mistake]
    change(found := documents(job))
    assert rule in rules(check_manifests(manifests_of(found), job))


def test_reserved_nodes() -> None:
    job = cpu_job(capacity=["reserved"], capacity_reservation="cr-0123456789abcdef0")
    found = documents(job)
    assert node_class(found)["capacityReservationSelectorTerms"] == [{"id": "cr-0123456789abcdef0"}]
    assert check_job_of_config(job) == []
    for changes in ({"capacity": ["reserved"]}, {"capacity_reservation": "cr-0123456789abcdef0"}):
        with pytest.raises(ValueError, match="belong together"):
            cpu_job(**changes)


@needs_crds
@pytest.mark.parametrize(
    "trainer, scheduler, policy, name",
    [
        ("2.1", "coscheduling", {"scheduleTimeoutSeconds": 600}, "scheduler-plugins-scheduler"),
        ("2.3", "volcano", {}, "volcano"),
    ],
)
def test_gang_scheduling(trainer: str, scheduler: str, policy: dict[str, int], name: str) -> None:
    """The scheduler and the priority of the pods are in the runtime, for jobs of others, too."""
    job = cpu_job(gang_scheduling=scheduler, priority_class="high", trainer=trainer)
    assert check_job_of_config(job) == []
    for found in (documents(job)["training-runtime.yaml"], cluster_training_runtime(job)):
        assert found["spec"]["podGroupPolicy"] == {scheduler: policy}
        spec = runtime_pod({"training-runtime.yaml": found})
        assert (spec["schedulerName"], spec["priorityClassName"]) == (name, "high")
        assert is_custom(found) and problems(found, trainer) == []
    with pytest.raises(ValueError, match="all nodes or none, and"):
        cpu_job(gang_scheduling=scheduler, nodes="2:4")


def test_storage_class_with_s3() -> None:
    storage = dynamic_storage() | {"deployment_type": "SCRATCH_2", "s3_import_path": "s3://chats/data"}
    job = cpu_job(storage={**storage, "s3_export_path": "s3://chats/results"})
    assert documents(job)["storage-class.yaml"]["parameters"]["s3ExportPath"] == "s3://chats/results"
    assert not errors(check_job_of_config(job))
    for wrong in ({"s3_export_path": "s3://other/x"}, {"deployment_type": "PERSISTENT_2"}):
        with pytest.raises(ValueError, match="s3_"):
            cpu_job(storage={**storage, **wrong})


def test_node_config_of_a_node_class() -> None:
    """nodeadm reads numbers as floating point: the limits must be exact, and one of the two lists would replace."""
    values = yaml.safe_load(node_class(documents(gpu_job()))["userData"])
    limits = values["spec"]["containerd"]["baseRuntimeSpec"]["process"]["rlimits"]
    assert {each["type"] for each in limits} == {"RLIMIT_NOFILE", "RLIMIT_MEMLOCK"}
    assert all(int(float(each[key])) == each[key] < 2**63 for each in limits for key in ("soft", "hard"))
    assert node_class(documents(gpu_job(user_data="#!/bin/sh\n")))["userData"] == "#!/bin/sh\n"
    assert "userData" not in node_class(documents(gpu_job(ami="bottlerocket@v1.50.0")))


CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "checkpoints on one disk": (
        "storage-safety",
        {"storage": {**cluster_section()["storage"], "deployment_type": "SCRATCH_2"}},
        {},
    ),
    "never resumes": ("resume", {}, {"checkpoint": {"resume": "never", "every": 10}}),
    "never saves": ("no-checkpoints", {}, {"checkpoint": {"every": 0}}),
    "data beside the config": ("not-shared", {}, {"data": {"path": "texts/*.txt"}}),
    "data elsewhere": ("not-shared", {}, {"data": {"path": "/home/me/texts"}}),
    "a model elsewhere": ("not-shared", {}, {"model": {"path": "/models/llama"}}),
    "texts to evaluate on beside the config": (
        "not-shared",
        {},
        {"data": {"path": "stdlib", "eval_path": ["/fsx/a.txt", "b.txt"]}},
    ),
    "a tokenizer elsewhere": (
        "not-shared",
        {},
        {"data": {"path": "/fsx/a.txt", "tokenizer": "/home/me/tokenizer.json"}},
    ),
    "a tokenizer beside the config": ("not-shared", {}, {"data": {"path": "/fsx/a.txt", "tokenizer": "./tokenizer"}}),
    "a checkpoint elsewhere": ("not-shared", {}, {"checkpoint": {"every": 10, "resume": "/runs/x/step-00000100"}}),
    "a checkpoint beside the config": (
        "not-shared",
        {},
        {"checkpoint": {"every": 10, "resume": "runs/x/step-00000100"}},
    ),
    "spot with a long grace": ("grace", {"capacity": ["spot"]}, {"checkpoint": {"every": 10, "grace_s": 300}}),
    "a mirror elsewhere": ("not-shared", {}, {"checkpoint": {"every": 10, "mirror": "file:///backup"}}),
    "a chat template beside the config": (
        "not-shared",
        {},
        {"data": {"path": "/fsx/a.txt", "chat_template": "c.jinja"}},
    ),
    "data in S3 without an identity": ("credentials", {}, {"data": {"path": "s3://bucket/texts/*.jsonl"}}),
    "results beside the file system": ("not-shared", {}, {"run": {"name": "x", "directory": "../x"}}),
    "a cache that nobody may write to": (
        "not-shared",
        {},
        {"data": {"path": "stdlib", "cache_directory": "/var/cache"}},
    ),
    "a mirror without an identity": ("credentials", {}, {"checkpoint": {"every": 10, "mirror": "s3://bucket/runs"}}),
    "processors of two kinds": ("unequal-nodes", {"instance_types": ["r7i.8xlarge", "r8i.8xlarge"]}, {}),
    "a file system of one zone": ("zone-spread", {"zone": None}, {}),
    "metrics that nobody reaches": ("network-policy", {}, {"observe": {"prometheus": 9400}}),
    "results elsewhere": ("not-shared", {}, {"run": {"name": "x", "directory": "/var/runs/x"}}),
    "a gated model without a token": ("credentials", {"huggingface_secret": None}, {}),
    "Weights & Biases without a key": (
        "credentials",
        {"image_extras": ["wandb"]},
        {"observe": {"report_to": ["wandb"]}},
    ),
    "Weights & Biases without its package": (
        "image-packages",
        {"secrets": {"WANDB_API_KEY": {"name": "wandb"}}},
        {"observe": {"report_to": ["wandb"]}},
    ),
    "a bucket of Google without its package": ("image-packages", {}, {"data": {"path": "gs://bucket/texts/*.jsonl"}}),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_check_finds_mistake_of_the_config(case: str) -> None:
    rule, cluster, sections = CONFIGS[case]
    job = describe(config(cluster_section(**cluster), **sections), plan())
    assert rule in rules(check_job_of_config(job))


def test_check_uses_planned_saves() -> None:
    slow = check_job_of_config(describe(config(), plan(save_s=80.0)))
    assert [(each.rule, each.level) for each in slow] == [("grace", "warning")]
    often = check_job_of_config(describe(config(), plan(save_s=60.0, step_s=0.5)))
    assert [(each.rule, each.fix) for each in often] == [
        ("storage-speed", "checkpoint.every: at least 120, or a faster file system")
    ]
    large = check_job_of_config(describe(config(), plan(checkpoint_bytes=500 * GIB)))
    assert rules(large) == {"storage-size"}


SMALL, STDLIB = {"config": LLAMA}, {"path": "stdlib", "tokenizer_vocab_size": 2048}


@pytest.mark.parametrize("type_, per_tib", [("SCRATCH_2", 100), ("PERSISTENT_2", 250)])
def test_saves_are_as_fast_as_the_file_system(type_: str, per_tib: int) -> None:
    storage = cluster_section()["storage"] | {"deployment_type": type_, "throughput_mb_per_tib": 250, "size_gib": 2048}
    settings = config(cluster_section(storage=storage), model=SMALL, data=STDLIB)
    planned = instance_planner(placed(settings))("r7i.8xlarge", 4)
    assert planned.storage_bytes_per_s == 2 * per_tib * 1e6
    assert planned.save_s == planned.checkpoint_bytes / planned.storage_bytes_per_s
    claimed = cluster_section(storage={"kind": "claim", "claim": "own"})
    own = placed(config(claimed, model=SMALL, data=STDLIB))
    assert instance_planner(own)("r7i.8xlarge", 4).storage_bytes_per_s == 2e9


@pytest.mark.parametrize("nodes", [64, 256])
def test_many_nodes(nodes: int) -> None:
    """A step of 256 nodes is short, so that saves follow each other faster than the file system writes them."""
    planned = plan(nodes=nodes, step_s=12.5 * 4 / nodes, save_s=80.0)
    job = describe(config(cluster_section(nodes=nodes)), planned)
    assert {each.where for each in check_job_of_config(job)} == {"checkpoint.every"}
    found = documents(job)
    assert rules(check_manifests(manifests_of(found))) == {"storage-speed"}  # the limits of the pool are large enough
    pool(found)["limits"].update(cpu=str((nodes - 1) * 32))
    assert rules(check_manifests(manifests_of(found))) == {"pool-limit", "storage-speed"}


def test_grace_period_is_checked_against_the_mounted_config() -> None:
    found = documents(describe(config(checkpoint={"every": 10, "grace_s": 300}), plan()))
    assert check_manifests(manifests_of(found)) == []
    pod(found).update(terminationGracePeriodSeconds=200)
    assert rules(check_manifests(manifests_of(found))) == {"grace"}


def test_hub_id_of_a_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta-llama" / "Meta-Llama-3-8B").mkdir(parents=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    sections = {"data": {"path": "stdlib", "tokenizer": "tokenizer.json"}}
    found = check_job_of_config(describe(config(**sections), plan()))
    assert {each.where for each in found if each.rule == "not-shared"} == {"model.path", "data.tokenizer"}
    monkeypatch.chdir("/")
    assert check_job_of_config(describe(config(**sections), plan())) == []


def test_spot_without_checkpoints_is_an_error() -> None:
    job = describe(config(cluster_section(capacity=["spot"]), checkpoint={"every": 0}), plan())
    assert "no-checkpoints" in errors(check_job_of_config(job))


def test_planned_shared_memory_is_checked() -> None:
    job = describe(config(), plan(shm_bytes_per_node=8 * GIB))
    assert check_job_of_config(job) == []
    found = documents(job)
    pod(found)["volumes"].pop()
    pod(found)["containers"][0]["volumeMounts"].pop()
    assert "shm" in errors(check_manifests(manifests_of(found), job))


def test_gpus_without_efa_on_several_nodes() -> None:
    assert rules(check_job_of_config(gpu_job(efa="none"))) == {"efa-unused"}
    once_a_step = gpu_job("host")  # over TCP
    assert once_a_step.efa_interfaces == 0 and check_job_of_config(once_a_step) == []


@pytest.mark.parametrize(
    ("types", "planned", "words"),
    [
        (["c7i.8xlarge"], {}, r"needs 76\.00 GiB a node.*can have 55\.84 GiB"),
        (
            ["r7i.8xlarge"], {"limit_bytes_per_node": 40 * GIB},
            r"needs 76\.00 GiB a node.*its ranks may have 40\.00 GiB: .*shard\.memory",
        ),
        (["r7i.8xlarge", "r7i.16xlarge"], {}, "differ in vCPUs"),
        (["p4d.24xlarge", "p4de.24xlarge"], {"device": "cuda"}, "differ in bytes of a GPU"),
        (["trn1.2xlarge"], {}, r"trn1\.2xlarge is sold for accelerators"),
        (["g6e.8xlarge"], {}, "is a GPU type"),
        (["r7i.8xlarg"], {}, r"nearest: r7i\.8xlarge"),
        (["g6e.8xlarge"], {"device": "cuda"}, r"2 ranks a node, g6e\.8xlarge has 1 GPU"),
    ],
)  # fmt: skip
def test_refused_before_rendering(types: list[str], planned: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        describe(config(cluster_section(instance_types=types)), plan(**planned))


def test_plan_has_the_resources_of_its_pod() -> None:
    """Else `plan --instance` and `instances --fits` say that it fits, and `render` that it does not."""
    job = cpu_job(daemonset_memory_mib=4096, daemonset_cpu_millicores=20_000)
    machine = limit_to_pod(Machine.from_instance("r7i.8xlarge"), job.config)
    assert (machine.memory_bytes, machine.cores) == (job.memory_bytes, job.cpus)


def test_pods_leave_the_huge_pages_of_efa() -> None:
    job, over_tcp = (gpu_job(instance_types=["g6.8xlarge"], efa=efa) for efa in ("auto", "none"))
    karpenters = 118_312 - 512  # MiB of the node, less the daemonsets'
    assert (over_tcp.memory_bytes >> 20, job.memory_bytes >> 20) == (karpenters, karpenters - 2454)
    for each in (job, over_tcp):
        assert limit_to_pod(Machine.from_instance("g6.8xlarge"), each.config).memory_bytes == each.memory_bytes
    found = documents(job)
    both(found, "memory", f"{karpenters}Mi")
    assert "request-too-large" in errors(check_manifests(manifests_of(found)))


@pytest.mark.parametrize("path", ["/", "/tmp", "/etc", "/etc/aliquot/", "/fsx/../tmp"])
def test_the_file_system_hides_nothing(path: str) -> None:
    with pytest.raises(ValueError, match=r"storage\.mount_path"):
        config(cluster_section(storage={**cluster_section()["storage"], "mount_path": path}))


@pytest.mark.parametrize("nodes, most", [(1, 48), (10, 48), (11, 47), ("2:101", 46)])
def test_job_names_leave_room_for_pod_names(nodes: int | str, most: int) -> None:
    last = str(int(str(nodes).rpartition(":")[2]) - 1)
    assert len(f"{most * 'a'}-node-0-{last}-abcde") == 63
    config(cluster_section(nodes=nodes, name=most * "a"), train={"global_batch_size": 202})
    with pytest.raises(ValueError, match=f"at most {most}"):
        config(cluster_section(nodes=nodes, name=(most + 1) * "a"), train={"global_batch_size": 202})


def test_check_reports_concerns_of_the_plan() -> None:
    """Random weights of 8 B parameters, and a step that mostly waits for the network."""
    made = plan(disk_read_bytes=0, waiting_factor=109.2, bottleneck="network-bound 109.2x")
    messages = [each.message for each in check_job_of_config(describe(config(), made)) if each.rule == "plan"]
    assert len(messages) == 2 and "random weights" in messages[0] and "109.2x" in messages[1]
    assert "1 of 16 cores" in plan(ranks_per_node=1, threads_per_rank=1).concerns[0]
    assert plan().concerns == [] and plan(disk_read_bytes=0, parameters=10**7).concerns == []


def test_every_rule_has_a_test_or_asks_live() -> None:
    live = {"security-group", "subnet", "secret", "operator", "versions", "refused-by-server", "quota", "permission"}
    live |= {"addresses", "vcpu-quota", "aws-resource", "queue", "priority-class", "service-account", "image-pull"}
    tested = {rule for rule, _ in [*MISTAKES.values(), *GPU_MISTAKES.values()]}
    tested |= {rule for rule, _, _ in [*CONFIGS.values(), *SITUATIONS.values()] if rule is not None}
    elsewhere = {"discontinued", "not-judged", "plan", "storage-speed"}
    assert set(RULES) - live - tested == elsewhere


def test_a_kustomization_says_what_is_applied(tmp_path: Path) -> None:
    write(render(cpu_job(), "0.1.0"), tmp_path)
    (tmp_path / "other.yaml").write_text("kind: Unlisted\n")
    assert check_manifests(read_manifests(tmp_path)) == []
    listing = tmp_path / "kustomization.yaml"
    listing.write_text(listing.read_text().replace("  - training-runtime.yaml\n", ""))
    assert {"runtime"} == errors(check_manifests(read_manifests(tmp_path)))
    (tmp_path / "config-map.yaml").unlink()
    with pytest.raises(ManifestError, match=r"kustomization lists config-map\.yaml, which is not here"):
        read_manifests(tmp_path)


@pytest.mark.parametrize(
    "capacity, grace_s, save_s, fix",
    [
        ("on-demand", 60, 70, "checkpoint.grace_s: at least 83"),
        ("spot", 60, 70, "checkpoint.grace_s: at least 83"),
        ("spot", 300, 70, "checkpoint.grace_s: 90"),
        ("spot", 90, 200, "save more often"),
        ("spot", 300, 200, "save more often"),
    ],
)
def test_advice_about_grace_goes_round_in_no_circle(capacity: str, grace_s: int, save_s: float, fix: str) -> None:
    settings = config(cluster_section(capacity=[capacity]), checkpoint={"every": 9000, "grace_s": grace_s})
    job = describe(settings, plan(save_s=save_s, save_steps=9000, step_s=12.5, nodes=4))
    (advice,) = (each.fix for each in check_job_of_config(job) if each.rule == "grace")
    assert advice.startswith(fix)


def test_places_are_lines() -> None:
    text = "# a comment\n---\n" + to_yaml(documents(cpu_job())["node-pool.yaml"]) + "---\n# nothing\n"
    (manifest,) = parse_manifests(text, "x.yaml")
    assert str(manifest) == "x.yaml:3 NodePool/llama3-8b"
    with pytest.raises(UserError, match=r"x\.yaml:3: not valid YAML"):
        list(parse_manifests("a: 1\nb: [\n", "x.yaml"))
    for text in ("a: 1\n", "kind: List\nitems: [a]\n", "kind: List\nitems: [{a: 1}]\n"):
        with pytest.raises(UserError, match="`kind` is missing"):
            list(parse_manifests(text, "x.yaml"))


@pytest.mark.parametrize(
    "text",
    ["kind: List\nitems: a\n", "kind: &a [*a]\n", "kind: 2026-99-99\n", "kind: !!bool x\n", "kind: " + "[" * 3000],
    ids=["items", "alias", "date", "tag", "depth"],
)
def test_no_yaml_is_a_traceback(text: str) -> None:
    with pytest.raises(UserError, match=r"^x\.yaml"):
        list(parse_manifests(text, "x.yaml"))


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything below `value`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from nodes(inner)


SPOILED = [None, True, 7, 10**30, -1.5, "", "x", "1e999", [], ["x"], [None], [[]], {}, {"x": "y"}, {1: None}]


GOOD = {
    (make, trainer): documents(make(trainer=trainer, **({"storage": dynamic_storage()} if make is gpu_job else {})))
    for make in (cpu_job, gpu_job)
    for trainer in TRAINERS
}


@settings(max_examples=examples(100), derandomize=True)
@given(st.data(), st.sampled_from(list(GOOD)))
def test_whatever_is_spoiled_nothing_breaks(data: st.DataObject, which: Any) -> None:
    """Any nodes of good manifests replaced by anything."""
    found = copy.deepcopy(GOOD[which])
    for _ in range(data.draw(st.integers(1, 3))):
        document = found[data.draw(st.sampled_from(sorted(found)))]
        container, key = data.draw(st.sampled_from(list(nodes(document))))
        container[key] = copy.deepcopy(data.draw(st.sampled_from(SPOILED)))
    manifests = [ManifestObject(document, name) for name, document in found.items()]
    check_manifests(manifests, cpu_job())
