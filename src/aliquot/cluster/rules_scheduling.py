"""Rules about a job together with its NodePools: whether the pods can be scheduled on the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.cluster.capacity import check_fit, selects
from aliquot.cluster.findings import Check, RuleFinding, failures, finding
from aliquot.cluster.job import EFA, GPU
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, mappings
from aliquot.cluster.node_pool_view import ZONE, PoolView

_DURATION = re.compile(r"([0-9.]+)(h|m|s)")
_SECONDS = {"h": 3600, "m": 60, "s": 1}


def check_together(
    job: JobView, pools: Sequence[PoolView], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    """Check a job against the NodePools `pools`; `manifests` contain the node classes of the pools."""
    if not pools:
        return
    chosen = [pool for pool in pools if selects(job, pool)]
    if not chosen:
        names = ", ".join(pool.manifest.name for pool in pools)
        yield finding(
            "node-selector",
            job.manifest,
            f"nodeSelector {job.pod.get('nodeSelector')} meets no node of {names}",
            "labels in spec.template.metadata.labels of a NodePool, or another selector",
        )
        return
    tolerated = [pool for pool in chosen if not _untolerated(job, pool)]
    if not tolerated:
        yield from (
            finding(
                "taint",
                job.manifest,
                f"NodePool {pool.manifest.name} has the taint {taint.get('key')}={taint.get('value', '')}:"
                f"{taint.get('effect')}",
                "a toleration in the patch of the TrainJob",
            )
            for pool in chosen
            for taint in _untolerated(job, pool)
        )
        return
    yield from _alike(job, tolerated)
    for pool in tolerated:
        node_class = pool.node_class(manifests)
        yield from check_fit(job, pool, node_class)
        yield from _zones(job, pool)
        yield from _drained(job, pool)
        yield from _locked_memory(job, node_class) if node_class is not None else ()


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


def _locked_memory(job: JobView, node_class: ManifestObject) -> Iterator[RuleFinding]:
    """Check that nodes of Amazon Linux 2023 raise the limit of locked memory; Bottlerocket does without user data."""
    aliases = [str(term.get("alias") or "") for term in node_class.items("spec", "amiSelectorTerms")]
    is_al2023 = node_class.get("spec", "amiFamily") == "AL2023" or any(name.startswith("al2023@") for name in aliases)
    yield from failures(
        node_class,
        Check(
            job.count(EFA) and is_al2023 and "MEMLOCK" not in str(node_class.get("spec", "userData")),
            "locked-memory",
            "userData does not raise the limit of locked memory",
            "the NodeConfig that `render` writes without cluster.user_data, with RLIMIT_MEMLOCK",
        ),
    )


def _untolerated(job: JobView, pool: PoolView) -> list[dict[str, Any]]:
    hard = [taint for taint in pool.taints if taint.get("effect") != "PreferNoSchedule"]
    return [
        taint
        for taint in hard
        if not any(_tolerates(toleration, taint) for toleration in mappings(job.pod, "tolerations"))
    ]


def _tolerates(toleration: dict[str, Any], taint: dict[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return (toleration.get("key"), toleration.get("value", "")) == (taint.get("key"), taint.get("value", ""))


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
    is_one_zone = mapping(job.pod.get("nodeSelector")).get(ZONE) is not None or len(pool.values(ZONE)) == 1
    terms = listed(dig(job.pod, "affinity", "podAffinity", "requiredDuringSchedulingIgnoredDuringExecution"))
    has_affinity = any(isinstance(term, dict) and term.get("topologyKey") == ZONE for term in terms)
    return failures(
        job.manifest,
        Check(
            job.nodes > 1 and not is_one_zone and not has_affinity,
            "zone-spread",
            "nothing keeps the nodes in one zone",
            f"nodeSelector {ZONE} (that of FSx), or podAffinity with that topologyKey",
        ),
    )
