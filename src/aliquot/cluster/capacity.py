"""Compare what the pods of a job ask for with what nodes, node pools, quotas and queues offer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import yaml

from aliquot.catalogue.instances import InstanceType, kubelet_memory_bytes
from aliquot.cluster.findings import Check, RuleFinding, did_you_mean, failures, finding
from aliquot.cluster.job import EFA, GPU
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, mappings, select_kinds
from aliquot.cluster.node_pool_view import (
    CAPACITY,
    POOL_NAME,
    ZONE,
    PoolView,
    allocatable_disk_bytes,
    disk_bytes,
    type_labels,
)
from aliquot.cluster.quantity import GIB, MIB, parse
from aliquot.core.decode import BoundedLoader, TooDeepError

Amounts = dict[str, Fraction]

# Typical requests of all daemonsets of an EKS node: CNI, kube-proxy, EBS, FSx and EFA plugins.
_DAEMONSETS = {"cpu": Fraction(1, 4), "memory": Fraction(384 * MIB), "pods": Fraction(3)}
_EVICTION_BYTES = 100 * MIB  # of memory that the kubelet keeps free by default
_LARGEST_SOCKET_CPUS = 96  # types with more CPUs, or with eight GPUs, have two NUMA nodes
_BYTES = ("memory", "ephemeral-storage")
_EFA_FIX = "types that have EFA; p6-b300 needs it in spec.networkInterfaces of the node class, on cards 1 to 16"
_FIX = "ask for what is allocatable (`aliquot instances` shows it), or take a larger type"


def shown(resource: str, amount: Fraction) -> str:
    return (
        f"{float(amount) / GIB:.1f} GiB of {resource}" if resource.endswith(_BYTES) else f"{float(amount):g} {resource}"
    )


def shortages(needs: Mapping[str, Fraction], offers: Mapping[str, object]) -> Iterator[str]:
    """Describe each resource of which `offers` has less than `needs`; a resource without an offer is not limited."""
    for name, amount in needs.items():
        offered = parse(offers.get(name))
        if offered is not None and amount > offered:
            yield f"{shown(name, amount)}, and {name} is {offers[name]}"


def needs_of_job(job: JobView) -> Amounts:
    """Return what all pods of a job need together, by the names that a ResourceQuota has for resources."""
    per_pod = {f"limits.{name}": parse(value) for name, value in job.limits.items()}
    per_pod |= {key: amount for name, amount in job.requested.items() for key in (name, f"requests.{name}")}
    per_pod |= dict.fromkeys(("pods", "count/pods"), Fraction(1))
    return {name: amount * job.nodes for name, amount in per_pod.items() if amount is not None}


def check_quota(job: JobView, name: object, hard: dict[str, Any], used: dict[str, Any]) -> Iterator[RuleFinding]:
    """Compare a job with a ResourceQuota: its limits, and the amounts that other pods use."""
    needs = {key: amount + (parse(used.get(key)) or 0) for key, amount in needs_of_job(job).items()}
    in_use = ", with what is in use" if used else ""
    return (
        finding(
            "quota",
            job.manifest,
            f"{job.nodes} nodes need {shortage} in ResourceQuota {name}{in_use}",
            "a larger quota, or fewer nodes",
        )
        for shortage in shortages(needs, hard)
    )


def check_admission(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Check a job against the quotas, limit ranges and queues among the manifests: all of its pods, or none, start."""
    nearby = [item for item in manifests if not item.in_other_namespace(job.manifest)]
    for quota in select_kinds(nearby, "ResourceQuota"):
        yield from check_quota(job, quota.name, mapping(quota.get("spec", "hard")), {})
    for limit_range in select_kinds(nearby, "LimitRange"):
        limits = [item for item in limit_range.items("spec", "limits") if item.get("type") != "PersistentVolumeClaim"]
        yield from (
            finding(
                "quota",
                job.manifest,
                f"a pod needs {shortage} in LimitRange {limit_range.name}",
                "a larger limit in the namespace",
            )
            for item in limits
            for shortage in shortages(job.requested, mapping(item.get("max")))
        )
    cluster_queues = {item.name: item for item in select_kinds(manifests, "ClusterQueue")}
    for queue in (item for item in select_kinds(nearby, "LocalQueue") if item.name == job.queue and cluster_queues):
        if (name := str(queue.get("spec", "clusterQueue"))) in cluster_queues:
            yield from _queue(job, cluster_queues[name])
        else:
            yield finding(
                "reference",
                queue,
                f"spec.clusterQueue is {name!r}, which is not among the manifests",
                did_you_mean(name, cluster_queues, "check it, too", 0.0),
            )


