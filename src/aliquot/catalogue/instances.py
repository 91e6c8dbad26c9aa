"""The catalogue of EC2 instance types: resources that pods can request, AMX, EFA, GPUs, and prices.

The data ship with the package (ec2-instances.json, with source and date). Only `live_instances` calls AWS.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from aliquot.core.errors import InstanceError, MissingToolError

PRICES_DATE = "2026-07-20"
PRICES_REGION = "us-east-1"

_MIB = 1 << 20
_ARCH = {"x86_64": "amd64", "arm64": "arm64"}
_MAX_PODS_SMALL, _MAX_PODS_LARGE = 110, 250  # kubelet's limit below 30 vCPUs and from 30 on, if ENIs allow more

# Intel AMX came with the 4th generation of Xeon Scalable (Sapphire Rapids). On EC2 these processors are in the Intel
# types of generation 7 and above (c7i, m7i, r7i, i7i, u7i, c8i, ... and their flex, n, b, d, z variants).
# Families with accelerators count generations by accelerator; the families below have a CPU with AMX.
# Source: the processor column of AWS' "Amazon EC2 instance type specifications".
_AMX_GENERATION = 7
_AMX_ACCELERATED = frozenset({"p5en", "p6-b200", "p6-b300", "trn2"})

_SHARES_CPUS = re.compile(r"^t\d|^\w+-flex\.")
_NOT_ON_SPOT = re.compile(r"^hpc")  # their SupportedUsageClasses list on-demand only (describe-instance-types)
# Families with Trainium, Inferentia, Gaudi, Qualcomm, video, FPGA or AMD accelerators, or with fractions of a GPU.
_OTHER_ACCELERATORS = re.compile(r"^(trn|inf|dl|vt|f\d|g4ad|gr?6f)")

# Types with one hardware thread per core: Arm, AMD from generation 7 on, hpc families, and the first Intel generations.
_AMD_WITHOUT_THREADS_GENERATION = 7
_OLD_WITHOUT_THREADS = frozenset({"c1", "m1", "m2", "t1", "t2"})


@dataclass(frozen=True)
class InstanceType:
    """One EC2 type. Sizes are in bytes, rates in bytes per second; `gpu_memory_bytes` is per GPU."""

    name: str
    arch: str  # amd64 | arm64
    cpu_manufacturer: str  # intel | amd | aws
    generation: int  # the number in the family's name
    vcpus: int
    physical_cores: int
    clock_mhz: int  # 0: unknown
    memory_bytes: int
    allocatable_memory_bytes: int  # sum of requests of a node's pods, on AL2023 with Karpenter's defaults
    allocatable_cpu_millicores: int
    max_pods: int
    network_bytes_per_s: int | None  # sustained; None: AWS publishes no number
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
        """Whether the type is burstable: it has its full CPU speed only for hours, not for days."""
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
    """Return all types, sorted by family and size."""
    return tuple(_catalogue().values())


def allocatable_memory_bytes(memory_bytes: int, max_pods: int, arch: str) -> int:
    """Return the bytes of a node that Karpenter offers to pods by default (vmMemoryOverheadPercent 0.075).

    The hypervisor takes 7.5 % (Graviton first 64 MiB more), kubelet 255 MiB + 11 MiB a pod, eviction 100 MiB.
    Source: Karpenter AWS provider, pkg/providers/instancetype/types.go.
    """
    visible = memory_bytes // _MIB - (64 if arch == "arm64" else 0)
    return (visible - -(-visible * 75 // 1000) - 100) * _MIB - kubelet_memory_bytes(max_pods)


def kubelet_memory_bytes(max_pods: int) -> int:
    """Return the memory that kubelet reserves for itself by default."""
    return (255 + 11 * max_pods) * _MIB


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


def live_instances() -> list[InstanceType]:
    """Ask AWS for all types, in the region of the user's credentials; prices come from the catalogue.

    Raises UserError without boto3, credentials, a region or the permission.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise MissingToolError("--live needs boto3: pip install 'aliquot[cluster]'") from None
    try:
        pages = boto3.client("ec2").get_paginator("describe_instance_types").paginate()
        described = [description for page in pages for description in page["InstanceTypes"]]
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code")
        raise InstanceError(f"AWS refused {error.operation_name}: {code}") from None
    except BotoCoreError as error:
        raise InstanceError(f"AWS could not be asked: {error}") from None
    return list(_types(described))


