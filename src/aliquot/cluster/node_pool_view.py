"""View a NodePool as Karpenter does: the EC2 instance types and zones it allows, and labels and disks of its nodes.

Source of the disk sizes: Karpenter AWS provider, pkg/providers/instancetype/types.go.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from aliquot.catalogue.instances import InstanceType, instances
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, select_kinds
from aliquot.cluster.quantity import GIB, parse_bytes

_NUMBER = re.compile(r"^[0-9]{1,18}$")
LABEL_VALUE = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")
_LONGEST_LABEL = 63

TYPE = "node.kubernetes.io/instance-type"
ZONE = "topology.kubernetes.io/zone"
CAPACITY = "karpenter.sh/capacity-type"
POOL_NAME = "karpenter.sh/nodepool"
_PREFIX = "karpenter.k8s.aws/instance-"
_DEFAULT_BYTES = 20 * GIB  # disk size if the node class does not map the device with the pods' files
_ROOTS = {"al2023": "/dev/xvda", "bottlerocket": "/dev/xvdb"}  # image family -> device with the pods' files


@dataclass(frozen=True)
class PoolView:
    """The fields of a NodePool that rules check, and the instance types that it allows."""

    manifest: ManifestObject
    requirements: list[dict[str, Any]]
    labels: dict[str, str]
    taints: list[dict[str, Any]]
    types: list[InstanceType]  # instance types that meet the requirements

    @property
    def gpu(self) -> bool:
        return bool(self.types) and all(node_type.gpus > 0 for node_type in self.types)

    @property
    def capacities(self) -> list[str]:
        return self.values(CAPACITY) or ["on-demand"]

    @property
    def node_class_name(self) -> object:
        return self.manifest.get("spec", "template", "spec", "nodeClassRef", "name")

    def node_class(self, manifests: Sequence[ManifestObject]) -> ManifestObject | None:
        """Find the pool's node class; None if it is not among `manifests`."""
        classes = select_kinds(manifests, "EC2NodeClass")
        return next((item for item in classes if item.name == self.node_class_name), None)

    def values(self, key: str) -> list[str]:
        """Return the values of the requirement `key In [...]`; empty if the pool has no such requirement."""
        matching = [item for item in self.requirements if (item.get("key"), item.get("operator")) == (key, "In")]
        return [str(value) for requirement in matching for value in listed(requirement.get("values"))]


def is_label_value(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_LABEL and LABEL_VALUE.match(value) is not None


def pool_view(pool: ManifestObject) -> PoolView:
    requirements = pool.items("spec", "template", "spec", "requirements")
    decided = [requirement for requirement in requirements if requirement.get("key") in _KNOWN]
    return PoolView(
        manifest=pool,
        requirements=requirements,
        labels=mapping(pool.get("spec", "template", "metadata", "labels")),
        taints=pool.items("spec", "template", "spec", "taints"),
        types=[item for item in instances() if all(_meets(type_labels(item), condition) for condition in decided)],
    )


@cache
def type_labels(node_type: InstanceType) -> dict[str, str]:
    """Return the labels that Karpenter gives to nodes of an instance type, as far as aliquot's catalogue knows them."""
    gpu_labels = {
        f"{_PREFIX}gpu-count": str(node_type.gpus),
        f"{_PREFIX}gpu-name": str(node_type.gpu_name),
        f"{_PREFIX}gpu-memory": str((node_type.gpu_memory_bytes or 0) >> 20),
    }
    return {
        TYPE: node_type.name,
        "kubernetes.io/arch": node_type.arch,
        "kubernetes.io/os": "linux",
        f"{_PREFIX}family": node_type.family,
        f"{_PREFIX}size": node_type.size,
        f"{_PREFIX}category": re.match(r"[a-z]+", node_type.family).group(),  # type: ignore[union-attr]
        f"{_PREFIX}generation": str(node_type.generation),
        f"{_PREFIX}cpu": str(node_type.vcpus),
        f"{_PREFIX}cpu-manufacturer": node_type.cpu_manufacturer,
        f"{_PREFIX}memory": str(node_type.memory_bytes >> 20),
        **(gpu_labels if node_type.gpus else {}),
    }


# Labels that the instance type determines. Other labels (capacity type, zone, custom labels) do not exclude types.
_KNOWN = {key for node_type in instances() if node_type.gpus for key in type_labels(node_type)}


def _meets(labels: dict[str, str], requirement: dict[str, Any]) -> bool:
    operator, value = requirement.get("operator"), labels.get(str(requirement.get("key")))
    values = [str(value) for value in listed(requirement.get("values"))]
    if operator in ("Gt", "Lt", "Gte", "Lte"):
        if value is None or len(values) != 1 or not _NUMBER.match(values[0]):
            return False
        number, bound = int(value), int(values[0])
        return {"Gt": number > bound, "Lt": number < bound, "Gte": number >= bound, "Lte": number <= bound}[operator]
    present = value is not None
    known = {"In": value in values, "NotIn": value not in values, "Exists": present, "DoesNotExist": not present}
    return known.get(str(operator), True)


def allocatable_disk_bytes(size_bytes: int) -> int:
    """Return the bytes of a disk that pods can use, which may be negative.

    The kubelet evicts pods when less than 10 % of the disk is free, and reserves 1 GiB for the system.
    """
    return size_bytes - -(-size_bytes // 10) - GIB


def root_device(node_class: ManifestObject) -> str | None:
    """Return the device with the pods' files in the image of a node class; None for an unknown image."""
    alias = str(dig(node_class.items("spec", "amiSelectorTerms"), 0, "alias") or "")
    return _ROOTS.get(str(node_class.get("spec", "amiFamily") or alias.partition("@")[0]).lower())


def disk_bytes(node_class: ManifestObject, node: InstanceType) -> int | None:
    """Return the size of the disk with the pods' files; None if the devices of the node image are unknown."""
    if node_class.get("spec", "instanceStorePolicy") == "RAID0" and node.local_nvme_bytes:
        return node.local_nvme_bytes
    mappings = node_class.items("spec", "blockDeviceMappings")
    roots = [item for item in mappings if item.get("rootVolume") is True]
    if not roots:
        if (device := root_device(node_class)) is None:
            return None
        roots = [item for item in mappings if item.get("deviceName") == device]
    if not roots:
        return _DEFAULT_BYTES
    return parse_bytes(dig(roots, 0, "ebs", "volumeSize"))
