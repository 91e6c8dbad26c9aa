"""Describe the Kubernetes job for a config and its plan: pod resources, node types, disk space and names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aliquot.catalogue.instances import InstanceType, instance
from aliquot.cluster.manifests import Document
from aliquot.cluster.node_pool_view import allocatable_disk_bytes
from aliquot.cluster.quantity import GIB, MIB
from aliquot.config.cluster_section import ClusterSection
from aliquot.config.schema import RunConfig
from aliquot.config.section import refuse
from aliquot.core.errors import ClusterError
from aliquot.core.number_format import count_of
from aliquot.planner.plan import Plan

EFA = "vpc.amazonaws.com/efa"
GPU = "nvidia.com/gpu"
AMX_TAINT = "intel.com/amx"
POOL_LABEL = "aliquot.io/pool"

LOGS_BYTES = 2 * GIB  # disk space of a pod in addition to its scratch space
_SYSTEM_BYTES = 30 * GIB  # space on a node's EBS volume for the system, images and logs
_IMAGES_BYTES = 10 * GIB  # space on local disks for images and logs
_NAME_LENGTH = 40
# Fields of InstanceType that must be equal for all instance types of a job, with their names in errors.
_EQUAL = {
    "arch": "architecture", "vcpus": "vCPUs", "gpus": "GPUs", "gpu_name": "GPU", "gpu_memory_bytes": "bytes of a GPU",
    "efa_interfaces": "EFA interfaces", "amx": "AMX",
}  # fmt: skip
GRACE_MARGIN_S = 30  # seconds between checkpoint.grace_s, the trainer's deadline, and SIGKILL by the kubelet


@dataclass(frozen=True)
class Job:
    """A TrainJob with one pod per node. Every node has one of the instance types `types`, which are equally large."""

    name: str
    config: RunConfig
    section: ClusterSection
    plan: Plan
    types: tuple[InstanceType, ...]
    cpus: int  # number of whole CPUs of a pod, as request and as limit
    memory_bytes: int  # memory of a pod, as request and as limit; /dev/shm counts against the limit
    shm_bytes: int  # size limit of /dev/shm; 0: the container's default of 64 MiB is enough
    gpus: int
    efa_interfaces: int
    grace_s: int
    scratch_bytes: int  # disk space of a node for optimizer states that do not fit into memory
    local_disks: bool  # whether scratch space is on local NVMe disks, not on the node's EBS volume
    is_proof: bool = False  # whether the pods compare the nodes with the plan, instead of training

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": self.name, "app.kubernetes.io/managed-by": "aliquot"}

    @property
    def taint(self) -> dict[str, str]:
        """The taint that keeps all other pods away from the job's nodes."""
        key = GPU if self.gpus else AMX_TAINT if self.types[0].amx else POOL_LABEL
        return {"key": key, "value": "present", "effect": "NoSchedule"}

    @property
    def claim_name(self) -> str:
        return self.section.storage.claim or f"{self.name}-fsx"

    def manifest(
        self, api_version: str, kind: str, name: str | None = None, labels: dict[str, str] | None = None,
        namespaced: bool = True, **fields: object,
    ) -> Document:  # fmt: skip
        """Make a Kubernetes object with the job's labels and `labels`.

        Args:
            name: name of the object, by default the job's name.
            namespaced: whether the kind has a namespace; the object then gets the job's namespace.
            fields: further top-level fields, such as `spec`.
        """
        metadata = {
            "name": name or self.name,
            **({"namespace": self.section.namespace} if namespaced else {}),
            "labels": self.labels | (labels or {}),
        }
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}