def _types(described: list[dict[str, Any]]) -> Iterator[InstanceType]:
    shipped = {ec2.name: ec2 for ec2 in instances()}
    for description in described:
        name, processor = description["InstanceType"], description.get("ProcessorInfo", {})
        arch = next((_ARCH[arch] for arch in processor.get("SupportedArchitectures", []) if arch in _ARCH), None)
        if arch is None:  # 32-bit and Mac types
            continue
        yield _type(description, name, arch, shipped.get(name))


def _type(description: dict[str, Any], name: str, arch: str, known: InstanceType | None) -> InstanceType:
    cpu, network = description["VCpuInfo"], description["NetworkInfo"]
    gpus = description.get("GpuInfo", {}).get("Gpus", [])
    family = name.partition(".")[0]
    digits = re.search(r"\d+(?!\d*tb)", family)  # u-6tb1 has 6 TiB and is of generation 1
    generation = int(digits.group()) if digits else 0
    maker = _manufacturer(description, arch)
    vcpus, memory_bytes = cpu["DefaultVCpus"], description["MemoryInfo"]["SizeInMiB"] * _MIB
    max_pods = known.max_pods if known is not None else _max_pods(network, vcpus)
    return InstanceType(
        name=name,
        arch=arch,
        cpu_manufacturer=maker,
        generation=generation,
        vcpus=vcpus,
        physical_cores=cpu.get("DefaultCores", vcpus),
        clock_mhz=int(description.get("ProcessorInfo", {}).get("SustainedClockSpeedInGhz", 0) * 1000),
        memory_bytes=memory_bytes,
        allocatable_memory_bytes=allocatable_memory_bytes(memory_bytes, max_pods, arch),
        allocatable_cpu_millicores=allocatable_cpu_millicores(vcpus),
        max_pods=max_pods,
        network_bytes_per_s=_network(network),
        efa_interfaces=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0) if network.get("EfaSupported") else 0,
        amx=has_amx(family, maker, generation),
        gpus=sum(gpu.get("Count", 0) for gpu in gpus),
        gpu_name=gpus[0]["Name"].lower() if gpus else None,
        gpu_memory_bytes=gpus[0].get("MemoryInfo", {}).get("SizeInMiB", 0) * _MIB if gpus else None,
        local_nvme_bytes=description.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0) * 10**9,
        usd_per_hour=None if known is None else known.usd_per_hour,
    )


def _manufacturer(description: dict[str, Any], arch: str) -> str:
    """Return intel, amd or aws. If the answer of AWS names no manufacturer, the name of the family decides."""
    named = str(description.get("ProcessorInfo", {}).get("Manufacturer", "")).lower()
    for maker in ("intel", "amd", "aws"):
        if maker in named:
            return maker
    if arch == "arm64":
        return "aws"
    family = description["InstanceType"].partition(".")[0]
    return "amd" if re.match(r"[a-z]+\d+a", family) else "intel"


def _max_pods(network: dict[str, Any], vcpus: int) -> int:
    """Return the maximum pods of a node: the IP addresses of the VPC CNI, up to the limit of kubelet."""
    addresses = network.get("MaximumNetworkInterfaces", 1) * (network.get("Ipv4AddressesPerInterface", 2) - 1) + 2
    return min(int(addresses), _MAX_PODS_SMALL if vcpus < 30 else _MAX_PODS_LARGE)


def _network(network: dict[str, Any]) -> int | None:
    """Return the sustained bytes per second of all network cards; None if AWS publishes no number."""
    rates = [card.get("BaselineBandwidthInGbps") for card in network.get("NetworkCards", [])]
    known = [rate for rate in rates if rate is not None]
    return int(sum(known) * 1e9 / 8) if known else None


def dollars(amount: float) -> str:
    """Format an amount of money: `7,728`, `18.32`, `0.0034`."""
    if amount >= 1000:
        return f"{amount:,.0f}"
    decimals = 2 if amount == 0 else max(2, 1 - math.floor(math.log10(amount)))
    return f"{amount:.{decimals}f}"
