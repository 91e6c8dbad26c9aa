"""Rules about a job together with its NodePools: whether the pods can be scheduled on the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.catalogue.instances import InstanceType
from aliquot.cluster.findings import Check, RuleFinding, failures, finding
from aliquot.cluster.job import EFA, GPU
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, select_kinds
from aliquot.cluster.node_pool_view import (
    CAPACITY,
    ZONE,
    PoolView,
    allocatable_disk_bytes,
    disk_bytes,
    kubelet_reserves,
    type_labels,
)
from aliquot.cluster.quantity import GIB, parse, parse_bytes, parse_millicores
from aliquot.core.number_format import count_of

# Typical requests of all daemonsets of an EKS node: CNI, kube-proxy, EBS, FSx and EFA plugins.
DAEMONSET_MILLICORES = 250
DAEMONSET_BYTES = 384 << 20

_DURATION = re.compile(r"([0-9.]+)(h|m|s)")
_SECONDS = {"h": 3600, "m": 60, "s": 1}


def check_together(
    job: JobView, pools: Sequence[PoolView], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    """Check a job against the NodePools `pools`; `manifests` contain the node classes of the pools."""
    if not pools:
        return
    chosen = [pool for pool in pools if _selects(job, pool)]
    if not chosen:
        message = f"nodeSelector {job.node_selector} meets no node of {', '.join(pool.manifest.name for pool in pools)}"
        fix = "labels in spec.template.metadata.labels of a NodePool, or another selector"
        yield finding("node-selector", job.manifest, message, fix)
        return
    tolerated = [pool for pool in chosen if not _untolerated(job, pool)]
    if not tolerated:
        for pool in chosen:
            for taint in _untolerated(job, pool):
                message = (
                    f"NodePool {pool.manifest.name} has the taint {taint.get('key')}={taint.get('value', '')}:"
                    f"{taint.get('effect')}"
                )
                yield finding("taint", job.manifest, message, "a toleration in the patch of the TrainJob")
        return
    yield from _alike(job, tolerated)
    yield from _namespace_limits(job, manifests)
    for pool in tolerated:
        node_class = pool.node_class(manifests)
        yield from _fits(job, pool, node_class)
        yield from _limits(job, pool, node_class)
        yield from _zones(job, pool)
        yield from _drained(job, pool)
        yield from _locked_memory(job, node_class)


def _alike(job: JobView, pools: Sequence[PoolView]) -> Iterator[RuleFinding]:
    """Check that all pools that may serve the job make nodes of one size, with GPUs only if the job asks for them."""
    sizes = [{(item.vcpus, item.memory_bytes, item.gpus) for item in pool.types} for pool in pools]
    # The rule for a pool reports different sizes within one pool.
    differ = all(len(size) == 1 for size in sizes) and any(size != sizes[0] for size in sizes)
    return failures(
        job.manifest,
        Check(
            job.nodes > 1 and differ,
            "unequal-nodes",
            f"nodes of different sizes can come from {', '.join(pool.manifest.name for pool in pools)}",
            "a nodeSelector that only one of them meets",
        ),
        Check(
            job.runtime is not None and not job.count(GPU) and all(pool.gpu for pool in pools),
            "gpu-unused",
            f"NodePool {pools[0].manifest.name} makes GPU nodes, and the pods ask for no GPU",
            f"{GPU} in requests and limits, or CPU types",
        ),
    )


def _namespace_limits(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Check the job against the ResourceQuotas and LimitRanges of its namespace that are among the manifests."""
    objects = [item for item in manifests if item.namespace == job.manifest.namespace]
    for quota in select_kinds(objects, "ResourceQuota"):
        yield from quota_findings(job, quota.name, mapping(quota.get("spec", "hard")), {})
    for limit_range in select_kinds(objects, "LimitRange"):
        for item in limit_range.items("spec", "limits"):
            for name, most in mapping(item.get("max")).items() if item.get("type") in ("Container", "Pod") else ():
                value = job.limits.get(name, job.requests.get(name))
                allowed, amount = parse(most), parse(value)
                if amount is not None and allowed is not None and amount > allowed:
                    message = f"{value} of {name}; LimitRange {limit_range.name} allows {most}"
                    yield finding("quota", job.manifest, message, "a larger limit in the namespace")


