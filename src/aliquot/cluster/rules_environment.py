"""Rules about a job together with its surroundings: nodes on which its pods can be scheduled, region, GPUs, networks.

Every object alone may be valid; these rules compare objects that lie in one directory of manifests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.cluster.capacity import check_fit, selects
from aliquot.cluster.findings import Check, RuleFinding, failures, finding, values
from aliquot.cluster.job import EFA, GPU
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, mappings, select_kinds
from aliquot.cluster.node_pool_view import ZONE, PoolView, disk_bytes
from aliquot.cluster.quantity import GIB

_ZONE_NAME = re.compile(r"([a-z]{2}(?:-[a-z]+)+-\d)[a-z]")
_FSX_NAME = re.compile(r"fs-[0-9a-f]+\.fsx\.([a-z0-9-]+)\.amazonaws\.com")
_VOLUME_ZONES = "spec/nodeAffinity/required/nodeSelectorTerms/*/matchExpressions/*"
_ECR_NAME = re.compile(r"\d{12}\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com/")
_GPU_LABEL = "nvidia.com/gpu.present"
# The unpacked image with CUDA libraries takes about 15 GiB, and the system, other images and logs take 20 GiB.
_GPU_DISK_BYTES = 50 * GIB
_NODE_CLASS = "EC2NodeClass"
_ARM = re.compile(r"arm64|aarch64|graviton", re.IGNORECASE)


def check_environment(
    jobs: Sequence[JobView], pools: Sequence[PoolView], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    yield from _regions(jobs, pools, manifests)
    for pool in pools:
        yield from _nodes(pool, pool.node_class(manifests), any(job.count(GPU) for job in jobs))
    for job in jobs:
        yield from _architecture(job, pools)
        yield from _network(job, manifests)


def _regions(
    jobs: Sequence[JobView], pools: Sequence[PoolView], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    zones = [match[1] for pool in pools for zone in pool.values(ZONE) if (match := _ZONE_NAME.fullmatch(zone))]
    if not zones:
        return
    region = zones[0]
    for volume in select_kinds(manifests, "PersistentVolume"):
        match = _FSX_NAME.fullmatch(str(volume.get("spec", "csi", "volumeAttributes", "dnsname") or ""))
        terms = [mapping(term) for _, term in values(volume.get(), _VOLUME_ZONES.split("/"))]
        allowed = {str(zone) for term in terms if term.get("key") == ZONE for zone in listed(term.get("values"))}
        used = {zone for pool in pools for zone in pool.values(ZONE)}
        yield from failures(
            volume,
            Check(
                match and match[1] != region,
                "region",
                f"the file system {match and match[0]} is in {match and match[1]}, the nodes are in {region}",
                "a file system of the nodes' zone",
            ),
            Check(
                allowed and not allowed & used,
                "region",
                f"the volume is in {', '.join(sorted(allowed))}, the nodes are in {', '.join(sorted(used))}",
                "the zone of the file system for volume and nodes",
            ),
        )
    for job in jobs:
        if (match := _ECR_NAME.match(job.image)) and match[1] != region:
            yield finding(
                "region",
                job.manifest,
                f"the image comes from {match[1]}, the nodes are in {region}",
                f"push the image to {region}",
                "warning",
            )


def _architecture(job: JobView, pools: Sequence[PoolView]) -> Iterator[RuleFinding]:
    arm_image = _ARM.search(job.image) is not None
    for pool in pools:
        architectures = {node_type.arch for node_type in pool.types}
        yield from failures(
            job.manifest,
            Check(
                arm_image and architectures == {"amd64"},
                "architecture",
                f"{job.image} on amd64 nodes",
                "an image for linux/amd64",
            ),
            Check(
                not arm_image and "arm64" in architectures,
                "architecture",
                f"NodePool {pool.manifest.name} may make arm64 nodes, and deploy/Dockerfile builds for amd64",
                "amd64 types only, or an image of arm64",
                "warning",
            ),
        )


def _nodes(pool: PoolView, node_class: ManifestObject | None, gpu_job: bool) -> Iterator[RuleFinding]:
    is_used = gpu_job and pool.gpu
    yield from failures(
        pool.manifest,
        Check(
            is_used and pool.labels.get(_GPU_LABEL) != "true",
            "gpu-label",
            "NVIDIA's device plugin does not select these nodes",
            f'{_GPU_LABEL}: "true" in spec.template.metadata.labels',
        ),
        Check(
            node_class is None and pool.manifest.get("spec", "template", "spec", "nodeClassRef", "kind") == _NODE_CLASS,
            "node-class",
            f"nodeClassRef names {pool.node_class_name!r}",
            "check that one too, or correct the name",
        ),
    )
    if node_class is None:
        return
    disk = min((disk_bytes(node_class, node_type) or _GPU_DISK_BYTES for node_type in pool.types), default=0)
    terms = node_class.items("spec", "capacityReservationSelectorTerms")
    yield from failures(
        node_class,
        Check(
            is_used and disk < _GPU_DISK_BYTES,
            "volume-size",
            f"the disk for images has {disk / GIB:.0f} GiB",
            f"at least {_GPU_DISK_BYTES // GIB} GiB (cluster.volume_gib)",
        ),
        Check(
            "reserved" in pool.capacities and not terms,
            "reservation",
            "the pool takes reserved nodes, and no term selects any",
            "capacityReservationSelectorTerms: [{id: cr-...}], in a config cluster.capacity_reservation",
        ),
    )


def _network(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Report policies that cut every pod of the namespace off, unless another policy opens the same direction.

    Ranks connect on any port, so rules for certain ports, such as that of DNS, do not open a direction.
    """
    policies = [
        policy
        for policy in select_kinds(manifests, "NetworkPolicy")
        if policy.namespace == job.manifest.namespace
        and not policy.get("spec", "podSelector", "matchExpressions")
        and mapping(policy.get("spec", "podSelector", "matchLabels")).items() <= job.labels.items()
    ]
    for policy in policies:
        for direction, needs in (("Egress", "the hub and other ranks"), ("Ingress", "other ranks")):
            is_restricted = direction in listed(policy.get("spec", "policyTypes"))
            rules = [rule for other in policies for rule in other.items("spec", direction.lower())]
            is_open = any(not rule.get("ports") for rule in rules)
            yield from failures(
                policy,
                Check(
                    is_restricted and not is_open,
                    "network-policy",
                    f"no policy of the job's pods opens {direction.lower()} on all ports, and the pods need {needs}",
                    f"a policy with an {direction.lower()} rule for the job's pods",
                ),
                Check(
                    is_restricted and is_open and direction == "Egress" and not any(map(_opens_dns, rules)),
                    "name-resolution",
                    "no egress rule of the job's pods reaches DNS",
                    "an egress rule for port 53 (UDP and TCP) to the namespace kube-system",
                ),
            )


def _opens_dns(rule: dict[str, Any]) -> bool:
    """Return whether an egress rule reaches port 53 of another namespace, where the cluster's DNS runs."""
    ports = [mapping(port).get("port") for port in listed(rule.get("ports"))]
    peers = [mapping(peer) for peer in listed(rule.get("to"))]
    is_abroad = not peers or any("namespaceSelector" in peer or "ipBlock" in peer for peer in peers)
    return is_abroad and (not ports or any(port in (53, "dns", "dns-tcp") for port in ports))


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
