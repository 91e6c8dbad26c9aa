"""The catalogue of EC2 instance types: resources that pods can request, AMX, EFA, GPUs, and prices.

A catalogue ships with the package (ec2-instances.json, with source and date). `aliquot instances --refresh` stores
newer types and prices of a region in the user's cache (see aws_answers.py), and every command then uses these.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, Predicate

from aliquot.core.errors import InstanceError, writing
from aliquot.core.small_files import cache_root, publish_text, read_small_file

# Price of a spot node as a fraction of on-demand, if it is unknown. For years, it has been 30 to 50 %.
SPOT_FRACTION = 0.4
SPOT_NOTICE_S = 120  # from the notice of a spot interruption to the end of the node
SPOT_GRACE_S = 90  # of the notice, for the trainer; the rest is for the end of the pod

_MIB = 1 << 20

# The node image reserves 110 huge pages of 2 MiB per CPU and one more, if the node has EFA interfaces. Sources: the
# script of AWS' package efa-config, quoted in bottlerocket-core-kit pull request 141; `hugepages-2Mi` of EKS nodes with
# EFA is 42242Mi on p5.48xlarge and 21122Mi on p4de.24xlarge. On types with EFA, hypervisor and kernel take less than
# 4 % of the memory: 2.3 % of p5.48xlarge, 2.8 % of g5.8xlarge, 3.3 % of p3dn.24xlarge.
_EFA_PAGES_PER_CPU, _HUGE_PAGE_BYTES = 110, 2 * _MIB
_VISIBLE_PERCENT = 96
_EVICTION_BYTES = 100 * _MIB  # of memory that kubelet keeps free

# Intel AMX came with the 4th generation of Xeon Scalable (Sapphire Rapids). On EC2 these processors are in the Intel
# types of generation 7 and above (c7i, m7i, r7i, i7i, u7i, c8i, ... and their flex, n, b, d, z variants).
# Families with accelerators count generations by accelerator; the families below have a CPU with AMX.
# Source: the processor column of AWS' "Amazon EC2 instance type specifications".
_AMX_GENERATION = 7
_AMX_ACCELERATED = frozenset({"p5en", "p6-b200", "p6-b300", "trn2"})

_OLD_GPUS = frozenset({"k80", "m60", "t4", "t4g", "v100"})
# What a GPU, or a family, lacks. For the driver of g7 see release v20260714 of amazon-eks-ami, with the way to build
# another image in its doc/usage/g7-ami.md.
_GPU_CONCERNS = {
    "g7": "GPUs of g7 need NVIDIA's driver 595, and the images of EKS have 580: take another type, or build an image",
    **dict.fromkeys(_OLD_GPUS, "GPUs before Ampere are too old: take a type with A10G, L4, A100 or newer GPUs"),
}
# Families with Trainium, Inferentia, Gaudi, Qualcomm, video, FPGA or AMD accelerators, or with fractions of a GPU.
_OTHER_ACCELERATORS = re.compile(r"^(trn|inf|dl|vt|f\d|g4ad|gr?6f)")


# What a refreshed catalogue may hold. pydantic checks these limits; a type without sense would break every command.
_Name = Annotated[str, Predicate(re.compile(r"[\w.-]{1,64}", re.ASCII).fullmatch)]
_Words = Annotated[str, Predicate(re.compile(r"[\w. -]{1,64}", re.ASCII).fullmatch)]
_Count = Annotated[int, Ge(0), Le(10**9)]
_Bytes = Annotated[int, Gt(0), Le(1 << 60)]
_Usd = Annotated[float, Gt(0), Le(10**6)]


@dataclass(frozen=True)
class InstanceType:
    """One EC2 type. Sizes are in bytes, rates in bytes per second; `gpu_memory_bytes` is per GPU."""

    name: _Name
    arch: _Name  # in the words of Kubernetes
    cpu_manufacturer: _Name
    generation: _Count
    vcpus: Annotated[int, Gt(0), Le(10**6)]
    physical_cores: Annotated[int, Gt(0), Le(10**6)]
    clock_mhz: _Count  # 0: unknown
    memory_bytes: _Bytes
    allocatable_memory_bytes: _Bytes  # sum of requests of a node's pods, on AL2023 with Karpenter's defaults
    allocatable_cpu_millicores: _Count
    max_pods: _Count
    network_bytes_per_s: _Bytes | None  # sustained; None: AWS publishes no number
    efa_interfaces: _Count
    amx: bool
    gpus: _Count
    gpu_name: _Words | None
    gpu_memory_bytes: _Bytes | None
    local_nvme_bytes: Annotated[int, Ge(0), Le(1 << 60)]
    usd_per_hour: _Usd | None  # on demand, in the catalogue's region; None: not sold there
    spot_usd_per_hour: _Usd | None = None  # median of the region's zones; None: unknown

    def schedulable_bytes(self, uses_efa: bool) -> int:
        """Return the memory that the pods of a node can request together.

        Huge pages for EFA are no memory for pods. Karpenter does not subtract them: it would start node after node for
        a pod that Karpenter's estimate admits and no node can hold.

        Args:
            uses_efa: the pods request EFA interfaces; otherwise Karpenter starts the node without them.
        """
        if not (uses_efa and self.efa_interfaces):
            return self.allocatable_memory_bytes
        huge_pages = (_EFA_PAGES_PER_CPU * self.vcpus + 1) * _HUGE_PAGE_BYTES
        visible = self.memory_bytes * _VISIBLE_PERCENT // 100 - huge_pages
        return min(self.allocatable_memory_bytes, visible - _EVICTION_BYTES - kubelet_memory_bytes(self.max_pods))

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_scarce(self) -> bool:
        """Whether nodes are rarely free: AWS sells most of them as Capacity Blocks and reservations."""
        return self.name.startswith(("p5", "p6"))

    @property
    def first_card_has_efa(self) -> bool:
        """Whether network card 0 has EFA, if others have it: github.com/aws/aws-parallelcluster/issues/7143."""
        return self.family != "p6-b300"

    @property
    def gpu_concern(self) -> str | None:
        """A line about GPUs that the software of the pods or of the nodes cannot use as it should."""
        return _GPU_CONCERNS.get(self.family) or _GPU_CONCERNS.get(self.gpu_name or "")

    @property
    def on_spot(self) -> bool:
        """Whether AWS sells the type on spot (SupportedUsageClasses in describe-instance-types)."""
        return not self.name.startswith("hpc")

    def spot_price(self, fraction: float | None = None) -> float | None:
        """Return the USD per hour on spot: `fraction` of on-demand, or else the region's price, or else an estimate."""
        if fraction is None and self.spot_usd_per_hour is not None:
            return self.spot_usd_per_hour
        return None if self.usd_per_hour is None else self.usd_per_hour * (fraction or SPOT_FRACTION)

    @property
    def shares_cpus(self) -> bool:
        """Whether the type is burstable: it has its full CPU speed only for hours, not for days."""
        return re.match(r"t\d|\w+-flex\.", self.name) is not None

    @property
    def has_old_gpu(self) -> bool:
        """Whether the GPUs lack kernels for attention (compute capability 7)."""
        return self.gpu_name in _OLD_GPUS

    @property
    def has_unusable_accelerator(self) -> bool:
        """Whether most of the price is for hardware that is neither a CPU nor a whole NVIDIA GPU."""
        return self.has_old_gpu or bool(_OTHER_ACCELERATORS.match(self.family))

    @property
    def size(self) -> str:
        return self.name.partition(".")[2]


