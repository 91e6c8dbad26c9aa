"""Write the fields of a job's pods: variables, volumes, placement and security context."""

from __future__ import annotations

from aliquot.cluster.job import Job
from aliquot.cluster.manifest_yaml import Document, compact, literal
from aliquot.cluster.node_manifests import POOL_LABEL, taint
from aliquot.cluster.pod_config import (
    CONFIG_DIRECTORY,
    CONFIG_FILE,
    OFFLOAD_DIRECTORY,
    config_map_name,
    hub_cache,
    uses_hub,
)
from aliquot.cluster.quantity import mebibytes

USER = 1000  # user id in the image
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"

_ZONE = "topology.kubernetes.io/zone"
_SHARED, _CONFIG, _TEMPORARY, _SHM, _OFFLOAD = "shared", "config", "tmp", "shm", "offload"
_JOB_SET = "jobset.sigs.k8s.io/jobset-name"  # label of JobSet; the JobSet has the TrainJob's name
_RUNTIME = "aliquot.io/runtime"


def command() -> list[str]:
    return ["aliquot", "train", f"{CONFIG_DIRECTORY}/{CONFIG_FILE}"]


def environment(job: Job) -> list[Document]:
    """Return the variables of a pod, without the PET_* variables of the controller."""
    variables = {"PYTHONUNBUFFERED": "1", "HOME": "/tmp"}  # the only directory that any user may write to
    if uses_hub(job):
        variables["HF_HOME"] = hub_cache(job)
    if job.gpu_nodes:
        variables["NCCL_SOCKET_IFNAME"] = "^lo,docker"
    if job.efa_interfaces:
        # Huge pages would have to be requested, and no other program could use them.
        variables |= {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0", "NCCL_DEBUG": "WARN"}
    entries: list[Document] = [{"name": name, "value": literal(value)} for name, value in variables.items()]
    if (secret := job.section.huggingface_secret) is not None:
        entries.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}})
    return entries


def volumes(job: Job, with_config: bool = True) -> list[Document]:
    entries: list[Document] = [{"name": _CONFIG, "configMap": {"name": config_map_name(job)}}] if with_config else []
    entries += [shared_volume(job), {"name": _TEMPORARY, "emptyDir": {}}]
    if job.scratch_bytes:
        entries.append({"name": _OFFLOAD, "emptyDir": {"sizeLimit": mebibytes(job.scratch_bytes)}})
    if job.shm_bytes:
        entries.append({"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": mebibytes(job.shm_bytes)}})
    return entries


def volume_mounts(job: Job, with_config: bool = True) -> list[Document]:
    mounts: list[Document] = [{"name": _CONFIG, "mountPath": CONFIG_DIRECTORY, "readOnly": True}] if with_config else []
    mounts += [shared_mount(job), {"name": _TEMPORARY, "mountPath": "/tmp"}]
    if job.scratch_bytes:
        mounts.append({"name": _OFFLOAD, "mountPath": OFFLOAD_DIRECTORY})
    if job.shm_bytes:
        mounts.append({"name": _SHM, "mountPath": "/dev/shm"})
    return mounts


def shared_mount(job: Job) -> Document:
    return {"name": _SHARED, "mountPath": job.section.storage.mount_path}


def claim_name(job: Job) -> str:
    return job.section.storage.claim or f"{job.name}-fsx"


def shared_volume(job: Job) -> Document:
    return {"name": _SHARED, "persistentVolumeClaim": {"claimName": claim_name(job)}}


def node_selector(job: Job) -> dict[str, str]:
    selector = {POOL_LABEL: job.name}
    if job.section.zone is not None:
        selector[_ZONE] = job.section.zone
    return selector


def tolerations(job: Job) -> list[Document]:
    node_taint = taint(job)
    return [
        {"key": node_taint["key"], "operator": "Equal", "value": node_taint["value"], "effect": node_taint["effect"]}
    ]


def affinity(job: Job, any_job: bool = False) -> Document | None:
    """Keep all nodes in one zone, because a step waits for the slowest link. None if the config names the zone.

    Args:
        any_job: for the nodes of any job of the runtime, not of the job with this name.
    """
    if job.section.zone is not None or job.plan.nodes == 1:
        return None
    term = compact(
        labelSelector={"matchLabels": pod_labels(job, any_job)},
        matchLabelKeys=[_JOB_SET] if any_job else None,
        topologyKey=_ZONE,
    )
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def pod_labels(job: Job, any_job: bool = False) -> dict[str, str]:
    """Return labels that identify the job's pods, or with `any_job` the pods of all jobs of the runtime."""
    return runtime_labels(job) if any_job else {_JOB_SET: job.name}


def runtime_labels(job: Job) -> dict[str, str]:
    return {ANCESTOR: "trainer", _RUNTIME: job.name}


def pod_security() -> Document:
    return {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}}


def container_security() -> Document:
    return {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
