"""Write the parts of a job's pod spec: config, environment variables, volumes, scheduling constraints and security."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from aliquot.cluster.job import LOGS_BYTES, POOL_LABEL, Job
from aliquot.cluster.manifests import Document, compact, literal, to_yaml
from aliquot.cluster.quantity import mebibytes
from aliquot.core.decode import decode_json
from aliquot.core.errors import ClusterError

CONFIG_DIRECTORY = "/etc/aliquot"
CONFIG_FILE = "config.yaml"
RENDERED_FILE = "rendered.json"  # what `cluster check` renders the manifests from again, beside the config
EXPECTED_FILE = "expected.json"  # of a proof: the plan's expectations, as doctor/node_proof.py reads them
USER = 1000  # user id of the trainer in the container image
NODE = "node"  # the name that Trainer requires for the replicated job and for its container
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
JOB_SET = "jobset.sigs.k8s.io/jobset-name"  # label that JobSet gives to pods; the JobSet has the TrainJob's name

_OFFLOAD_DIRECTORY = "/offload"  # mount path of the scratch volume on the node's disk
_ZONE = "topology.kubernetes.io/zone"
_SHARED, _CONFIG, _TEMPORARY, _SHM, _OFFLOAD = "shared", "config", "tmp", "shm", "offload"
_RUNTIME = "aliquot.io/runtime"
_EFA_VARIABLES = {
    # Without huge pages, because a pod would have to request them, and no other program could use them.
    "FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0",
    # With NCCL_NET, a missing plugin ends the job; without it, NCCL would use TCP without a message. The log of INIT
    # and NET names the network at the start.
    "NCCL_NET": "AWS Libfabric", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET",
}  # fmt: skip


def config_map(job: Job) -> Document:
    """Write the ConfigMap with the config for the pods.

    The config has the planned settings, contains the model's config, and places run directory and cache on the shared
    file system.
    """
    config = shipped_config(job)
    section = job.section.model_dump(mode="json", by_alias=True, exclude_unset=True)
    rendered = {"cluster": section, "config": config, "plan": asdict(job.plan)}
    expected = {
        "nodes": job.plan.nodes,
        "network_bytes_per_s": job.plan.network_bytes_per_s,
        "storage_bytes_per_s": job.plan.storage_bytes_per_s,
        "efa_interfaces": job.efa_interfaces,
    }
    files = {RENDERED_FILE: rendered, **({EXPECTED_FILE: expected} if job.is_proof else {})}
    data = {CONFIG_FILE: to_yaml(config), **{name: f"{json.dumps(file, indent=1)}\n" for name, file in files.items()}}
    return job.manifest("v1", "ConfigMap", _config_name(job), data=data)


def _config_name(job: Job) -> str:
    return f"{job.name}-config"


def shipped_config(job: Job) -> dict[str, Any]:
    """Return the config for `aliquot train` in the pods. Raises UserError if model.config names an unreadable file."""
    config, plan, mount = job.config, job.plan, job.section.storage.mount_path
    values = config.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"cluster"})
    for section in ("run", "data", "launch", "shard", "observe"):
        values.setdefault(section, {})
    values["run"].update(name=config.run.name, directory=_below(mount, config.run.directory))
    values["data"]["cache_directory"] = _below(mount, config.data.cache_directory or Path("cache"))
    if isinstance(file := config.model.config, Path):
        try:
            values["model"]["config"] = decode_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ClusterError(f"model.config cannot be read: {error}", file) from None
    values["launch"].update(
        device=plan.device,
        nodes=job.section.nodes if job.section.is_elastic and not job.is_proof else plan.nodes,
        ranks=plan.ranks_per_node,
        threads_per_rank=plan.threads_per_rank,
    )
    values["shard"]["engine"] = plan.engine
    if job.scratch_bytes:
        values["shard"]["offload_directory"] = _OFFLOAD_DIRECTORY
    values["observe"]["console"] = "plain"  # the log of a pod is not a terminal
    return values


def directories(job: Job, any_run: bool = False) -> list[str]:
    """Return the directories to which the trainer writes on the shared file system.

    With `any_run`, the parent of all run directories takes the place of the run directory, for runs of other jobs.
    """
    values = shipped_config(job)
    run_directory = PurePosixPath(values["run"]["directory"])
    written = str(run_directory.parent if any_run else run_directory)
    return [written, values["data"]["cache_directory"], *([_hub_cache(job)] if uses_hub(job) else [])]


def uses_hub(job: Job) -> bool:
    """Return whether the run may use the Hugging Face hub: the name of a model or dataset is no absolute path."""
    config = job.config
    files = [path for _, path in config.data.every_path() if path.startswith("hf://")]
    names = [config.model.path, config.data.tokenizer, *config.data.datasets(), *files]
    return any(name is not None and not name.startswith("/") for name in names)


def _hub_cache(job: Job) -> str:
    return _below(job.section.storage.mount_path, Path("huggingface"))


def _below(mount: str, path: Path) -> str:
    """Return `path` as a path on the shared file system: a relative path is taken as below the mount path."""
    return str(PurePosixPath(mount) / path.as_posix())


def command(job: Job) -> list[str]:
    config = f"{CONFIG_DIRECTORY}/{CONFIG_FILE}"
    if job.is_proof:
        return ["aliquot", "cluster", "proof", config, f"{CONFIG_DIRECTORY}/{EXPECTED_FILE}"]
    return ["aliquot", "train", config]


def environment(job: Job) -> list[Document]:
    """Return the environment variables of a pod, without the PET_* variables, which Trainer's controller sets."""
    token = job.section.huggingface_secret
    variables = compact(
        PYTHONUNBUFFERED="1",
        HOME="/tmp",  # the only directory in which any user may write
        HF_HOME=_hub_cache(job) if uses_hub(job) else None,
        NCCL_SOCKET_IFNAME="^lo,docker" if job.gpus else None,
        **(_EFA_VARIABLES if job.efa_interfaces else {}),
    )
    entries: list[Document] = [{"name": name, "value": literal(value)} for name, value in variables.items()]
    secrets = {**({} if token is None else {"HF_TOKEN": token}), **job.section.secrets}
    keys = {name: {"name": secret.name, "key": secret.key} for name, secret in secrets.items()}
    return entries + [{"name": name, "valueFrom": {"secretKeyRef": key}} for name, key in keys.items()]