@dataclass(frozen=True)
class Catalogue:
    """The types of EC2, with the prices of one region on one day."""

    region: str
    date: str  # ISO 8601
    types: tuple[InstanceType, ...]

    @property
    def source(self) -> str:
        """Region and date of the prices, for tables: `us-east-1, 2026-07-20`."""
        return f"{self.region}, {self.date}"


@cache
def catalogue() -> Catalogue:
    """Return the catalogue that the user has refreshed, or else the shipped catalogue.

    Shipped types that the refreshed region lacks stay known, without a price.
    """
    shipped, refreshed = shipped_catalogue(), _read(refreshed_path())
    if refreshed is None:
        return shipped
    types = {ec2.name: replace(ec2, usd_per_hour=None) for ec2 in shipped.types}
    return replace(refreshed, types=tuple((types | {ec2.name: ec2 for ec2 in refreshed.types}).values()))


def refreshed_path() -> Path:
    """Return the file of the refreshed catalogue in the user's cache."""
    return cache_root() / "ec2-instances.json"


def instance(name: str) -> InstanceType:
    """Return the type of this name. Raises UserError, with the nearest names, for an unknown name."""
    known = {ec2.name: ec2 for ec2 in instances()}
    if name not in known:
        near = difflib.get_close_matches(name, known, 3, 0.75)
        hint = f"; nearest: {', '.join(near)}" if near else "; see `aliquot instances`"
        raise InstanceError(f"EC2 instance type {name!r} is not in the catalogue of {catalogue().date}{hint}")
    return known[name]