def quota_findings(job: JobView, name: object, hard: dict[str, Any], used: dict[str, Any]) -> Iterator[RuleFinding]:
    """Compare the pods of a job with a ResourceQuota: its limits, and the amounts that other pods use."""
    for kind, pod_resources in (("requests", job.requests), ("limits", job.limits)):
        for resource, value in pod_resources.items():
            key = f"{kind}.{resource}"
            limit = hard.get(key, hard.get(resource) if kind == "requests" else None)
            per_node, allowed = parse(value), parse(limit)
            taken = parse(used.get(key, used.get(resource, 0))) or 0
            if per_node is not None and allowed is not None and taken + per_node * job.nodes > allowed:
                has = f"ResourceQuota {name} has {limit}, {float(taken):g} in use"
                message = f"{job.nodes} x {value} of {key}; {has}"
                yield finding("quota", job.manifest, message, "a larger quota, or fewer nodes")


def _locked_memory(job: JobView, node_class: ManifestObject | None) -> Iterator[RuleFinding]:
    """Check that nodes of Amazon Linux 2023 raise the limit of locked memory; Bottlerocket does without user data."""
    if node_class is None or not job.count(EFA):
        return
    aliases = [str(term.get("alias") or "") for term in node_class.items("spec", "amiSelectorTerms")]
    is_al2023 = node_class.get("spec", "amiFamily") == "AL2023" or any(name.startswith("al2023@") for name in aliases)
    if is_al2023 and "MEMLOCK" not in str(node_class.get("spec", "userData")):
        fix = "the NodeConfig that `render` writes without cluster.user_data, with RLIMIT_MEMLOCK"
        yield finding("locked-memory", node_class, "userData does not raise the limit of locked memory", fix)


def _selects(job: JobView, pool: PoolView) -> bool:
    """Return whether nodes of the pool can have the labels that the job's nodeSelector requires.

    A zone or capacity type matches if the pool does not restrict it.
    """
    for key, value in job.node_selector.items():
        type_values = [labels[key] for labels in map(type_labels, pool.types) if key in labels]
        if key in pool.labels:
            possible = [pool.labels[key]]
        elif key in (ZONE, CAPACITY):
            possible = pool.values(key) or [value]
        elif key == "karpenter.sh/nodepool":
            possible = [pool.manifest.name]
        else:
            possible = type_values or pool.values(key)
        if value not in possible:
            return False
    return True


def _untolerated(job: JobView, pool: PoolView) -> list[dict[str, Any]]:
    hard = [taint for taint in pool.taints if taint.get("effect") != "PreferNoSchedule"]
    return [taint for taint in hard if not any(_tolerates(toleration, taint) for toleration in job.tolerations)]


