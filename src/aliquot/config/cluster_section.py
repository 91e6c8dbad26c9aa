"""The `cluster` section: what cannot be planned about a run on EKS, with Karpenter and Kubeflow Trainer.

Sizes, requests, processes and threads are not here: they follow from the plan and from the instance types.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from aliquot.config.launch_section import NodeCount, SectionWithNodes
from aliquot.config.section import Section

_MIB = 1 << 20
# In pods.
_TAKEN = ("/tmp", "/etc/aliquot", "/offload", "/dev/shm", "/opt/aliquot", "/proc", "/sys", "/usr", "/lib", "/bin")
_POD_NAME = 63  # letters of a DNS label
_SCRATCH_MB_PER_TIB = 100  # written; 200 are read

# RFC 1123 labels and subdomains; a TrainJob's name begins with a letter and becomes part of pod names and DNS names.
Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Subdomain = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f:]+$", max_length=1024)]


def max_job_name_length(nodes: int) -> int:
    """Letters: JobSet names the last pod NAME-node-0-INDEX-abcde, which must be a DNS label."""
    return _POD_NAME - len(f"-node-0-{nodes - 1}-abcde")


class StorageSection(Section):
    """A shared file system for data, cache and checkpoints: an existing claim, an existing FSx, or a new one."""

    kind: Literal["fsx-static", "fsx-dynamic", "claim"] = Field(
        "fsx-static",
        description="fsx-static: an FSx for Lustre that exists; fsx-dynamic: made with the claim; claim: one you made.",
    )
    mount_path: AbsolutePath = "/fsx"
    size_gib: PositiveInt = Field(1200, description="Capacity; FSx for Lustre has 1200 GiB, or multiples of 2400.")
    claim: Name | None = Field(None, description="kind claim: the PersistentVolumeClaim's name.")
    file_system_id: Annotated[str, Field(pattern=r"^fs-[0-9a-f]+$")] | None = None
    dnsname: Subdomain | None = Field(None, description="fsx-static: as `aws fsx describe-file-systems` says.")
    mountname: Annotated[str, Field(pattern=r"^[a-z0-9]{1,16}$")] | None = Field(
        None, description="fsx-static: LustreConfiguration.MountName; a missing one would silently become `fsx`."
    )
    subnet_id: Annotated[str, Field(pattern=r"^subnet-[0-9a-f]+$")] | None = Field(None, description="fsx-dynamic.")
    security_group_ids: list[Annotated[str, Field(pattern=r"^sg-[0-9a-f]+$")]] = Field(
        [], description="fsx-dynamic: groups that allow TCP 988 and 1018-1023 among themselves."
    )
    deployment_type: Literal["SCRATCH_2", "PERSISTENT_2"] = Field(
        "SCRATCH_2", description="Plans reckon with how fast it is written to; SCRATCH_2: 100 MB/s a TiB."
    )
    throughput_mb_per_tib: Literal[125, 250, 500, 1000] = Field(125, description="PERSISTENT_2 only.")

    @property
    def written_bytes_per_s(self) -> float | None:
        """By all nodes together, for as long as they like; None: of somebody's claim nothing is known.

        Source: FSx for Lustre's guide, "Performance characteristics of SSD and HDD storage classes".
        """
        if self.kind == "claim":
            return None
        a_tib = self.throughput_mb_per_tib if self.deployment_type == "PERSISTENT_2" else _SCRATCH_MB_PER_TIB
        return a_tib * 1e6 * self.size_gib / 1024

    @model_validator(mode="after")
    def mounted_beside(self) -> Self:
        path = PurePosixPath(self.mount_path)
        if ".." in path.parts:
            raise ValueError(f"storage.mount_path is {self.mount_path}: give it without `..`")
        for taken in _TAKEN:
            if PurePosixPath(taken).is_relative_to(path):
                raise ValueError(f"storage.mount_path is {self.mount_path}, and {taken} is taken: for example /fsx")
        return self

    @model_validator(mode="after")
    def complete(self) -> Self:
        needed = {
            "claim": ("claim",),
            "fsx-static": ("file_system_id", "dnsname", "mountname"),
            "fsx-dynamic": ("subnet_id", "security_group_ids"),
        }[self.kind]
        missing = [name for name in needed if not getattr(self, name)]
        if missing:
            raise ValueError(f"storage of kind {self.kind} needs {', '.join(missing)}")
        if self.kind == "fsx-dynamic" and self.size_gib != 1200 and self.size_gib % 2400:
            raise ValueError(f"storage.size_gib is {self.size_gib}; FSx for Lustre has 1200, or multiples of 2400")
        return self


class SecretSection(Section):
    """A key of a Secret that exists in the namespace; its value never comes near a manifest."""

    name: Subdomain
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$")] = "token"


class ClusterSection(SectionWithNodes):
    """Where the run's manifests are to work. `aliquot cluster render` writes them, `check` checks them."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=50)] | None = Field(
        None, description="Of the TrainJob and all that belongs to it; pods add to it. Default: from run.name."
    )
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)] = "default"
    create_namespace: bool = Field(False, description="Render the Namespace, too.")
    trainer: Literal["2.1", "2.3"] = Field(
        "2.3", description="Kubeflow Trainer's version: 2.1 has podTemplateOverrides, later ones runtimePatches."
    )
    image: str = Field(min_length=1, pattern=r"^[^\s]+$", max_length=512, description="With aliquot in it.")
    image_pull_policy: Literal["Always", "IfNotPresent"] = "IfNotPresent"
    nodes: NodeCount = Field(1, description="MIN:MAX, for example 2:4: the job goes on while some are lost or new.")
    ranks_per_node: PositiveInt | Literal["auto"] = Field("auto", description="auto: as planned.")
    instance_types: list[Annotated[str, Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")]] = Field(
        min_length=1, description="Types that may serve; alike in cores, memory and GPUs. The plan is for the first."
    )
    capacity: list[Literal["on-demand", "spot"]] = Field(["on-demand"], min_length=1)
    zone: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=63)] | None = Field(
        None, description="All nodes there, as FSx. Default: any one zone."
    )
    placement_group: Annotated[str, Field(pattern=r"^\S+$", max_length=255)] | None = Field(
        None,
        description="Its name, or its id (pg-...): nodes close together, where a connection between two of them has 10"
        " Gbit/s and not 5.",
    )
    discovery: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        description="The tag karpenter.sh/discovery of subnets and security groups; usually the cluster's name."
    )
    node_role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_+=,.@-]+$", max_length=64)] = Field(
        description="IAM role of the nodes, by name."
    )
    ami: Annotated[str, Field(pattern=r"^(al2023@v[0-9]{8}|bottlerocket@v[0-9.]+)$")] = Field(
        description="Pinned alias, e.g. al2023@v20260903; Karpenter takes the standard or NVIDIA image by the type."
    )
    volume_gib: PositiveInt = Field(100, description="EBS root volume (gp3): image, logs.")
    user_data: str | None = Field(None, description="For the nodes at boot; what pods need belongs in the image.")
    efa: Literal["auto", "none"] = Field("auto", description="auto: NCCL over EFA where the types have it.")
    daemonset_cpu_millicores: NonNegativeInt = Field(500, description="Left to the daemonsets of each node.")
    daemonset_memory_mib: NonNegativeInt = Field(512, description="Left to the daemonsets of each node.")
    max_restarts: NonNegativeInt = Field(5, description="After a crash; stops with everything saved are not counted.")
    service_account: Subdomain | None = Field(
        None, description="Of the pods: with an IAM role of its own they may read and write S3 (checkpoint.mirror)."
    )
    huggingface_secret: SecretSection | None = Field(None, description="Holds the token for gated models and data.")
    queue: Subdomain | None = Field(None, description="A Kueue LocalQueue.")
    storage: StorageSection

    @model_validator(mode="after")
    def pods_have_names(self) -> Self:
        if self.name is not None and len(self.name) > (most := max_job_name_length(self.most_nodes)):
            raise ValueError(f"cluster.name has {len(self.name)} letters; with {self.nodes} nodes at most {most}")
        return self

    def pod_cpus(self, allocatable_millicores: int) -> int:
        """Whole CPUs that are left to a pod beside the daemonsets of its node; not above 0: nothing is."""
        return (allocatable_millicores - self.daemonset_cpu_millicores) // 1000

    def pod_memory_bytes(self, allocatable_bytes: int) -> int:
        """Bytes, whole MiB; not above 0: nothing is left."""
        return (allocatable_bytes // _MIB - self.daemonset_memory_mib) * _MIB