def instances() -> tuple[InstanceType, ...]:
    """Return all types, sorted by family and size."""
    return catalogue().types


def allocatable_memory_bytes(memory_bytes: int, max_pods: int, arch: str) -> int:
    """Return the bytes of a node that Karpenter offers to pods by default (vmMemoryOverheadPercent 0.075).

    The hypervisor takes 7.5 % (Graviton first 64 MiB more), kubelet 255 MiB + 11 MiB a pod, eviction 100 MiB.
    Source: Karpenter AWS provider, pkg/providers/instancetype/types.go.
    """
    visible = memory_bytes // _MIB - (64 if arch == "arm64" else 0)
    return (visible - -(-visible * 75 // 1000)) * _MIB - _EVICTION_BYTES - kubelet_memory_bytes(max_pods)


def kubelet_memory_bytes(max_pods: int) -> int:
    """Return the memory that kubelet reserves for itself by default."""
    return (255 + 11 * max_pods) * _MIB


def allocatable_cpu_millicores(vcpus: int) -> int:
    """Return the CPU of a node that kubelet offers to pods.

    Kubelet reserves 6 % of the first core, 1 % of the second, 0.5 % of two more, 0.25 % of the others.
    """
    return int(vcpus * 1000 - sum((60, 10, 5, 5)[:vcpus]) - 2.5 * max(0, vcpus - 4))


def has_amx(family: str, cpu_manufacturer: str, generation: int) -> bool:
    """Whether the processor of these types has Intel AMX."""
    return cpu_manufacturer == "intel" and (generation >= _AMX_GENERATION or family in _AMX_ACCELERATED)


@cache
def shipped_catalogue() -> Catalogue:
    data = json.loads(files("aliquot.catalogue").joinpath("ec2-instances.json").read_text())
    types = tuple(InstanceType(**dict(zip(data["columns"], row, strict=True))) for row in data["rows"])
    return Catalogue(data["region"], data["prices_date"], types)


def store(refreshed: Catalogue) -> None:
    """Store a refreshed catalogue in the user's cache, and use it from now on. Raises StorageError."""
    path = refreshed_path()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_text(path, json.dumps(asdict(refreshed)))
    catalogue.cache_clear()


def _read(path: Path) -> Catalogue | None:
    """Return a refreshed catalogue; None if the file is missing, damaged, or of another version of aliquot."""
    try:
        data = read_small_file(path)
        from pydantic import TypeAdapter  # slow to import, and most users have no refreshed catalogue

        return TypeAdapter(Catalogue).validate_json(data)
    except (OSError, ValueError):
        return None
