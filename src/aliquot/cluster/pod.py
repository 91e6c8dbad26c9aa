"""What the pods of a job need beyond their resources: variables, volumes, placement, security."""

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

USER = 1000  # of the image
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"

_ZONE = "topology.kubernetes.io/zone"
_SHARED, _CONFIG, _TEMPORARY, _SHM, _OFFLOAD = "shared", "config", "tmp", "shm", "offload"
_JOB_SET = "jobset.sigs.k8s.io/jobset-name"  # which JobSet gives to each pod; the JobSet has the TrainJob's name
_RUNTIME = "aliquot.io/runtime"


def command() -> list[str]:
    return ["aliquot", "train", f"{CONFIG_DIRECTORY}/{CONFIG_FILE}"]


def environment(job: Job) -> list[Document]:
    """Without the PET_* variables, which the controller sets."""
    variables = {"PYTHONUNBUFFERED": "1", "HOME": "/tmp"}  # the only place that any user may write to
    if uses_hub(job):
        variables["HF_HOME"] = hub_cache(job)
    if job.gpu_nodes:
        variables["NCCL_SOCKET_IFNAME"] = "^lo,docker"
    if job.efa_interfaces:
        # Huge pages would have to be requested and are lost to everything else.
        variables |= {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0", "NCCL_DEBUG": "WARN"}
    found: list[Document] = [{"name": name, "value": literal(value)} for name, value in variables.items()]
    if (secret := job.section.huggingface_secret) is not None:
        found.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}})
    return found


def volumes(job: Job, with_config: bool = True) -> list[Document]:
    found: list[Document] = [{"name": _CONFIG, "configMap": {"name": config_map_name(job)}}] if with_config else []
    found += [shared_volume(job), {"name": _TEMPORARY, "emptyDir": {}}]
    if job.scratch_bytes:
        found.append({"name": _OFFLOAD, "emptyDir": {"sizeLimit": mebibytes(job.scratch_bytes)}})
    if job.shm_bytes:
        found.append({"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": mebibytes(job.shm_bytes)}})
    return found


def volume_mounts(job: Job, with_config: bool = True) -> list[Document]:
    found: list[Document] = [{"name": _CONFIG, "mountPath": CONFIG_DIRECTORY, "readOnly": True}] if with_config else []
    found += [shared_mount(job), {"name": _TEMPORARY, "mountPath": "/tmp"}]
    if job.scratch_bytes:
        found.append({"name": _OFFLOAD, "mountPath": OFFLOAD_DIRECTORY})
    if job.shm_bytes:
        found.append({"name": _SHM, "mountPath": "/dev/shm"})
    return found


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
    own = taint(job)
    return [{"key": own["key"], "operator": "Equal", "value": own["value"], "effect": own["effect"]}]


def affinity(job: Job, any_job: bool = False) -> Document | None:
    """All nodes in one zone, whichever: a step waits for the slowest link. None where the zone is given.

    `any_job`: those of whichever job a pod belongs to, else of the one with this name.
    """
    if job.section.zone is not None or job.plan.nodes == 1:
        return None
    own = compact(
        labelSelector={"matchLabels": pod_labels(job, any_job)},
        matchLabelKeys=[_JOB_SET] if any_job else None,
        topologyKey=_ZONE,
    )
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [own]}}


def pod_labels(job: Job, any_job: bool = False) -> dict[str, str]:
    """Labels that the pods of the job have and no others; `any_job`: those of all jobs of the runtime."""
    return runtime_labels(job) if any_job else {_JOB_SET: job.name}


def runtime_labels(job: Job) -> dict[str, str]:
    return {ANCESTOR: "trainer", _RUNTIME: job.name}


def pod_security() -> Document:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Document:
    return {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
