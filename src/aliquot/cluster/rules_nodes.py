"""Rules about NodePools and EC2NodeClasses of Karpenter."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence

from aliquot.catalogue.instances import catalogue, instances
from aliquot.cluster.findings import Check, RuleFinding, failures, finding
from aliquot.cluster.job import AMX_TAINT
from aliquot.cluster.manifests import ManifestObject, listed, mapping, select_kinds
from aliquot.cluster.node_pool_view import (
    CAPACITY,
    LABEL_VALUE,
    TYPE,
    ZONE,
    PoolView,
    is_label_value,
    root_device,
    type_labels,
)
from aliquot.core.number_format import count_of

_NODE_CLASS, _AUTO_MODE = ("karpenter.k8s.aws", "EC2NodeClass"), ("eks.amazonaws.com", "NodeClass")
_CAPACITIES = ("on-demand", "spot", "reserved")
_FAMILY, _SIZE = "karpenter.k8s.aws/instance-family", "karpenter.k8s.aws/instance-size"
_PACKAGES = re.compile(r"^.*\b(?:pip3?|yum|dnf|apt(?:-get)?|conda)\s+(?:-\S+\s+)*install\b.*$", re.MULTILINE)
_DISCONTINUED = {
    "intel-extension-for-pytorch": "Intel's optimisations are in PyTorch itself",
    "intel_extension_for_pytorch": "Intel's optimisations are in PyTorch itself",
    "oneccl": "the oneCCL bindings for PyTorch are discontinued",
    "torchtune": "torchtune is discontinued",
}
_GPU_IMAGE = re.compile(r"nvidia|gpu|cuda|neuron", re.IGNORECASE)
_EKS_IMAGE = re.compile(r"eks|bottlerocket", re.IGNORECASE)
_ROLE_NAME = r"[A-Za-z0-9_+=,.@-]{1,64}"
_LINUX_ALIAS = re.compile(r"(al2023|bottlerocket)@")
_PINNED_ALIAS = re.compile(r"@v[0-9]")
# Families whose GPUs need NVIDIA's driver 595; AWS' images for EKS nodes have 580 (release v20260714). Source, with the
# way to build an image: doc/usage/g7-ami.md in github.com/awslabs/amazon-eks-ami.
_NEWER_DRIVER = {"g7"}


def check_pool(pool: PoolView) -> Iterator[RuleFinding]:
    yield from _labels(pool)
    yield from _names(pool)
    yield from _types(pool)
    yield from _sold(pool)
    yield from _disruption(pool)


def check_node_class(node_class: ManifestObject, pools: Sequence[PoolView]) -> Iterator[RuleFinding]:
    yield from _images(node_class, [pool for pool in pools if pool.node_class_name == node_class.name])
    user_data, role = (str(node_class.get("spec", key) or "") for key in ("userData", "role"))
    mappings, device = node_class.items("spec", "blockDeviceMappings"), root_device(node_class)
    is_mapped = any(item.get("rootVolume") or item.get("deviceName") == device for item in mappings)
    packages = (match.group().strip() for match in _PACKAGES.finditer(user_data))
    yield from failures(
        node_class,
        *(
            Check(
                True,
                "user-data-packages",
                f"userData runs `{line}`",
                "put it into the container image (deploy/Dockerfile has tcmalloc and CPU torch)",
            )
            for line in packages
        ),
        Check(
            role and not re.fullmatch(_ROLE_NAME, role),
            "node-role",
            f"role is {role!r}, and a role has a name",
            f"role: {role.rpartition('/')[2]}",
        ),
        Check(
            mappings and device and not is_mapped,
            "volume-size",
            f"no mapping is of {device}, the disk of the pods, which keeps its default size",
            f"deviceName: {device}",
        ),
        *(
            Check(name in user_data, "discontinued", f"userData installs {name}: {why}", "leave it out")
            for name, why in _DISCONTINUED.items()
        ),
    )


def check_references(manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    classes = {node_class.name for node_class in select_kinds(manifests, "EC2NodeClass")}
    for pool in select_kinds(manifests, "NodePool"):
        reference = mapping(pool.get("spec", "template", "spec", "nodeClassRef"))
        group, kind, name = (reference.get(key) for key in ("group", "kind", "name"))
        if (group, kind) == _AUTO_MODE:
            continue
        if (group, kind) != _NODE_CLASS:
            message = f"nodeClassRef is of {group}/{kind}, which Karpenter on EC2 does not know"
            fix = "{group: karpenter.k8s.aws, kind: EC2NodeClass, name: ...}"
            yield finding("node-class", pool, message, fix, "error")
        elif name not in classes:
            yield finding("node-class", pool, f"nodeClassRef names {name!r}", "check that one too, or correct the name")


def _labels(pool: PoolView) -> Iterator[RuleFinding]:
    for requirement in pool.requirements:
        for value in listed(requirement.get("values")):
            if is_label_value(value):
                continue
            parts = [part for part in re.split(r"[,\s]+", str(value)) if part]
            fix = "a label value is a string of letters, digits, '-', '_' and '.', at most 63 of them"
            if len(parts) > 1 and all(LABEL_VALUE.match(part) for part in parts):
                fix = f"write {len(parts)} values: {json.dumps(parts)}"
            yield finding("label-value", pool.manifest, f"{requirement.get('key')} has the value {value!r}", fix)


def _names(pool: PoolView) -> Iterator[RuleFinding]:
    """Report instance types, families and sizes that EC2 does not have."""
    for key, attribute in ((TYPE, "name"), (_FAMILY, "family"), (_SIZE, "size")):
        names = sorted({getattr(node_type, attribute) for node_type in instances()})
        for value in pool.values(key):
            if value not in names and LABEL_VALUE.match(value):
                near = difflib.get_close_matches(value, names, 2, 0.6)
                fix = f"did you mean {' or '.join(near)}?" if near else "see `aliquot instances`"
                yield finding("instance-type", pool.manifest, f"{key}: {value!r} is not in the catalogue", fix)


def _types(pool: PoolView) -> Iterator[RuleFinding]:
    types = pool.types
    if not types:
        yield finding("no-type-left", pool.manifest, "the requirements exclude each other", "loosen one of them")
        return
    for requirement in pool.requirements:
        key, least = str(requirement.get("key")), requirement.get("minValues")
        values = {labels[key] for labels in map(type_labels, types) if key in labels}
        if isinstance(least, int) and values and len(values) < least:
            message = f"the types of the pool have {count_of(len(values), 'value')} of {key}, and minValues is {least}"
            yield finding("no-type-left", pool.manifest, message, "no minValues, or more types")
    if len({(node_type.vcpus, node_type.memory_bytes, node_type.gpus) for node_type in types}) > 1:
        ends = [choose(types, key=lambda node_type: node_type.memory_bytes) for choose in (min, max)]
        small, large = (f"{end.name} ({end.vcpus} vCPU, {end.memory_bytes >> 30} GiB)" for end in ends)
        fix = f"one size a pool: `{TYPE} In [...]` with types that are alike"
        yield finding("unequal-nodes", pool.manifest, f"{len(types)} types from {small} to {large}", fix)
    amx_wanted = any(taint.get("key") == AMX_TAINT for taint in pool.taints) or "amx" in pool.manifest.name
    without_amx = [node_type.name for node_type in types if not node_type.amx]
    if amx_wanted and without_amx:
        message = f"{len(without_amx)} of its types have no AMX, e.g. {without_amx[0]}"
        fix = "families of Sapphire Rapids and later: c7i, m7i, r7i, i7i, c8i, m8i, r8i; see `aliquot instances --amx`"
        yield finding("no-amx", pool.manifest, message, fix, "error")


def _sold(pool: PoolView) -> Iterator[RuleFinding]:
    types, zones, prices = pool.types, pool.values(ZONE), catalogue()
    unknown = [value for value in pool.capacities if value not in _CAPACITIES]
    near = difflib.get_close_matches(unknown[0].lower(), _CAPACITIES, 1) if unknown else []
    names = ", ".join(node_type.name for node_type in types[:3])
    is_priced_region = bool(zones) and all(zone.startswith(prices.region) for zone in zones)
    yield from failures(
        pool.manifest,
        Check(
            unknown,
            "not-sold",
            f"{CAPACITY} {', '.join(unknown)}: there is {', '.join(_CAPACITIES)}",
            (near or ["on-demand"])[0],
        ),
        Check(
            types and pool.capacities == ["spot"] and not any(node_type.on_spot for node_type in types),
            "not-sold",
            f"{names}: not sold as spot",
            f"{CAPACITY}: on-demand",
        ),
        Check(
            is_priced_region and types and all(node_type.usd_per_hour is None for node_type in types),
            "not-sold",
            f"{names}: not sold on demand in {prices.region} ({prices.date})",
            "a type that is (`aliquot instances` shows prices), or another region",
            "warning",
        ),
    )


def _disruption(pool: PoolView) -> Iterator[RuleFinding]:
    disruption = mapping(pool.manifest.get("spec", "disruption"))
    policy = disruption.get("consolidationPolicy") or "WhenEmptyOrUnderutilized"
    expiry = pool.manifest.get("spec", "template", "spec", "expireAfter") or "720h"
    yield from failures(
        pool.manifest,
        Check(
            policy != "WhenEmpty", "consolidation", f"consolidationPolicy is {policy}", "consolidationPolicy: WhenEmpty"
        ),
        Check(
            policy == "WhenEmpty" and disruption.get("consolidateAfter") == "Never",
            "idle-nodes",
            "consolidateAfter is Never",
            "consolidateAfter: 10m",
        ),
        Check(
            expiry != "Never", "node-expiry", f"expireAfter is {expiry}", "expireAfter: Never; nodes leave when empty"
        ),
        Check(
            "spot" in pool.capacities,
            "spot",
            "capacity type spot is allowed",
            "save often (checkpoint.every) and leave checkpoint.resume: auto, or use on-demand only",
        ),
    )


def _images(node_class: ManifestObject, pools: Sequence[PoolView]) -> Iterator[RuleFinding]:
    gpu_pools = [pool.manifest.name for pool in pools if pool.gpu]
    cpu_pools = [pool.manifest.name for pool in pools if pool.types and not pool.gpu]
    new_families = {node_type.family for pool in pools if pool.gpu for node_type in pool.types} & _NEWER_DRIVER
    fix = "amiSelectorTerms: [{alias: al2023@vYYYYMMDD}], which takes the standard or NVIDIA image by the type"
    for term in node_class.items("spec", "amiSelectorTerms"):
        alias, name, tags = str(term.get("alias") or ""), str(term.get("name") or ""), term.get("tags")
        gpu_image = _GPU_IMAGE.search(name) is not None
        yield from failures(
            node_class,
            Check(
                alias and not _LINUX_ALIAS.match(alias),
                "node-image-eks",
                f"alias {alias}: EKS has no such image for Linux pods since Kubernetes 1.33",
                "alias: al2023@vYYYYMMDD",
            ),
            Check(
                alias and not _PINNED_ALIAS.search(alias),
                "node-image-drift",
                f"alias {alias}",
                "pin a release: al2023@vYYYYMMDD",
            ),
            Check(
                alias.startswith("al2023@") and new_families,
                "node-image-kind",
                f"GPUs of {', '.join(new_families)} need NVIDIA's driver 595, and the images of EKS have 580",
                "another GPU type, or an image that you build: amiSelectorTerms: [{id: ami-...}]",
                "warning",
            ),
            Check("*" in name or "?" in name, "node-image-drift", f"any image named {name!r}", fix),
            Check(tags, "node-image-drift", f"any image with the tags {tags}", fix),
            Check(
                name and not _EKS_IMAGE.search(name), "node-image-eks", f"{name!r} is not an image for EKS nodes", fix
            ),
            Check(
                gpu_image and cpu_pools,
                "node-image-kind",
                f"the GPU image {name!r} for the CPU nodes of NodePool {''.join(cpu_pools[:1])}",
                fix,
            ),
            Check(
                name and not gpu_image and gpu_pools,
                "node-image-kind",
                f"{name!r} has no GPU driver for the nodes of NodePool {''.join(gpu_pools[:1])}",
                fix,
            ),
        )
