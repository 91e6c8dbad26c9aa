"""What pods may have of a node's own disk (ephemeral-storage), as Karpenter reckons it.

Source: Karpenter AWS provider, pkg/providers/instancetype/types.go.
"""

from __future__ import annotations

from aliquot.catalogue.instances import InstanceType
from aliquot.cluster.manifests import ManifestObject, dig
from aliquot.cluster.quantity import GIB, parse_bytes

_DEFAULT_BYTES = 20 * GIB  # of a node class without a mapping of that device
_ROOTS = {"al2023": "/dev/xvda", "bottlerocket": "/dev/xvdb"}  # where pods' files lie, by image family


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
