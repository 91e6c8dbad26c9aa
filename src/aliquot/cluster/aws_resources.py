"""Check with boto3 that an AWS account has what a config names: quota, role, images and file system."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from aliquot.catalogue.instances import InstanceType, instance
from aliquot.cluster.findings import Check, RuleFinding, failures, finding
from aliquot.cluster.manifests import dig, listed, mapping
from aliquot.cluster.quantity import GIB
from aliquot.cluster.storage_fields import TOO_OLD_LUSTRE
from aliquot.config.cluster_section import ClusterSection

# Quotas of running vCPUs by the letter of a family and the capacity type. Source: EC2's user guide, "Service quotas".
_STANDARD = {"on-demand": "L-1216C47A", "spot": "L-34B43A08"}
_VCPU_QUOTAS = {
    "g": {"on-demand": "L-DB2E81BA", "spot": "L-3819A6DF"},
    "p": {"on-demand": "L-417A185B", "spot": "L-7212CCBC"},
    **dict.fromkeys("acdhimrtz", _STANDARD),
}
_MUCH_PULLED_BYTES = 100 * GIB  # costs 5 USD through a NAT gateway
_P5_SPOT = "L-C4BD4855"
_ECR = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com/([^:@]+)(?::([^@]+))?(?:@(sha256:[0-9a-f]+))?")
# Parts of the codes with which AWS says that something does not exist.
_ABSENT = ("NoSuchEntity", "NotFound", "Unknown", "Malformed")


def ask_resources(session: Any, section: ClusterSection) -> Iterator[RuleFinding]:
    """Check each thing that `section` names. A refused or failed query becomes a finding.

    Args:
        session: a boto3.Session.
    """
    from botocore.exceptions import ClientError

    for check in (_quota, _role, _node_image, _container_image, _placement, _file_system):
        try:
            yield from check(session, section)
        except ClientError as error:
            yield refusal(error, "aws-resource", "cluster")


def refusal(error: Any, rule: str, where: object) -> RuleFinding:
    """Convert botocore's ClientError to a finding of `rule` if a resource does not exist, else of `permission`."""
    details = mapping(error.response.get("Error"))
    code, message = str(details.get("Code")), " ".join(str(details.get("Message") or "").split())
    reason = f"{code}: {message}" if message else code
    if any(word in code for word in _ABSENT):
        return finding(
            rule,
            where,
            f"{error.operation_name}: {reason}",
            "create it, or correct its name or id, in the account and region that it belongs to",
        )
    return finding(
        "permission",
        "AWS",
        f"{error.operation_name} was refused: {reason}",
        "a policy that allows it, or send the request with the aws command",
    )


def _quota(session: Any, section: ClusterSection) -> Iterator[RuleFinding]:
    client = session.client("service-quotas")
    ec2 = instance(section.instance_types[0])
    codes, needed = _quota_codes(ec2), section.most_nodes * ec2.vcpus
    for capacity in (capacity for capacity in section.capacity if capacity in codes):
        value = client.get_service_quota(ServiceCode="ec2", QuotaCode=codes[capacity])["Quota"]["Value"]
        yield from failures(
            "cluster.instance_types",
            Check(
                value < needed,
                "vcpu-quota",
                f"{section.most_nodes} x {ec2.name} have {needed} vCPUs; the account may run {value:g} ({capacity})",
                f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {codes[capacity]}"
                f" --desired-value {2 * needed}",
            ),
        )


def _quota_codes(ec2: InstanceType) -> dict[str, str]:
    """Return the code of the quota that nodes count against by capacity type; none for reservations, rare families."""
    if ec2.family.startswith(("hpc", "trn", "inf", "dl", "vt", "u")):
        return {}
    return _VCPU_QUOTAS.get(ec2.family[0], {}) | ({"spot": _P5_SPOT} if ec2.family.startswith("p5") else {})


def _role(session: Any, section: ClusterSection) -> Iterator[RuleFinding]:
    role = session.client("iam").get_role(RoleName=section.node_role)["Role"]
    return failures(
        "cluster.node_role",
        Check(
            "ec2.amazonaws.com" not in str(role.get("AssumeRolePolicyDocument")),
            "aws-resource",
            f"{section.node_role} is no role for EC2, so nodes cannot take it",
            "KarpenterNodeRole-CLUSTER",
        ),
    )


def _node_image(session: Any, section: ClusterSection) -> Iterator[RuleFinding]:
    family, _, version = section.ami.partition("@")
    if family != "al2023":
        return
    arch = {"amd64": "x86_64"}.get(instance(section.instance_types[0]).arch, "arm64")
    kind = "nvidia" if instance(section.instance_types[0]).gpus else "standard"
    name = f"amazon-eks-node-al2023-{arch}-{kind}-*-{version}"
    answer = session.client("ec2").describe_images(Owners=["amazon"], Filters=[{"Name": "name", "Values": [name]}])
    yield from failures(
        "cluster.ami",
        Check(
            not answer["Images"],
            "aws-resource",
            f"no image of Amazon is named {name}",
            f"aws ec2 describe-images --owners amazon --filters 'Name=name,Values={name.removesuffix(version)}*'",
        ),
    )