def _tolerates(toleration: dict[str, Any], taint: dict[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return (toleration.get("key"), toleration.get("value", "")) == (taint.get("key"), taint.get("value", ""))


def _fits(job: JobView, pool: PoolView, node_class: ManifestObject | None) -> Iterator[RuleFinding]:
    reasons = {node_type.name: list(_too_large(job, node_type, node_class)) for node_type in _selected(job, pool)}
    unfit = {name: why for name, why in reasons.items() if why}
    if not unfit:
        return
    largest = max((item for item in pool.types if item.name in unfit), key=lambda item: item.memory_bytes).name
    efa_only = all(EFA in reason for why in unfit.values() for reason in why)
    message = f"{largest}: {'; '.join(unfit[largest])}"
    if some := len(unfit) < len(reasons):
        message += f" ({len(unfit)} of {len(reasons)} types of NodePool {pool.manifest.name} cannot hold it)"
    fix = "ask for what is allocatable (`aliquot instances` shows it), or take a larger type"
    yield finding("efa" if efa_only else "request-too-large", job.manifest, message, fix, "warning" if some else None)


def _selected(job: JobView, pool: PoolView) -> list[InstanceType]:
    """Return the instance types of the pool whose labels do not contradict the job's nodeSelector."""
    labelled = ((node_type, type_labels(node_type)) for node_type in pool.types)
    selector = job.node_selector.items()
    return [
        node_type for node_type, labels in labelled if all(labels.get(key, value) == value for key, value in selector)
    ]


def _too_large(job: JobView, node_type: InstanceType, node_class: ManifestObject | None) -> Iterator[str]:
    memory, cpu = job.pod_total("memory", parse_bytes), job.pod_total("cpu", parse_millicores)
    reserved_memory, reserved_cpu = kubelet_reserves(node_class, node_type)
    memory_left = node_type.schedulable_bytes(job.count(EFA) > 0) - DAEMONSET_BYTES - reserved_memory
    cpu_left = node_type.allocatable_cpu_millicores - DAEMONSET_MILLICORES - reserved_cpu
    if memory > memory_left:
        whole = node_type.memory_bytes / GIB
        yield f"{memory / GIB:.1f} GiB requested, a pod can have {memory_left / GIB:.1f} of its {whole:g} GiB"
    if cpu > cpu_left:
        yield f"{cpu / 1000:g} CPUs requested, a pod can have {cpu_left / 1000:g} of its {node_type.vcpus}"
    if job.count(GPU) > node_type.gpus:
        yield f"{count_of(job.count(GPU), 'GPU')} requested, it has {node_type.gpus}"
    if job.count(EFA) > node_type.efa_interfaces:
        yield f"{job.count(EFA)} x {EFA} requested, it has {node_type.efa_interfaces}"
    disk = disk_bytes(node_class, node_type) if node_class is not None else None
    scratch = job.pod_total("ephemeral-storage", parse_bytes)
    if disk is not None and scratch > (disk_left := max(0, allocatable_disk_bytes(disk))):
        requested = f"{scratch / GIB:.1f} GiB of ephemeral-storage requested"
        yield f"{requested}, a pod can have {disk_left / GIB:.1f} of its disk's {disk / GIB:.0f} GiB"


def _limits(job: JobView, pool: PoolView, node_class: ManifestObject | None) -> Iterator[RuleFinding]:
    limits, types = pool.manifest.get("spec", "limits") or {}, _selected(job, pool)
    fitting = [node_type for node_type in types if not list(_too_large(job, node_type, node_class))]
    if not fitting:
        return
    # Karpenter counts whole nodes towards the limits, so the smallest instance type that fits needs the least.
    needed = {
        "cpu": job.nodes * min(node_type.vcpus for node_type in fitting) * 1000,
        "memory": job.nodes * min(node_type.memory_bytes for node_type in fitting),
        "nodes": job.nodes,
        GPU: job.nodes * min(node_type.gpus for node_type in fitting),
    }
    for name, value in limits.items():
        allowed = parse_millicores(value) if name == "cpu" else parse_bytes(value)
        if allowed is not None and name in needed and allowed < needed[name]:
            whole = needed[name] / 1000 if name == "cpu" else needed[name]
            shown = f"{whole / GIB:g} GiB" if name == "memory" else f"{whole:g}"
            fix = f"limits.{name}: at least {shown}"
            yield finding("pool-limit", pool.manifest, f"limits.{name} is {value}; {job.nodes} nodes need {shown}", fix)


def _drained(job: JobView, pool: PoolView) -> Iterator[RuleFinding]:
    period = str(pool.manifest.get("spec", "template", "spec", "terminationGracePeriod") or "")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(period))
    is_protected = job.annotations.get("karpenter.sh/do-not-disrupt") == "true"
    keeps_drifted = any(map(_keeps_drifted, pool.manifest.items("spec", "disruption", "budgets")))
    yield from failures(
        job.manifest,
        Check(
            is_protected and not period,
            "do-not-disrupt",
            "the pods have karpenter.sh/do-not-disrupt",
            'no such annotation; in the NodePool disruption.budgets: [{nodes: "0", reasons: [Drifted]}]',
        ),
    )
    yield from failures(
        pool.manifest,
        Check(
            not is_protected and not keeps_drifted,
            "drift",
            "disruption.budgets allow nodes that have drifted to be replaced",
            'budgets: [{nodes: "0", reasons: [Drifted, Underutilized]}]',
        ),
        Check(
            period and seconds < job.grace_s,
            "grace",
            f"terminationGracePeriod is {period}, and the pods have {job.grace_s} s to save",
            "none, or longer than terminationGracePeriodSeconds of the pods",
        ),
    )


def _keeps_drifted(budget: object) -> bool:
    fields = mapping(budget)
    always = not fields.get("schedule")
    return always and str(fields.get("nodes")) in ("0", "0%") and "Drifted" in (fields.get("reasons") or ["Drifted"])


def _zones(job: JobView, pool: PoolView) -> Iterator[RuleFinding]:
    is_one_zone = job.node_selector.get(ZONE) is not None or len(pool.values(ZONE)) == 1
    terms = listed(dig(job.affinity, "podAffinity", "requiredDuringSchedulingIgnoredDuringExecution"))
    has_affinity = any(isinstance(term, dict) and term.get("topologyKey") == ZONE for term in terms)
    if job.nodes > 1 and not is_one_zone and not has_affinity:
        fix = f"nodeSelector {ZONE} (that of FSx), or podAffinity with that topologyKey"
        yield finding("zone-spread", job.manifest, "nothing keeps the nodes in one zone", fix)
