"""EC2 instance types: resources that pods can request, AMX, EFA, GPUs, and prices.

The data ship with the package (ec2-instances.json, with source and date); this module never calls AWS.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from aliquot.core.errors import InstanceError

PRICES_DATE = "2026-07-20"
PRICES_REGION = "us-east-1"

_MIB = 1 << 20

# Intel AMX came with the 4th generation of Xeon Scalable (Sapphire Rapids). On EC2 these processors are in the Intel
# types of generation 7 and above (c7i, m7i, r7i, i7i, u7i, c8i, ... and their flex, n, b, d, z variants).
# Accelerated families count generations by accelerator; the families below have such a host CPU.
# Source: the processor column of AWS' "Amazon EC2 instance type specifications".
_AMX_GENERATION = 7
_AMX_ACCELERATED = frozenset({"p5en", "p6-b200", "p6-b300", "trn2"})

_SHARES_CPUS = re.compile(r"^t\d|^\w+-flex\.")
_NOT_ON_SPOT = re.compile(r"^hpc")  # their SupportedUsageClasses list on-demand only (describe-instance-types)
# Trainium, Inferentia, Gaudi, Qualcomm, video, FPGAs, AMD's GPUs, parts of a GPU.
_OTHER_ACCELERATORS = re.compile(r"^(trn|inf|dl|vt|f\d|g4ad|gr?6f)")

# One thread a core: Arm, AMD from generation 7 on, the hpc families, and the first Intel generations.
_AMD_WITHOUT_THREADS_GENERATION = 7
_OLD_WITHOUT_THREADS = frozenset({"c1", "m1", "m2", "t1", "t2"})


@dataclass(frozen=True)
class InstanceType:
    """One EC2 type. Sizes in bytes, rates in bytes per second; a GPU's memory is that of one GPU."""

    name: str
    arch: str  # amd64 | arm64
    cpu_manufacturer: str  # intel | amd | aws
    generation: int  # the number in the family's name
    vcpus: int
    physical_cores: int
    clock_mhz: int  # 0: unknown
    memory_bytes: int
    allocatable_memory_bytes: int  # that all pods of a node may request together, on AL2023 with Karpenter's defaults
    allocatable_cpu_millicores: int
    max_pods: int
    network_bytes_per_s: int | None  # sustained; None: AWS names no figure
    efa_interfaces: int
    amx: bool
    gpus: int
    gpu_name: str | None
    gpu_memory_bytes: int | None
    local_nvme_bytes: int
    usd_per_hour: float | None  # on demand, PRICES_REGION, PRICES_DATE; None: not sold there

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    @property
    def on_spot(self) -> bool:
        return not _NOT_ON_SPOT.match(self.name)

    @property
    def shares_cpus(self) -> bool:
        """Whether the type has its full CPU speed only for hours, not for days."""
        return bool(_SHARES_CPUS.match(self.name))

    @property
    def has_unusable_accelerator(self) -> bool:
        """Whether most of the price is for hardware that is neither a CPU nor a whole NVIDIA GPU."""
        return bool(_OTHER_ACCELERATORS.match(self.family))

    @property
    def size(self) -> str:
        return self.name.partition(".")[2]


def instance(name: str) -> InstanceType:
    """Return the type of this name. Raises UserError, with the nearest names, for an unknown name."""
    known = _catalogue()
    if name not in known:
        near = difflib.get_close_matches(name, known, 3, 0.75)
        hint = f"; nearest: {', '.join(near)}" if near else "; see `aliquot instances`"
        raise InstanceError(f"EC2 instance type {name!r} is not in the catalogue of {PRICES_DATE}{hint}")
    return known[name]


def instances() -> tuple[InstanceType, ...]:
    """Return all types, in the order of families and sizes."""
    return tuple(_catalogue().values())


def allocatable_memory_bytes(memory_bytes: int, max_pods: int, arch: str) -> int:
    """Return the bytes of a node that Karpenter offers to pods by default (vmMemoryOverheadPercent 0.075).

    The hypervisor takes 7.5 % (Graviton first 64 MiB more), kubelet 255 MiB + 11 MiB a pod, eviction 100 MiB.
    Source: Karpenter AWS provider, pkg/providers/instancetype/types.go.
    """
    visible = memory_bytes // _MIB - (64 if arch == "arm64" else 0)
    return (visible - -(-visible * 75 // 1000) - (255 + 11 * max_pods) - 100) * _MIB


def allocatable_cpu_millicores(vcpus: int) -> int:
    """Return the CPU of a node that kubelet offers to pods.

    Kubelet reserves 6 % of the first core, 1 % of the second, 0.5 % of two more, 0.25 % of the others.
    """
    reserved = sum((60, 10, 5, 5)[:vcpus]) + 2.5 * max(0, vcpus - 4)
    return int(vcpus * 1000 - reserved)


def has_amx(family: str, cpu_manufacturer: str, generation: int) -> bool:
    """Whether the processor of these types has Intel AMX."""
    return cpu_manufacturer == "intel" and (generation >= _AMX_GENERATION or family in _AMX_ACCELERATED)


@cache
def _catalogue() -> dict[str, InstanceType]:
    data = json.loads(files("aliquot.catalogue").joinpath("ec2-instances.json").read_text())
    types = (_instance(dict(zip(data["columns"], row, strict=True))) for row in data["rows"])
    return {ec2.name: ec2 for ec2 in types}


def _instance(row: dict[str, Any]) -> InstanceType:
    family = row["name"].partition(".")[0]
    gpu_memory_mib, network_mbps = row["gpu_memory_mib"], row["network_mbps"]
    return InstanceType(
        **{field.name: row[field.name] for field in fields(InstanceType) if field.name in row},
        physical_cores=_physical_cores(row, family),
        memory_bytes=row["memory_mib"] * _MIB,
        allocatable_memory_bytes=row["allocatable_memory_mib"] * _MIB,
        network_bytes_per_s=None if network_mbps is None else network_mbps * 10**6 // 8,
        amx=has_amx(family, row["cpu_manufacturer"], row["generation"]),
        gpu_memory_bytes=None if gpu_memory_mib is None else gpu_memory_mib * _MIB,
        local_nvme_bytes=(row["local_nvme_gb"] or 0) * 10**9,
    )


def _physical_cores(row: dict[str, Any], family: str) -> int:
    amd_core = row["cpu_manufacturer"] == "amd" and row["generation"] >= _AMD_WITHOUT_THREADS_GENERATION
    if row["arch"] == "arm64" or amd_core or family.startswith("hpc") or family in _OLD_WITHOUT_THREADS:
        return int(row["vcpus"])
    return max(1, int(row["vcpus"]) // 2)


def dollars(amount: float) -> str:
    """Format an amount of money: `7,728`, `18.32`, `0.0034`."""
    if amount >= 1000:
        return f"{amount:,.0f}"
    decimals = 2 if amount == 0 else max(2, 1 - math.floor(math.log10(amount)))
    return f"{amount:.{decimals}f}"