def _container_image(session: Any, section: ClusterSection) -> Iterator[RuleFinding]:
    match = _ECR.fullmatch(section.image)
    if match is None:  # another registry
        return
    account, region, repository, tag, digest = match.groups()
    client = session.client("ecr")

    def read(image: dict[str, str]) -> list[dict[str, Any]]:
        answer = client.batch_get_image(
            registryId=account, repositoryName=repository, imageIds=[image], acceptedMediaTypes=_INDEXES + _MANIFESTS
        )
        return [mapping(json.loads(item.get("imageManifest") or "{}")) for item in answer["images"]]

    images = read({"imageDigest": digest} if digest else {"imageTag": tag or "latest"})
    yield from failures(
        "cluster.image",
        Check(
            not images,
            "aws-resource",
            f"{section.image} is not in the registry",
            f"docker build --platform linux/amd64 ... -t {section.image} . && docker push {section.image}",
        ),
    )
    arch = instance(section.instance_types[0]).arch
    for image in images:
        digests = {dig(item, "platform", "architecture"): item.get("digest") for item in listed(image.get("manifests"))}
        architectures = digests.keys() - {None, "unknown"}
        yield from failures(
            "cluster.image",
            Check(
                architectures and arch not in architectures,
                "aws-resource",
                f"{section.image} is built for {', '.join(sorted(architectures))}, the nodes are {arch}",
                f"docker build --platform linux/{arch}",
            ),
        )
        if digests.get(arch):  # an index refers to a manifest of each architecture
            image = next(iter(read({"imageDigest": digests[arch]})), {})
        image_bytes = sum(layer.get("size", 0) for layer in listed(image.get("layers")))
        yield from _pulls(session, section, image_bytes, f"com.amazonaws.{region}.s3")


def _pulls(session: Any, section: ClusterSection, image_bytes: int, service: str) -> Iterator[RuleFinding]:
    """Check that the layers of the image, which ECR keeps in S3, do not pass the NAT gateway to many nodes."""
    total = section.most_nodes * image_bytes
    if total < _MUCH_PULLED_BYTES:
        return
    filters = [{"Name": "service-name", "Values": [service]}, {"Name": "vpc-endpoint-state", "Values": ["available"]}]
    yield from failures(
        "cluster.image",
        Check(
            not session.client("ec2").describe_vpc_endpoints(Filters=filters)["VpcEndpoints"],
            "image-pull",
            f"{section.most_nodes} nodes pull {image_bytes / GIB:.1f} GiB each, {total / GIB:,.0f} GiB together, and no"
            " VPC endpoint leads to S3",
            f"aws ec2 create-vpc-endpoint --vpc-id VPC --service-name {service} --route-table-ids TABLES",
        ),
    )


def _placement(session: Any, section: ClusterSection) -> Iterator[RuleFinding]:
    group = section.placement_group
    if group is None:
        return
    names = {"GroupIds" if group.startswith("pg-") else "GroupNames": [group]}
    for answer in session.client("ec2").describe_placement_groups(**names)["PlacementGroups"]:
        strategy = answer.get("Strategy")
        message = f"{group} has the strategy {strategy}, which does not bring nodes close to each other"
        yield from failures(
            "cluster.placement_group",
            Check(
                strategy != "cluster",
                "aws-resource",
                f"{message}{'; it takes at most 7 nodes of a zone' if strategy == 'spread' else ''}",
                "a group with the strategy cluster",
                "error" if strategy == "spread" and section.most_nodes > 7 else "warning",
            ),
        )


_INDEXES = ["application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"]
_MANIFESTS = ["application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"]


def _file_system(session: Any, section: ClusterSection) -> Iterator[RuleFinding]:
    storage, where = section.storage, "cluster.storage"
    if storage.kind != "fsx-static":
        return
    answer = session.client("fsx").describe_file_systems(FileSystemIds=[storage.file_system_id])
    for actual in answer["FileSystems"]:
        lustre, state = mapping(actual.get("LustreConfiguration")), actual.get("Lifecycle")
        facts = {
            "dnsname": (storage.dnsname, actual.get("DNSName")),
            "mountname": (storage.mountname, lustre.get("MountName")),
            "deployment_type": (storage.deployment_type, lustre.get("DeploymentType")),
            "size_gib": (storage.size_gib, actual.get("StorageCapacity")),
            "throughput_mb_per_tib": (storage.throughput_mb_per_tib, lustre.get("PerUnitStorageThroughput")),
        }
        for key, (written, value) in facts.items():
            is_other, message = value not in (None, written), f"{written}, but FSx says {value}"
            yield from failures(f"{where}.{key}", Check(is_other, "aws-resource", message, f"{key}: {value}"))
        yield from failures(
            where,
            Check(
                actual.get("FileSystemTypeVersion") == TOO_OLD_LUSTRE,
                "aws-resource",
                f"the file system has Lustre {TOO_OLD_LUSTRE}, which Amazon Linux 2023 cannot mount",
                f"aws fsx update-file-system --file-system-id {storage.file_system_id} --file-system-type-version 2.15",
            ),
            Check(state != "AVAILABLE", "aws-resource", f"the file system is {state}", "wait until it is AVAILABLE"),
        )
        if section.zone is not None and (subnets := actual.get("SubnetIds")):
            known = session.client("ec2").describe_subnets(SubnetIds=subnets[:1])["Subnets"]
            zone = known[0]["AvailabilityZone"] if known else section.zone
            message = f"{section.zone}, but the file system is in {zone}"
            yield from failures("cluster.zone", Check(zone != section.zone, "aws-resource", message, f"zone: {zone}"))
