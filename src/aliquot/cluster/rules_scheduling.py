"""Rules about a job and the nodes that it is to run on: whether its pods can ever be scheduled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.catalogue.instances import InstanceType
from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.job import EFA, GPU
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping
from aliquot.cluster.node_pool_view import CAPACITY, ZONE, PoolView, allocatable_disk_bytes, disk_bytes, type_labels
from aliquot.cluster.quantity import GIB, parse_bytes, parse_millicores

# What the daemonsets of an EKS node commonly request together: CNI, kube-proxy, EBS, FSx and EFA plugins.
DAEMONSET_MILLICORES = 250
DAEMONSET_BYTES = 384 << 20

_DURATION = re.compile(r"([0-9.]+)(h|m|s)")
_SECONDS = {"h": 3600, "m": 60, "s": 1}


def check_together(
    job: JobView, pools: Sequence[PoolView], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    """`manifests`: all, of which the node classes are looked at."""
    if not pools:
        return
    chosen = [pool for pool in pools if _selects(job, pool)]
    if not chosen:
        yield finding(
            "node-selector", job.manifest,
            f"nodeSelector {job.node_selector} meets no node of {', '.join(pool.manifest.name for pool in pools)}",
            "labels in spec.template.metadata.labels of a NodePool, or another selector",
        )  # fmt: skip
        return
    tolerated = [pool for pool in chosen if not _untolerated(job, pool)]
    if not tolerated:
        for pool in chosen:
            for taint in _untolerated(job, pool):
                yield finding(
                    "taint", job.manifest,
                    f"NodePool {pool.manifest.name} has the taint {taint.get('key')}={taint.get('value', '')}:"
                    f"{taint.get('effect')}",
                    "a toleration in the patch of the TrainJob",
                )  # fmt: skip
        return
    for pool in tolerated:
        node_class = pool.node_class(manifests)
        yield from _fits(job, pool, node_class)
        yield from _limits(job, pool, node_class)
        yield from _zones(job, pool)
        yield from _drained(job, pool)


def _selects(job: JobView, pool: PoolView) -> bool:
    """Whether nodes of the pool can have the labels; those that Karpenter leaves open (zone) count as met."""
    for key, value in job.node_selector.items():
        if key in pool.labels:
            if pool.labels[key] != value:
                return False
        elif key in (ZONE, CAPACITY):
            if pool.values(key) and value not in pool.values(key):
                return False
        elif key == "karpenter.sh/nodepool":
            if value != pool.manifest.name:
                return False
        elif any(key in type_labels(each) for each in pool.types):
            if not any(type_labels(each).get(key) == value for each in pool.types):
                return False
        elif value not in pool.values(key):
            return False
    return True


def _untolerated(job: JobView, pool: PoolView) -> list[dict[str, Any]]:
    hard = [taint for taint in pool.taints if taint.get("effect") != "PreferNoSchedule"]
    return [taint for taint in hard if not any(_tolerates(each, taint) for each in job.tolerations)]


def _tolerates(toleration: dict[str, Any], taint: dict[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return (toleration.get("key"), toleration.get("value", "")) == (taint.get("key"), taint.get("value", ""))


def _fits(job: JobView, pool: PoolView, node_class: ManifestObject | None) -> Iterator[RuleFinding]:
    reasons = {each.name: list(_too_large(job, each, node_class)) for each in _selected(job, pool)}
    unfit = {name: why for name, why in reasons.items() if why}
    if not unfit:
        return
    largest = max(unfit, key=lambda name: next(each.memory_bytes for each in pool.types if each.name == name))
    efa_only = all(all(EFA in reason for reason in why) for why in unfit.values())
    some = len(unfit) < len(reasons)
    yield finding(
        "efa" if efa_only else "request-too-large", job.manifest,
        f"{largest}: {'; '.join(unfit[largest])}"
        + (f" ({len(unfit)} of {len(reasons)} types of NodePool {pool.manifest.name} cannot hold it)" if some else ""),
        "ask for what is allocatable (`aliquot instances` shows it), or take a larger type",
        "warning" if some else None,
    )  # fmt: skip


def _selected(job: JobView, pool: PoolView) -> list[InstanceType]:
    def chosen(each: InstanceType) -> bool:
        labels = type_labels(each)
        return all(labels.get(key, value) == value for key, value in job.node_selector.items())

    return [each for each in pool.types if chosen(each)]


def _too_large(job: JobView, each: InstanceType, node_class: ManifestObject | None) -> Iterator[str]:
    memory, cpu = job.of_pod("memory", parse_bytes), job.of_pod("cpu", parse_millicores)
    room = each.allocatable_memory_bytes - DAEMONSET_BYTES
    cores = each.allocatable_cpu_millicores - DAEMONSET_MILLICORES
    if memory > room:
        yield (
            f"{memory / GIB:.1f} GiB requested, a pod can have {room / GIB:.1f} of its {each.memory_bytes / GIB:g} GiB"
        )
    if cpu > cores:
        yield f"{cpu / 1000:g} CPUs requested, a pod can have {cores / 1000:g} of its {each.vcpus}"
    if job.count(GPU) > each.gpus:
        yield f"{job.count(GPU)} GPUs requested, it has {each.gpus}"
    if job.count(EFA) > each.efa_interfaces:
        yield f"{job.count(EFA)} x {EFA} requested, it has {each.efa_interfaces}"
    disk = disk_bytes(node_class, each) if node_class is not None else None
    scratch = job.of_pod("ephemeral-storage", parse_bytes)
    if disk is not None and scratch > max(0, allocatable_disk_bytes(disk)):
        yield (
            f"{scratch / GIB:.1f} GiB of ephemeral-storage requested, a pod can have"
            f" {max(0, allocatable_disk_bytes(disk)) / GIB:.1f} of its disk's {disk / GIB:.0f} GiB"
        )


def _limits(job: JobView, pool: PoolView, node_class: ManifestObject | None) -> Iterator[RuleFinding]:
    limits, types = pool.manifest.get("spec", "limits") or {}, _selected(job, pool)
    fitting = [each for each in types if not list(_too_large(job, each, node_class))]
    if not fitting:
        return
    # Karpenter counts whole nodes; the smallest that serve decide.
    needed = {
        "cpu": job.nodes * min(each.vcpus for each in fitting) * 1000,
        "memory": job.nodes * min(each.memory_bytes for each in fitting),
        "nodes": job.nodes,
        GPU: job.nodes * min(each.gpus for each in fitting),
    }
    for name, value in limits.items():
        allowed = parse_millicores(value) if name == "cpu" else parse_bytes(value)
        if allowed is not None and name in needed and allowed < needed[name]:
            whole = needed[name] / 1000 if name == "cpu" else needed[name]
            shown = f"{whole / GIB:g} GiB" if name == "memory" else f"{whole:g}"
            yield finding(
                "pool-limit", pool.manifest, f"limits.{name} is {value}; {job.nodes} nodes need {shown}",
                f"limits.{name}: at least {shown}",
            )  # fmt: skip


def _drained(job: JobView, pool: PoolView) -> Iterator[RuleFinding]:
    told = str(pool.manifest.get("spec", "template", "spec", "terminationGracePeriod") or "")
    if job.annotations.get("karpenter.sh/do-not-disrupt") == "true":
        if not told:
            yield finding(
                "do-not-disrupt", job.manifest, "the pods have karpenter.sh/do-not-disrupt",
                'no such annotation; in the NodePool disruption.budgets: [{nodes: "0", reasons: [Drifted]}]',
            )  # fmt: skip
    elif not any(map(_keeps_drifted, pool.manifest.items("spec", "disruption", "budgets"))):
        yield finding(
            "drift", pool.manifest, "disruption.budgets allow nodes that have drifted to be replaced",
            'budgets: [{nodes: "0", reasons: [Drifted, Underutilized]}]',
        )  # fmt: skip
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(told))
    if told and seconds < job.grace_s:
        yield finding(
            "grace", pool.manifest, f"terminationGracePeriod is {told}, and the pods have {job.grace_s} s to save",
            "none, or longer than terminationGracePeriodSeconds of the pods",
        )  # fmt: skip


def _keeps_drifted(budget: object) -> bool:
    fields = mapping(budget)
    always = not fields.get("schedule")
    return always and str(fields.get("nodes")) in ("0", "0%") and "Drifted" in (fields.get("reasons") or ["Drifted"])


def _zones(job: JobView, pool: PoolView) -> Iterator[RuleFinding]:
    zones = pool.values(ZONE)
    one = job.node_selector.get(ZONE) is not None or len(zones) == 1
    terms = listed(dig(job.affinity, "podAffinity", "requiredDuringSchedulingIgnoredDuringExecution"))
    together = any(isinstance(term, dict) and term.get("topologyKey") == ZONE for term in terms)
    if job.nodes > 1 and not one and not together:
        yield finding(
            "zone-spread", job.manifest, "nothing keeps the nodes in one zone",
            f"nodeSelector {ZONE} (that of FSx), or podAffinity with that topologyKey",
        )  # fmt: skip