def _volumes(job: Job, with_config: bool) -> list[tuple[Document, Document]]:
    """Return the volumes of a pod, and how the trainer mounts each of them."""
    shm = {"medium": "Memory", "sizeLimit": mebibytes(job.shm_bytes)}
    entries: list[tuple[object, str, str, Document]] = [
        (with_config, _CONFIG, CONFIG_DIRECTORY, {"configMap": {"name": _config_name(job)}}),
        (True, _SHARED, job.section.storage.mount_path, {"persistentVolumeClaim": {"claimName": job.claim_name}}),
        (True, _TEMPORARY, "/tmp", {"emptyDir": {"sizeLimit": mebibytes(LOGS_BYTES)}}),
        (job.scratch_bytes, _OFFLOAD, _OFFLOAD_DIRECTORY, {"emptyDir": {"sizeLimit": mebibytes(job.scratch_bytes)}}),
        (job.shm_bytes, _SHM, "/dev/shm", {"emptyDir": shm}),
    ]
    return [
        ({"name": name, **source}, compact(name=name, mountPath=path, readOnly=True if name == _CONFIG else None))
        for is_needed, name, path, source in entries
        if is_needed
    ]


def volumes(job: Job, with_config: bool = True) -> list[Document]:
    return [volume for volume, _ in _volumes(job, with_config)]


def volume_mounts(job: Job, with_config: bool = True) -> list[Document]:
    return [mount for _, mount in _volumes(job, with_config)]


def shared_mount(job: Job) -> Document:
    return {"name": _SHARED, "mountPath": job.section.storage.mount_path}


def shared_volume(job: Job) -> Document:
    return {"name": _SHARED, "persistentVolumeClaim": {"claimName": job.claim_name}}


def node_selector(job: Job) -> dict[str, str]:
    return compact(**{POOL_LABEL: job.name, _ZONE: job.section.zone})


def tolerations(job: Job) -> list[Document]:
    taint = job.taint
    return [{"key": taint["key"], "operator": "Equal", "value": taint["value"], "effect": taint["effect"]}]


def affinity(job: Job, any_job: bool = False) -> Document | None:
    """Return a pod affinity that keeps all nodes of a job in one zone, because a step waits for the slowest link.

    Returns None for one node, and if the config names the zone. With `any_job`, the affinity is for a runtime that
    several jobs share, and applies to each of the jobs separately.
    """
    if job.section.zone is not None or job.plan.nodes == 1:
        return None
    term = compact(
        labelSelector={"matchLabels": pod_labels(job, any_job)},
        matchLabelKeys=[JOB_SET] if any_job else None,
        topologyKey=_ZONE,
    )
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def pod_labels(job: Job, any_job: bool = False) -> dict[str, str]:
    """Return labels that select the job's pods, or with `any_job` the pods of all jobs of the same runtime."""
    return runtime_labels(job) if any_job else {JOB_SET: job.name}


def runtime_labels(job: Job) -> dict[str, str]:
    return {ANCESTOR: "trainer", _RUNTIME: job.name}


def pod_security() -> Document:
    return {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}}


def container_security() -> Document:
    return {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def network_policy(job: Job, any_job: bool = False) -> Document:
    """Write a NetworkPolicy that restricts incoming connections to the job's pods.

    Other pods are blocked because gloo and NCCL do not authenticate peers. The pods of the job reach all ports of each
    other, because gloo and NCCL choose ports at run time. The Prometheus port is open to every pod and node, because
    the address of the Prometheus server is unknown. Outgoing connections (DNS, the hub, S3) are not restricted.

    With `any_job`, the policy applies to all jobs of the same runtime in the namespace, and not only to `job`.
    """
    pods = {"podSelector": {"matchLabels": pod_labels(job, any_job)}}
    port = job.config.observe.prometheus
    open_ports = [] if port is None else [{"ports": [{"protocol": "TCP", "port": port}]}]
    spec = {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}, *open_ports]}
    return job.manifest("networking.k8s.io/v1", "NetworkPolicy", spec=spec)
