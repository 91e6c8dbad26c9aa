"""Rules about the surroundings of a job: region, reservations, GPU nodes, networks and Kubernetes Jobs.

Every object alone may be valid; these rules compare objects that lie in one directory of manifests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from aliquot.cluster.findings import Check, RuleFinding, failures, finding
from aliquot.cluster.job import GPU
from aliquot.cluster.job_view import JobView, pod_spec
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, mappings, select_kinds
from aliquot.cluster.node_pool_view import ZONE, PoolView, disk_bytes
from aliquot.cluster.quantity import GIB
from aliquot.cluster.rules_references import check_mounts

_ZONE_NAME = re.compile(r"([a-z]{2}(?:-[a-z]+)+-\d)[a-z]")
_FSX_NAME = re.compile(r"fs-[0-9a-f]+\.fsx\.([a-z0-9-]+)\.amazonaws\.com")
_ECR_NAME = re.compile(r"\d{12}\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com/")
_GPU_LABEL = "nvidia.com/gpu.present"
# The unpacked image with CUDA libraries takes about 15 GiB, and the system, other images and logs take 20 GiB.
_GPU_DISK_BYTES = 50 * GIB
_ARM = re.compile(r"arm64|aarch64|graviton", re.IGNORECASE)


def check_environment(
    jobs: Sequence[JobView], pools: Sequence[PoolView], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    yield from _regions(jobs, pools, manifests)
    for pool in pools:
        yield from _reservation(pool, manifests)
    for job in jobs:
        yield from _architecture(job, pools)
        yield from _gpu_nodes(job, pools, manifests)
        yield from _network(job, manifests)
    for job_manifest in select_kinds(manifests, "Job"):
        yield from _kubernetes_job(job_manifest)


def _regions(
    jobs: Sequence[JobView], pools: Sequence[PoolView], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    zones = [match[1] for pool in pools for zone in pool.values(ZONE) if (match := _ZONE_NAME.fullmatch(zone))]
    if not zones:
        return
    region = zones[0]
    for volume in select_kinds(manifests, "PersistentVolume"):
        dnsname = str(volume.get("spec", "csi", "volumeAttributes", "dnsname") or "")
        if (match := _FSX_NAME.fullmatch(dnsname)) and match[1] != region:
            message = f"the file system {dnsname} is in {match[1]}, the nodes are in {region}"
            yield finding("region", volume, message, "a file system of the nodes' zone")
    for job in jobs:
        if (match := _ECR_NAME.match(job.image)) and match[1] != region:
            message = f"the image comes from {match[1]}, the nodes are in {region}"
            yield finding("region", job.manifest, message, f"push the image to {region}", "warning")


def _reservation(pool: PoolView, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    node_class = pool.node_class(manifests)
    if "reserved" not in pool.capacities or node_class is None:
        return
    if not node_class.items("spec", "capacityReservationSelectorTerms"):
        fix = "capacityReservationSelectorTerms: [{id: cr-...}], in a config cluster.capacity_reservation"
        yield finding("reservation", node_class, "the pool takes reserved nodes, and no term selects any", fix)


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


def _gpu_nodes(job: JobView, pools: Sequence[PoolView], manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    for pool in pools if job.count(GPU) else ():
        if not pool.gpu:
            continue
        if pool.labels.get(_GPU_LABEL) != "true":
            fix = f'{_GPU_LABEL}: "true" in spec.template.metadata.labels'
            yield finding("gpu-label", pool.manifest, "NVIDIA's device plugin does not select these nodes", fix)
        node_class = pool.node_class(manifests)
        disks = [] if node_class is None else [disk_bytes(node_class, node_type) for node_type in pool.types]
        small = [disk for disk in disks if disk is not None and disk < _GPU_DISK_BYTES]
        if small:
            message = f"the disk for images has {min(small) / GIB:.0f} GiB"
            fix = f"at least {_GPU_DISK_BYTES // GIB} GiB (cluster.volume_gib)"
            yield finding("volume-size", node_class, message, fix)


def _network(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Report policies that cut every pod of the namespace off, unless another policy opens the same direction.

    Ranks connect on any port, so rules for certain ports, such as that of DNS, do not open a direction.
    """
    policies = [
        policy
        for policy in select_kinds(manifests, "NetworkPolicy")
        if policy.namespace == job.manifest.namespace and not policy.in_other_namespace(job.manifest)
    ]
    for policy in policies:
        if policy.get("spec", "podSelector") not in ({}, None):
            continue
        for direction, needs in (("Egress", "DNS, the hub and other ranks"), ("Ingress", "other ranks")):
            rules = direction.lower()
            is_restricted = direction in listed(policy.get("spec", "policyTypes"))
            if is_restricted and all(rule.get("ports") for other in policies for rule in other.items("spec", rules)):
                message = f"no policy of the job's namespace opens {rules} on all ports, and the pods need {needs}"
                yield finding("network-policy", policy, message, f"a policy with an {rules} rule for the job's pods")


def _kubernetes_job(job: ManifestObject) -> Iterator[RuleFinding]:
    """Check a Job of batch/v1 as its validation in the API server does, beyond its schema."""
    spec = mapping(job.get("spec", "template", "spec"))
    if spec.get("restartPolicy") not in ("Never", "OnFailure"):
        shown = spec.get("restartPolicy") or "not set, so Always"
        yield finding("restart-policy", job, f"restartPolicy is {shown}", "restartPolicy: Never")
    yield from check_mounts(job, [spec], mappings(spec, "volumes"))


def check_hugepages(job: JobView) -> Iterator[RuleFinding]:
    """Report requests for huge pages: Karpenter does not know the resource, so it makes no node for the pod."""
    resources = [{"requests": job.requests, "limits": job.limits}]
    resources += [mapping(dig(item, "resources")) for item in mappings(pod_spec(job), "containers")]
    asked = {name for item in resources for part in item.values() for name in mapping(part)}
    if pages := sorted(name for name in asked if str(name).startswith("hugepages-")):
        message = f"{', '.join(pages)}: Karpenter makes no node with huge pages, so the pods stay Pending"
        yield finding("request-too-large", job.manifest, message, "leave huge pages out (FI_EFA_USE_HUGE_PAGE=0)")