def describe(config: RunConfig, plan: Plan, least: Plan | None = None) -> Job:
    """Describe the job for `plan`. Raises UserError if the plan cannot run on the configured instance types.

    Args:
        least: for an elastic job, the plan with the smallest number of nodes, which must fit, too.
    """
    section = cluster_section(config)
    types = tuple(instance(name) for name in section.instance_types)
    _check_equal(types)
    gpus = _gpus(types[0], plan)
    if plan.nodes != section.most_nodes:
        raise ClusterError(f"the plan is for {plan.nodes} nodes, cluster.nodes is {section.nodes}")
    uses_nccl = gpus > 0 and plan.engine != "host"  # only NCCL uses EFA; gloo uses TCP
    efa_interfaces = types[0].efa_interfaces if uses_nccl and section.may_use_efa else 0
    cpus = min(section.pod_cpus(item.allocatable_cpu_millicores) for item in types)
    memory = min(section.pod_memory_bytes(item.schedulable_bytes(efa_interfaces > 0)) for item in types)
    plans = [plan, *([] if least is None else [least])]
    plan = replace(
        plan,
        shm_bytes_per_node=max(item.shm_bytes_per_node for item in plans),
        scratch_bytes_per_node=max(item.scratch_bytes_per_node for item in plans),
    )
    shm = -(-plan.shm_bytes_per_node // MIB) * MIB
    if cpus < 1 or memory < MIB:
        raise ClusterError(f"{types[0].name} has nothing left for a pod beside the node's daemonsets")
    for item in plans:
        _check_memory(item, types[0], memory, f"with {item.nodes} nodes " if least is not None else "")
    return Job(
        name=section.name or job_name(config.run.name),
        config=config,
        section=section,
        plan=plan,
        types=types,
        cpus=cpus,
        memory_bytes=memory,
        shm_bytes=shm,
        gpus=gpus,
        efa_interfaces=efa_interfaces,
        scratch_bytes=_scratch(section, types, plan),
        local_disks=plan.scratch_bytes_per_node > 0 and all(item.local_nvme_bytes for item in types),
        grace_s=-int(-config.checkpoint.grace_s // 1) + GRACE_MARGIN_S,
    )


def _check_memory(plan: Plan, node: InstanceType, memory_bytes: int, when: str) -> None:
    on_cpu, shm = plan.device == "cpu", -(-plan.shm_bytes_per_node // MIB) * MIB
    needed = plan.peak_bytes_per_rank * plan.ranks_per_node + plan.beside_bytes + shm
    refuse(
        (
            on_cpu and needed > memory_bytes,
            f"{when}the plan needs {needed / GIB:.2f} GiB a node ({plan.peak.name}); a pod on {node.name} can have"
            f" {memory_bytes / GIB:.2f} GiB: take more nodes or a larger type (aliquot instances --fits CONFIG)",
        ),
        (
            on_cpu and not plan.fits,  # shard.memory is smaller than the pod's memory
            f"{when}the plan needs {needed / GIB:.2f} GiB a node ({plan.peak.name}), and its"
            f" ranks may have {plan.limit_bytes_per_node / GIB:.2f} GiB: more nodes, or a larger shard.memory",
        ),
        (
            not plan.fits,
            f"{when}the plan does not fit {node.name}: a rank needs {plan.peak_bytes_per_rank / GIB:.2f} GiB of"
            f" {plan.limit_bytes / GIB:.2f} GiB of GPU memory, and {plan.host_peak_bytes_per_rank / GIB:.2f} GiB of"
            f" {plan.host_limit_bytes / GIB:.2f} GiB of the machine's",
        ),
        error=ClusterError,
    )


def cluster_section(config: RunConfig) -> ClusterSection:
    if config.cluster is None:
        raise ClusterError("this config has no `cluster:` section; see docs/tutorials/eks.md")
    return config.cluster


def placed(config: RunConfig) -> RunConfig:
    """Return `config` for plans on this machine.

    It has the nodes and ranks per node that its cluster section sets, instead of those of `launch`, and a model that
    this machine can read.
    """
    section = cluster_section(config)
    is_elsewhere = config.model.path is not None and section.model_directory is not None
    model = config.model.model_copy(update={"path": str(section.model_directory)} if is_elsewhere else {})
    ranks = {} if section.ranks_per_node == "auto" else {"ranks": section.ranks_per_node}
    launch = config.launch.model_copy(update={"nodes": section.nodes, "node_rank": 0, **ranks})
    return config.model_copy(update={"launch": launch, "model": model})


def job_name(run_name: str) -> str:
    """Derive the job's name from the run's name: a DNS label of at most 40 characters that begins with a letter.

    Kubernetes limits the length of pod names, which contain the job's name.
    """
    label = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}"
    if len(label) > _NAME_LENGTH:  # the digest distinguishes long names that begin alike
        label = f"{label[: _NAME_LENGTH - 7].strip('-')}-{hashlib.sha256(run_name.encode()).hexdigest()[:6]}"
    return label.strip("-")


def _check_equal(types: Sequence[InstanceType]) -> None:
    first = types[0]
    for node_type in types[1:]:
        for name, what in _EQUAL.items():
            value, other = getattr(first, name), getattr(node_type, name)
            if value != other:
                raise ClusterError(
                    f"cluster.instance_types: {first.name} and {node_type.name} differ in {what} ({value} and {other});"
                    " the ranks of one job need equal nodes"
                )


def _scratch(section: ClusterSection, types: Sequence[InstanceType], plan: Plan) -> int:
    """Return the scratch space of a node, 2 % above the plan. Raises ClusterError if the node's disks are too small."""
    if not plan.scratch_bytes_per_node:
        return 0
    needed = -(-plan.scratch_bytes_per_node * 51 // 50 // MIB) * MIB
    local = min(node_type.local_nvme_bytes for node_type in types)
    reserved = _IMAGES_BYTES if local else _SYSTEM_BYTES
    available = allocatable_disk_bytes(local or section.volume_gib * GIB) - reserved
    what = f"the disks of {types[0].name} leave" if local else "cluster.volume_gib leaves"
    refuse(
        (
            needed > available,
            f"shard.offload: disk puts {needed / GIB:.0f} GiB on each node, and {what}"
            f" {max(0, available) / GIB:.0f} GiB: take a type with larger disks, or a larger volume",
        ),
        error=ClusterError,
    )
    return needed


def _gpus(node: InstanceType, plan: Plan) -> int:
    """Return the number of GPUs that a pod requests. Raises ClusterError if the plan and the node type do not match."""
    on_cpu, ranks = plan.device == "cpu", plan.ranks_per_node
    refuse(
        (
            on_cpu and node.gpus and not node.has_old_gpu,
            f"the plan computes on CPUs, and {node.name} is a GPU type: set launch.device: cuda",
        ),
        (
            on_cpu and node.has_unusable_accelerator,
            f"{node.name} is sold for accelerators that aliquot does not use: take a CPU or GPU type",
        ),
        (
            not on_cpu and ranks > node.gpus,
            f"the plan has {ranks} ranks a node, {node.name} has {count_of(node.gpus, 'GPU')}",
        ),
        error=ClusterError,
    )
    return 0 if on_cpu else ranks
