"""A NodePool as Karpenter sees it: which EC2 types and zones its requirements leave, which labels its nodes have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from aliquot.catalogue.instances import InstanceType, instances
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, of_kind
from aliquot.cluster.quantity import GIB, parse_bytes

_NUMBER = re.compile(r"^[0-9]{1,18}$")
LABEL_VALUE = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")  # at most 63 characters

TYPE = "node.kubernetes.io/instance-type"
ZONE = "topology.kubernetes.io/zone"
CAPACITY = "karpenter.sh/capacity-type"
_PREFIX = "karpenter.k8s.aws/instance-"
_DEFAULT_BYTES = 20 * GIB  # of a node class without a mapping of that device
_ROOTS = {"al2023": "/dev/xvda", "bottlerocket": "/dev/xvdb"}  # where pods' files lie, by image family


@dataclass(frozen=True)
class PoolView:
    manifest: ManifestObject
    requirements: list[dict[str, Any]]
    labels: dict[str, str]
    taints: list[dict[str, Any]]
    types: list[InstanceType]  # that its requirements leave

    @property
    def gpu(self) -> bool:
        return bool(self.types) and all(each.gpus > 0 for each in self.types)

    @property
    def capacities(self) -> list[str]:
        return self.values(CAPACITY) or ["on-demand"]

    def node_class(self, manifests: Sequence[ManifestObject]) -> ManifestObject | None:
        """None: it is not among `manifests`."""
        name = self.manifest.get("spec", "template", "spec", "nodeClassRef", "name")
        return next((each for each in of_kind(manifests, "EC2NodeClass") if each.name == name), None)

    def values(self, key: str) -> list[str]:
        """What a requirement `key In [...]` lists; empty where there is none."""
        found = [each for each in self.requirements if each.get("key") == key and each.get("operator") == "In"]
        return [str(value) for each in found for value in listed(each.get("values"))]


def pool_view(pool: ManifestObject) -> PoolView:
    requirements = pool.items("spec", "template", "spec", "requirements")
    decided = [each for each in requirements if each.get("key") in _KNOWN]
    return PoolView(
        manifest=pool,
        requirements=requirements,
        labels=mapping(pool.get("spec", "template", "metadata", "labels")),
        taints=pool.items("spec", "template", "spec", "taints"),
        types=[each for each, labels in _labelled() if all(_meets(labels, one) for one in decided)],
    )


def type_labels(each: InstanceType) -> dict[str, str]:
    """The labels that Karpenter gives nodes of a type, as far as the catalogue knows them."""
    labels = {
        TYPE: each.name,
        "kubernetes.io/arch": each.arch,
        "kubernetes.io/os": "linux",
        f"{_PREFIX}family": each.family,
        f"{_PREFIX}size": each.size,
        f"{_PREFIX}category": re.match(r"[a-z]+", each.family).group(),  # type: ignore[union-attr]
        f"{_PREFIX}generation": str(each.generation),
        f"{_PREFIX}cpu": str(each.vcpus),
        f"{_PREFIX}cpu-manufacturer": each.cpu_manufacturer,
        f"{_PREFIX}memory": str(each.memory_bytes >> 20),
    }
    if each.gpus:
        labels |= {
            f"{_PREFIX}gpu-count": str(each.gpus),
            f"{_PREFIX}gpu-name": str(each.gpu_name),
            f"{_PREFIX}gpu-memory": str((each.gpu_memory_bytes or 0) >> 20),
        }
    return labels


@cache
def _labelled() -> list[tuple[InstanceType, dict[str, str]]]:
    return [(each, type_labels(each)) for each in instances()]


# Labels of a node that its type decides; others (capacity, zone, a person's own) are open.
_KNOWN = {key for each in instances() if each.gpus for key in type_labels(each)}


def _meets(labels: dict[str, str], requirement: dict[str, Any]) -> bool:
    operator, own = requirement.get("operator"), labels.get(str(requirement.get("key")))
    values = [str(value) for value in listed(requirement.get("values"))]
    if operator in ("Gt", "Lt", "Gte", "Lte"):
        if own is None or len(values) != 1 or not _NUMBER.match(values[0]):
            return False
        number, bound = int(own), int(values[0])
        return {"Gt": number > bound, "Lt": number < bound, "Gte": number >= bound, "Lte": number <= bound}[operator]
    known: dict[object, bool] = {
        "In": own in values,
        "NotIn": own not in values,
        "Exists": own is not None,
        "DoesNotExist": own is None,
    }
    return known.get(operator, True)


def allocatable_disk_bytes(size_bytes: int) -> int:
    """Of a disk of that size: kubelet evicts below 10 % and keeps 1 GiB. May be below 0."""
    return size_bytes - -(-size_bytes // 10) - GIB


def disk_bytes(node_class: ManifestObject, node: InstanceType) -> int | None:
    """Size of the disk that holds pods' files; None: an image whose devices are not known."""
    if node_class.get("spec", "instanceStorePolicy") == "RAID0" and node.local_nvme_bytes:
        return node.local_nvme_bytes
    mappings = node_class.items("spec", "blockDeviceMappings")
    roots = [each for each in mappings if each.get("rootVolume") is True]
    if not roots:
        alias = str(dig(node_class.items("spec", "amiSelectorTerms"), 0, "alias") or "")
        family = str(node_class.get("spec", "amiFamily") or alias.partition("@")[0]).lower()
        if family not in _ROOTS:
            return None
        roots = [each for each in mappings if each.get("deviceName") == _ROOTS[family]]
    if not roots:
        return _DEFAULT_BYTES
    return parse_bytes(dig(roots, 0, "ebs", "volumeSize"))
