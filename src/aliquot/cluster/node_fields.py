"""Fields of NodePools and EC2NodeClasses of Karpenter, and the EC2 types that a pool allows."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.catalogue.instances import catalogue, instances
from aliquot.cluster.findings import Check, Field, RuleFinding, failures, finding, like, none_of, one_of, unlike
from aliquot.cluster.job import AMX_TAINT
from aliquot.cluster.manifests import ManifestObject, mapping
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
_PACKAGES = r"^.*\b(?:pip3?|yum|dnf|apt(?:-get)?|conda)\s+(?:-\S+\s+)*install\b"
_DISCONTINUED = {
    "intel-extension-for-pytorch": "Intel's optimisations are in PyTorch itself",
    "intel_extension_for_pytorch": "Intel's optimisations are in PyTorch itself",
    "oneccl": "the oneCCL bindings for PyTorch are discontinued",
    "torchtune": "torchtune is discontinued",
}
_GPU_IMAGE = re.compile(r"nvidia|gpu|cuda|neuron", re.IGNORECASE)


def _label_fix(value: Any) -> str:
    parts = [part for part in re.split(r"[,\s]+", str(value)) if part]
    if len(parts) > 1 and all(LABEL_VALUE.match(part) for part in parts):
        return f"write {len(parts)} values: {json.dumps(parts)}"
    return "a label value is a string of letters, digits, '-', '_' and '.', at most 63 of them"


_PINNED = "amiSelectorTerms: [{alias: al2023@vYYYYMMDD}], which takes the standard or NVIDIA image by the type"
_CLASS_FIX = "{group: karpenter.k8s.aws, kind: EC2NodeClass, name: ...}"
POOL_FIELDS = (
    Field("spec/template/spec/requirements/*/values", "label-value",
          lambda values: all(map(is_label_value, values or ())),
          lambda values: "; ".join(_label_fix(value) for value in values if not is_label_value(value))),
    Field("spec/template/spec/nodeClassRef", "node-class", lambda reference: (mapping(reference).get("group"),
          mapping(reference).get("kind")) in (_NODE_CLASS, _AUTO_MODE), _CLASS_FIX,
          "{path} is {value}, which Karpenter on EC2 does not know", level="error"),
    Field("spec/disruption/consolidationPolicy", "consolidation", one_of("WhenEmpty"),
          "consolidationPolicy: WhenEmpty", absent="WhenEmptyOrUnderutilized"),
    Field("spec/disruption/consolidateAfter", "idle-nodes", none_of("Never"), "consolidateAfter: 10m"),
    Field("spec/template/spec/expireAfter", "node-expiry", one_of("Never"), "Never; nodes leave when empty",
          absent="720h"),
)  # fmt: skip
_TERM = "spec/amiSelectorTerms/*"
NODE_CLASS_FIELDS = (
    Field("spec/userData", "user-data-packages", unlike(_PACKAGES),
          "put it into the container image (deploy/Dockerfile has tcmalloc and CPU torch)", "{path} installs packages"),
    *(Field("spec/userData", "discontinued", unlike(re.escape(name)), "leave it out",
            f"{{path}} installs {name}: {why}")
      for name, why in _DISCONTINUED.items()),
    Field("spec/role", "node-role", like("[A-Za-z0-9_+=,.@-]{1,64}"),
          lambda role: f"role: {str(role).rpartition('/')[2]}",
          "{path} is {value}, and a role has a name"),
    Field(f"{_TERM}/alias", "node-image-eks", like("(al2023|bottlerocket)@.*"),
          "alias: al2023@vYYYYMMDD", "{path} is {value}: EKS has no such image for Linux pods since Kubernetes 1.33"),
    Field(f"{_TERM}/alias", "node-image-drift", like(".*@v[0-9].*"), "pin a release: al2023@vYYYYMMDD"),
    Field(f"{_TERM}/name", "node-image-drift", like("[^*?]*"), _PINNED, "{path}: any image named {value}"),
    Field(f"{_TERM}/tags", "node-image-drift", one_of(None, {}), _PINNED, "{path}: any image with the tags {value}"),
    Field(f"{_TERM}/name", "node-image-eks", like("(?i).*(eks|bottlerocket).*"), _PINNED,
          "{path} is {value}, which is no image for EKS nodes"),
)  # fmt: skip


def check_pool(pool: PoolView, saves: bool) -> Iterator[RuleFinding]:
    """Check a NodePool. `saves`: the run is known, saves during training, and resumes."""
    yield from _names(pool)
    yield from _types(pool)
    yield from _sold(pool)
    yield from failures(
        pool.manifest,
        Check(
            "spot" in pool.capacities and not saves,
            "spot",
            "capacity type spot is allowed",
            "save often (checkpoint.every) and leave checkpoint.resume: auto, or use on-demand only",
        ),
    )


def check_node_class(node_class: ManifestObject, pools: Sequence[PoolView]) -> Iterator[RuleFinding]:
    yield from _drivers(node_class, [pool for pool in pools if pool.node_class_name == node_class.name])
    mappings, device = node_class.items("spec", "blockDeviceMappings"), root_device(node_class)
    is_mapped = any(item.get("rootVolume") or item.get("deviceName") == device for item in mappings)
    yield from failures(
        node_class,
        Check(
            mappings and device and not is_mapped,
            "volume-size",
            f"no mapping is of {device}, the disk of the pods, which keeps its default size",
            f"deviceName: {device}",
        ),
    )


def _names(pool: PoolView) -> Iterator[RuleFinding]:
    """Report instance types, families and sizes that EC2 does not have."""
    for key, attribute in ((TYPE, "name"), (_FAMILY, "family"), (_SIZE, "size")):
        names = sorted({getattr(node_type, attribute) for node_type in instances()})
        for value in pool.values(key):
            if value not in names and LABEL_VALUE.match(value):
                near = difflib.get_close_matches(value, names, 2, 0.6)
                yield finding(
                    "instance-type",
                    pool.manifest,
                    f"{key}: {value!r} is not in the catalogue",
                    f"did you mean {' or '.join(near)}?" if near else "see `aliquot instances`",
                )


def _types(pool: PoolView) -> Iterator[RuleFinding]:
    types = pool.types
    if not types:
        yield finding("no-type-left", pool.manifest, "the requirements exclude each other", "loosen one of them")
        return
    for requirement in pool.requirements:
        key, least = str(requirement.get("key")), requirement.get("minValues")
        values = {labels[key] for labels in map(type_labels, types) if key in labels}
        yield from failures(
            pool.manifest,
            Check(
                isinstance(least, int) and values and len(values) < least,
                "no-type-left",
                f"the types of the pool have {count_of(len(values), 'value')} of {key}, and minValues is {least}",
                "no minValues, or more types",
            ),
        )
    ends = [choose(types, key=lambda node_type: node_type.memory_bytes) for choose in (min, max)]
    small, large = (f"{end.name} ({end.vcpus} vCPU, {end.memory_bytes >> 30} GiB)" for end in ends)
    amx_wanted = any(taint.get("key") == AMX_TAINT for taint in pool.taints) or "amx" in pool.manifest.name
    without_amx = [node_type.name for node_type in types if not node_type.amx]
    yield from failures(
        pool.manifest,
        Check(
            len({(node_type.vcpus, node_type.memory_bytes, node_type.gpus) for node_type in types}) > 1,
            "unequal-nodes",
            f"{len(types)} types from {small} to {large}",
            f"one size a pool: `{TYPE} In [...]` with types that are alike",
        ),
        Check(
            amx_wanted and without_amx,
            "no-amx",
            f"{len(without_amx)} of its types have no AMX, e.g. {''.join(without_amx[:1])}",
            "families of Sapphire Rapids and later: c7i, m7i, r7i, i7i, c8i, m8i, r8i; see `aliquot instances --amx`",
            "error",
        ),
    )


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


def _drivers(node_class: ManifestObject, pools: Sequence[PoolView]) -> Iterator[RuleFinding]:
    """Check that the image has a driver for the GPUs of the pools, and none without GPUs."""
    gpu_pools = [pool.manifest.name for pool in pools if pool.gpu]
    cpu_pools = [pool.manifest.name for pool in pools if pool.types and not pool.gpu]
    types = [node_type for pool in pools for node_type in pool.types]
    concerns = sorted({node_type.gpu_concern for node_type in types if node_type.gpu_concern is not None})
    for term in node_class.items("spec", "amiSelectorTerms"):
        alias, name = str(term.get("alias") or ""), str(term.get("name") or "")
        unfit = cpu_pools if _GPU_IMAGE.search(name) else gpu_pools if name else []
        yield from failures(
            node_class,
            Check(unfit, "node-image-kind", f"{name!r} for the nodes of NodePool {', '.join(unfit)}", _PINNED),
            *(
                Check(alias, "node-image-kind", concern, "another GPU type, or an image that you build", "warning")
                for concern in concerns
            ),
        )