def _queue(job: JobView, queue: ManifestObject) -> Iterator[RuleFinding]:
    needs = {name: job.requested[name] * job.nodes for name in job.requested} | {"pods": Fraction(job.nodes)}
    groups = queue.items("spec", "resourceGroups")
    covered = {str(name) for group in groups for name in listed(group.get("coveredResources"))}
    yield from (
        finding(
            "queue",
            queue,
            f"the pods ask for {name}, which no resource group of the queue covers: Kueue never admits the job",
            f"{name} in coveredResources, and its nominalQuota in each flavor",
        )
        for name in sorted(job.requested.keys() - covered)
    )
    if queue.get("spec", "cohort") or queue.get("spec", "cohortName"):
        return  # the queue may borrow what the others of its cohort do not use
    for group in groups:
        quotas = [
            {str(item.get("name")): item.get("nominalQuota") for item in mappings(flavor, "resources")}
            for flavor in mappings(group, "flavors")
        ]
        reasons = [list(shortages(needs, quota_by_name)) for quota_by_name in quotas]
        yield from failures(
            queue,
            Check(
                reasons and all(reasons),
                "queue",
                f"{job.nodes} nodes need {'; '.join(min(reasons, default=()))}: Kueue never admits the job",
                "a nominalQuota for all pods of the job, or fewer nodes",
            ),
        )


def kubelet_settings(node_class: ManifestObject | None) -> dict[str, Any]:
    """Return the kubelet's settings of a node class: spec.kubelet, and those of a NodeConfig in its user data."""
    if node_class is None:
        return {}
    settings = mapping(node_class.get("spec", "kubelet"))
    for part in re.split(r"^(?:---|--\S+)$", str(node_class.get("spec", "userData") or ""), flags=re.MULTILINE):
        text = part[start:] if (start := part.find("apiVersion:")) >= 0 else ""
        try:
            settings = settings | mapping(dig(yaml.load(text, Loader=BoundedLoader), "spec", "kubelet", "config"))
        except (yaml.YAMLError, TooDeepError, ValueError):
            continue  # a script
    return settings


def node_offer(node: InstanceType, node_class: ManifestObject | None, needs: Mapping[str, Fraction]) -> Amounts:
    """Return what a pod with `needs` can have of a node, beside daemonsets, kubelet and system."""
    settings, uses_efa = kubelet_settings(node_class), needs.get(EFA, 0) > 0
    reserved = [mapping(settings.get(key)) for key in ("kubeReserved", "systemReserved")]
    memory, cpu = Fraction(node.schedulable_bytes(uses_efa)), Fraction(node.allocatable_cpu_millicores, 1000)
    # A value in kubeReserved replaces the kubelet's default.
    memory += kubelet_memory_bytes(node.max_pods) if "memory" in reserved[0] else 0
    cpu = Fraction(node.vcpus) if "cpu" in reserved[0] else cpu
    eviction = str(dig(settings, "evictionHard", "memory.available") or _EVICTION_BYTES)
    fraction = parse(eviction.removesuffix("%")) or Fraction(0)
    memory += _EVICTION_BYTES - (fraction * node.memory_bytes / 100 if eviction.endswith("%") else fraction)
    pods = [parse(settings.get("maxPods")) or Fraction(node.max_pods)]
    pods += [node.vcpus * per_core for per_core in [parse(settings.get("podsPerCore"))] if per_core]
    offer = {
        "memory": memory,
        "cpu": cpu,
        "pods": min(pods),
        GPU: Fraction(node.gpus),
        EFA: _efa_interfaces(node, node_class),
    }
    for name in ("memory", "cpu"):
        offer[name] -= sum(parse(part.get(name)) or 0 for part in reserved)
    if settings.get("topologyManagerPolicy") == "single-numa-node" and (
        node.vcpus > _LARGEST_SOCKET_CPUS or node.gpus >= 8
    ):
        offer |= {name: Fraction(math.floor(offer[name] / 2)) for name in ("cpu", GPU)}
    offer |= {name: offer[name] - amount for name, amount in _DAEMONSETS.items()}
    disk = disk_bytes(node_class, node) if node_class is not None else None
    if disk is not None:
        reserved_disk = parse(reserved[0].get("ephemeral-storage")) or Fraction(0)
        offer["ephemeral-storage"] = max(Fraction(0), allocatable_disk_bytes(disk) - reserved_disk)
    return offer


