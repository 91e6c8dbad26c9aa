"""The `cluster` section: settings of a job on EKS, with Karpenter and Kubeflow Trainer, that users must choose.

The plan and the instance types determine sizes, resource requests, processes and threads.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from aliquot.config.section import PATH, NodeCount, Section, SectionWithNodes, refuse

_MIB = 1 << 20
# Mount paths that pods use already.
_POD_PATHS = ["/tmp", "/etc/aliquot", "/offload", "/dev/shm", "/opt/aliquot", "/proc", "/sys", "/usr", "/lib", "/bin"]
_MAX_POD_NAME = 63  # letters of a DNS label
_SCRATCH_MB_PER_TIB = 100  # of writing; reading has 200
# USD in us-east-1, 2026-07, per hour: an EKS control plane in standard support, two m7i.large for the operators, and a
# NAT gateway. Per month: a GiB of FSx for Lustre, for SCRATCH_2 (None) and for PERSISTENT_2 by MB/s per TiB.
_CLUSTER_USD = 0.10 + 2 * 0.1008 + 0.045
_FSX_USD = {None: 0.140, 125: 0.145, 250: 0.210, 500: 0.340, 1000: 0.600}
_HOURS_A_MONTH = 730

# RFC 1123 labels and subdomains; a TrainJob's name begins with a letter and becomes part of pod names and DNS names.
Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Subdomain = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f:]+$", max_length=1024)]


def max_job_name_length(nodes: int) -> int:
    """Return the maximum length of a job name, so that the pod names which JobSet derives from it are DNS labels.

    JobSet names the last pod NAME-node-0-INDEX-abcde.
    """
    return _MAX_POD_NAME - len(f"-node-0-{nodes - 1}-abcde")


class StorageSection(Section):
    """A shared file system for data, cache and checkpoints: an existing claim, an existing FSx, or a new one."""

    kind: Literal["fsx-static", "fsx-dynamic", "claim"] = "fsx-static"
    """fsx-static: an existing FSx for Lustre; fsx-dynamic: created with the claim; claim: an existing claim."""
    mount_path: AbsolutePath = "/fsx"
    size_gib: PositiveInt = 1200
    """Capacity: 1200 GiB or a multiple of 2400 for FSx for Lustre."""
    claim: Name | None = None
    """kind claim: the name of the PersistentVolumeClaim."""
    file_system_id: Annotated[str, Field(pattern=r"^fs-[0-9a-f]+$")] | None = None
    dnsname: Subdomain | None = None
    """fsx-static: DNSName in `aws fsx describe-file-systems`."""
    mountname: Annotated[str, Field(pattern=r"^[a-z0-9]{1,16}$")] | None = None
    """fsx-static: LustreConfiguration.MountName there; without it the driver would silently mount `fsx`."""
    subnet_id: Annotated[str, Field(pattern=r"^subnet-[0-9a-f]+$")] | None = None
    """fsx-dynamic: the subnet of the file system."""
    security_group_ids: list[Annotated[str, Field(pattern=r"^sg-[0-9a-f]+$")]] = Field([])
    """fsx-dynamic: groups that allow TCP 988 and 1018-1023 among themselves."""
    deployment_type: Literal["SCRATCH_2", "PERSISTENT_2"] = "SCRATCH_2"
    """FSx deployment type, whose write speed plans use; SCRATCH_2: 100 MB/s per TiB."""
    throughput_mb_per_tib: Literal[125, 250, 500, 1000] = 125
    """PERSISTENT_2 only."""

    s3_import_path: Annotated[str, Field(pattern=r"^s3://.+")] | None = None
    """fsx-dynamic with SCRATCH_2: objects below this URL appear as files."""
    s3_export_path: Annotated[str, Field(pattern=r"^s3://.+")] | None = None
    """fsx-dynamic with s3_import_path, in the same bucket: where `lfs hsm_archive` copies files to."""

    @property
    def written_bytes_per_s(self) -> float | None:
        """Return the sustained write speed for all nodes together; None for an existing claim, whose speed is unknown.

        Source: FSx for Lustre's guide, "Performance characteristics of SSD and HDD storage classes".
        """
        if self.kind == "claim":
            return None
        per_tib = self.throughput_mb_per_tib if self.deployment_type == "PERSISTENT_2" else _SCRATCH_MB_PER_TIB
        return per_tib * 1e6 * self.size_gib / 1024

    @property
    def usd_per_hour(self) -> float:
        """Return the price of the file system on demand; 0 for an existing claim, whose kind is unknown."""
        if self.kind == "claim":
            return 0.0
        rate = self.throughput_mb_per_tib if self.deployment_type == "PERSISTENT_2" else None
        return _FSX_USD[rate] * self.size_gib / _HOURS_A_MONTH

    @model_validator(mode="after")
    def check_path_and_kind(self) -> Self:
        path = PurePosixPath(self.mount_path)
        needed = {
            "claim": ("claim",),
            "fsx-static": ("file_system_id", "dnsname", "mountname"),
            "fsx-dynamic": ("subnet_id", "security_group_ids"),
        }[self.kind]
        missing = [name for name in needed if not getattr(self, name)]
        source, target = (path and path.split("/")[2] for path in (self.s3_import_path, self.s3_export_path))  # buckets
        refuse(
            (".." in path.parts, f"storage.mount_path is {self.mount_path}: give it without `..`"),
            *(
                (
                    PurePosixPath(reserved).is_relative_to(path),
                    f"storage.mount_path is {self.mount_path}, but pods use {reserved} already: choose for example"
                    " /fsx",
                )
                for reserved in _POD_PATHS
            ),
            (missing, f"storage of kind {self.kind} needs {', '.join(missing)}"),
            (
                source is not None and (self.kind, self.deployment_type) != ("fsx-dynamic", "SCRATCH_2"),
                "storage.s3_import_path is for fsx-dynamic with SCRATCH_2; PERSISTENT_2 has repository associations",
            ),
            (target not in (None, source), "storage.s3_export_path needs storage.s3_import_path in the same bucket"),
            (
                self.kind == "fsx-dynamic" and self.size_gib != 1200 and self.size_gib % 2400,
                f"storage.size_gib is {self.size_gib}; FSx for Lustre has 1200, or multiples of 2400",
            ),
        )
        return self


class SecretSection(Section):
    """A key of an existing Secret in the namespace; manifests never contain its value."""

    name: Subdomain
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$")] = "token"


class ClusterSection(SectionWithNodes):
    """Settings for the Kubernetes manifests of a run, for `aliquot cluster render` and `aliquot cluster check`."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=50)] | None = None
    """Name of the TrainJob and of its objects. Default: derived from run.name."""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)] = "default"
    create_namespace: bool = False
    """Render the Namespace as well."""
    trainer: Literal["2.1", "2.3"] = "2.3"
    """Kubeflow Trainer's version: 2.1 has podTemplateOverrides, later ones runtimePatches."""
    image: str = Field(min_length=1, pattern=r"^[^\s]+$", max_length=512)
    """Container image with aliquot installed."""
    image_extras: list[Literal["s3", "lora", "deepspeed", "fp8", "wandb", "mlflow", "eval"]] | None = None
    """Extras with which the image was built (--build-arg EXTRAS). Default: those of aliquot's Dockerfiles."""
    image_pull_policy: Literal["Always", "IfNotPresent"] = "IfNotPresent"
    nodes: NodeCount = 1
    """Number of nodes. MIN:MAX, for example 2:4: the job continues while nodes come and go."""
    ranks_per_node: PositiveInt | Literal["auto"] = "auto"
    """auto: the planned number."""
    instance_types: list[Annotated[str, Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")]] = Field(min_length=1)
    """Instance types to choose from, equal in cores, memory and GPUs. The plan is for the first."""
    capacity: list[Literal["on-demand", "spot", "reserved"]] = Field(["on-demand"], min_length=1)
    """reserved: nodes of capacity_reservation, as p5 and p6 types are usually had."""
    capacity_reservation: Annotated[str, Field(pattern=r"^cr-[0-9a-z]+$")] | None = None
    """Id of an On-Demand Capacity Reservation or of a Capacity Block for ML."""
    zone: Annotated[str, Field(pattern=r"^[a-z0-9-]+-[0-9]+[a-z]$", max_length=63)] | None = None
    """Zone of all nodes, which must be the zone of FSx. Default: any single zone."""
    placement_group: Annotated[str, Field(pattern=r"^\S+$", max_length=255)] | None = None
    """Name or id (pg-...) of a placement group, in which a connection between two nodes has 10 Gbit/s instead of 5."""
    discovery: Annotated[str, Field(min_length=1, max_length=256)]
    """Value of the tag karpenter.sh/discovery of subnets and security groups; usually the cluster's name."""
    node_role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_+=,.@-]+$", max_length=64)]
    """IAM role of the nodes, by name."""
    ami: Annotated[str, Field(pattern=r"^(al2023@v[0-9]{8}|bottlerocket@v[0-9.]+)$")]
    """Pinned AMI alias, e.g. al2023@v20260903; Karpenter takes the standard or the NVIDIA image by the type."""
    volume_gib: PositiveInt = 100
    """Size of the EBS root volume (gp3), for image and logs."""
    user_data: str | None = None
    """User data for nodes at boot. Default on al2023: a NodeConfig with unlimited locked memory and static CPUs."""
    efa: Literal["auto", "none"] = "auto"
    """auto: NCCL over EFA if the instance types have EFA."""
    daemonset_cpu_millicores: NonNegativeInt = 500
    """CPU reserved for the daemonsets of each node."""
    daemonset_memory_mib: NonNegativeInt = 512
    """Memory reserved for the daemonsets of each node."""
    max_restarts: NonNegativeInt = 5
    """Restarts after a crash; a stop that saved everything does not count."""
    service_account: Subdomain | None = None
    """Service account of the pods; its IAM role lets pods read and write S3 (checkpoint.mirror)."""
    huggingface_secret: SecretSection | None = None
    """The token for gated models and data."""
    secrets: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], SecretSection] = Field({})
    """Variables of the pods from keys of Secrets, such as WANDB_API_KEY: {name: wandb, key: token}."""
    queue: Subdomain | None = None
    """Name of a Kueue LocalQueue."""
    gang_scheduling: Literal["coscheduling", "volcano"] | None = None
    """Start all nodes or none, by a scheduler that the cluster has: the plugin coscheduling, or Volcano."""
    priority_class: Subdomain | None = None
    """Name of the PriorityClass of the pods."""
    model_directory: Annotated[Path | None, PATH] = None
    """A directory on this machine with the config.json of model.path, if only the pods see model.path."""
    storage: StorageSection

    @model_validator(mode="after")
    def check_combinations(self) -> Self:
        letters, limit = len(self.name or ""), max_job_name_length(self.most_nodes)
        refuse(
            (
                ("reserved" in self.capacity) != (self.capacity_reservation is not None),
                "cluster.capacity: [reserved] and cluster.capacity_reservation belong together",
            ),
            (
                self.gang_scheduling is not None and self.is_elastic,
                f"cluster.gang_scheduling starts all nodes or none, and cluster.nodes is {self.nodes}",
            ),
            (letters > limit, f"cluster.name has {letters} letters; with {self.nodes} nodes at most {limit}"),
        )
        return self

    @property
    def fees_usd_per_hour(self) -> float:
        """Return what the cluster costs beside the nodes of jobs: EKS, operators, NAT and the file system."""
        return _CLUSTER_USD + self.storage.usd_per_hour

    @property
    def may_use_efa(self) -> bool:
        """Whether NCCL uses EFA if the instance types have it."""
        return self.efa == "auto" and self.most_nodes > 1

    def pod_cpus(self, allocatable_millicores: int) -> int:
        """Return the whole CPUs that a pod can have beside the daemonsets of its node; 0 or less if there are none."""
        return (allocatable_millicores - self.daemonset_cpu_millicores) // 1000

    def pod_memory_bytes(self, allocatable_bytes: int) -> int:
        """Return the memory, in bytes of whole MiB, that a pod can have beside the daemonsets of its node.

        The result is 0 or less if there is none.
        """
        return (allocatable_bytes // _MIB - self.daemonset_memory_mib) * _MIB
