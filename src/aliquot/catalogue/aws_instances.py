"""EC2 types as AWS describes them now, in the region of the user's credentials. Prices come from the catalogue."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from aliquot.catalogue.instances import (
    InstanceType,
    allocatable_cpu_millicores,
    allocatable_memory_bytes,
    has_amx,
    instances,
)
from aliquot.core.errors import InstanceError, MissingToolError

_MIB = 1 << 20
_ARCH = {"x86_64": "amd64", "arm64": "arm64"}
_MAX_PODS_SMALL, _MAX_PODS_LARGE = 110, 250  # kubelet's bound below and above 30 vCPUs, where ENIs allow more


def live_instances() -> list[InstanceType]:
    """Ask AWS for all types. Raises UserError without boto3, credentials, a region or the permission."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise MissingToolError("--live needs boto3: pip install 'aliquot[cluster]'") from None
    try:
        pages = boto3.client("ec2").get_paginator("describe_instance_types").paginate()
        described = [description for page in pages for description in page["InstanceTypes"]]
    except ClientError as error:
        raise InstanceError(
            f"AWS refused {error.operation_name}: {error.response.get('Error', {}).get('Code')}"
        ) from None
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
    cpu, network, gpus = (
        description["VCpuInfo"],
        description["NetworkInfo"],
        description.get("GpuInfo", {}).get("Gpus", []),
    )
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
    """Return intel, amd or aws. Older answers of AWS name no manufacturer, so that the family decides."""
    named = str(description.get("ProcessorInfo", {}).get("Manufacturer", "")).lower()
    for maker in ("intel", "amd", "aws"):
        if maker in named:
            return maker
    if arch == "arm64":
        return "aws"
    family = description["InstanceType"].partition(".")[0]
    return "amd" if re.match(r"[a-z]+\d+a", family) else "intel"


def _max_pods(network: dict[str, Any], vcpus: int) -> int:
    """Return the pods that the addresses of the VPC CNI allow, up to the limit of kubelet."""
    addresses = network.get("MaximumNetworkInterfaces", 1) * (network.get("Ipv4AddressesPerInterface", 2) - 1) + 2
    return min(int(addresses), _MAX_PODS_SMALL if vcpus < 30 else _MAX_PODS_LARGE)


def _network(network: dict[str, Any]) -> int | None:
    """Return the sustained bytes per second of all network cards; None if AWS names no figure."""
    rates = [card.get("BaselineBandwidthInGbps") for card in network.get("NetworkCards", [])]
    known = [rate for rate in rates if rate is not None]
    return int(sum(known) * 1e9 / 8) if known else None