def _efa_interfaces(node: InstanceType, node_class: ManifestObject | None) -> Fraction:
    interfaces = node_class.items("spec", "networkInterfaces") if node_class is not None else []
    with_efa = sum(str(item.get("interfaceType")).startswith("efa") for item in interfaces)
    # Without a list, Karpenter puts EFA on network card 0, too, and EC2 may refuse the node for that.
    unlisted = node.efa_interfaces if node_class is None or node.first_card_has_efa else 0
    return Fraction(min(node.efa_interfaces, with_efa) if interfaces else unlisted)


def too_large(job: JobView, node: InstanceType, node_class: ManifestObject | None) -> list[str]:
    """Describe why a pod of the job does not fit on a node; empty if it does."""
    needs = job.requested | {"pods": Fraction(1)}
    offer = node_offer(node, node_class, needs)
    reasons = [
        f"{shown(name, amount)} requested, a pod can have {shown(name, offer.get(name, Fraction(0)))}"
        for name, amount in needs.items()
        if amount > offer.get(name, Fraction(0)) and not (name == "ephemeral-storage" and name not in offer)
    ]
    has_public_ip = node_class is not None and node_class.get("spec", "associatePublicIPAddress")
    refusal = "EC2 gives no public address to a node with several network interfaces (associatePublicIPAddress)"
    return [*reasons, *([refusal] if has_public_ip and job.count(EFA) > 1 else [])]


def check_fit(job: JobView, pool: PoolView, node_class: ManifestObject | None) -> Iterator[RuleFinding]:
    selected = mapping(job.pod.get("nodeSelector")).items()
    types = [item for item in pool.types if all(type_labels(item).get(key, value) == value for key, value in selected)]
    reasons = {item.name: too_large(job, item, node_class) for item in types}
    unfit = {name: why for name, why in reasons.items() if why}
    if unfit:
        largest = max((item for item in types if item.name in unfit), key=lambda item: item.memory_bytes).name
        message = f"{largest}: {'; '.join(unfit[largest])}"
        if some := len(unfit) < len(reasons):
            message += f" ({len(unfit)} of {len(reasons)} types of NodePool {pool.manifest.name} cannot hold it)"
        rule = "efa" if all(EFA in reason for why in unfit.values() for reason in why) else "request-too-large"
        yield finding(
            rule,
            job.manifest,
            message,
            f"{_FIX}; nodes keep what spec.kubelet and userData of {node_class} say"
            if kubelet_settings(node_class).keys() - {"cpuManagerPolicy"}
            else _EFA_FIX
            if rule == "efa"
            else _FIX,
            "warning" if some else None,
        )
    fitting = [item for item in types if item.name not in unfit]
    if not fitting:
        return
    # Karpenter counts whole nodes towards the limits, so the smallest instance type that fits needs the least.
    smallest = {"cpu": min(item.vcpus for item in fitting), "memory": min(item.memory_bytes for item in fitting)}
    smallest |= {GPU: min(item.gpus for item in fitting), "nodes": 1}
    needs = {name: Fraction(job.nodes * amount) for name, amount in smallest.items()}
    yield from (
        finding(
            "pool-limit",
            pool.manifest,
            f"{job.nodes} nodes need {shortage} in spec.limits",
            "limits of at least nodes x size, or none",
        )
        for shortage in shortages(needs, mapping(pool.manifest.get("spec", "limits")))
    )


def selects(job: JobView, pool: PoolView) -> bool:
    """Return whether nodes of the pool can have the labels that the job's nodeSelector requires.

    A zone or capacity type matches if the pool does not restrict it.
    """
    labels = {POOL_NAME: pool.manifest.name, **pool.labels}
    for key, value in mapping(job.pod.get("nodeSelector")).items():
        type_values = [labels_of_type[key] for labels_of_type in map(type_labels, pool.types) if key in labels_of_type]
        free = [value] if key in (ZONE, CAPACITY) else []
        possible = [labels[key]] if key in labels else type_values or pool.values(key) or free
        if value not in possible:
            return False
    return True
