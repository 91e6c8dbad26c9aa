"""What the account says about quota, role, images and file system.

botocore's Stubber checks every request and every answer against AWS' models of the services.
"""

from __future__ import annotations

import copy
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber

from aliquot.cluster.aws_resources import ask_resources
from aliquot.config.cluster_section import ClusterSection
from tests.cluster.cases import cluster_section

ROLE = {
    "Path": "/", "RoleName": "r", "RoleId": "AROA1234567890123456", "Arn": "arn:aws:iam::123456789012:role/r",
    "CreateDate": "2026-01-01T00:00:00Z", "AssumeRolePolicyDocument": '{"Service": "ec2.amazonaws.com"}',
}  # fmt: skip
FILE_SYSTEM = {
    "FileSystemId": "fs-0199e5a63bd90f796", "Lifecycle": "AVAILABLE", "StorageCapacity": 1200,
    "DNSName": "fs-0199e5a63bd90f796.fsx.us-east-1.amazonaws.com", "SubnetIds": ["subnet-0eabfaa81fb22bcaf"],
    "LustreConfiguration": {"MountName": "fsx", "DeploymentType": "PERSISTENT_2"},
}  # fmt: skip
LAYERS = '{"layers": [{"size": 2000000000}, {"size": 5000000000}]}'
INDEX = '{"manifests": [{"platform": {"architecture": "amd64"}, "digest": "sha256:0123"}]}'
ARM = '{"manifests": [{"platform": {"architecture": "arm64"}}, {"platform": {"architecture": "unknown"}}]}'
ANSWERS: dict[tuple[str, str], Any] = {
    ("service-quotas", "get_service_quota"): {"Quota": {"Value": 1000.0}},
    ("iam", "get_role"): {"Role": ROLE},
    ("ec2", "describe_images"): {"Images": [{"ImageId": "ami-0123456789abcdef0"}]},
    ("ecr", "batch_get_image"): {"images": [{"repositoryName": "aliquot"}]},
    ("fsx", "describe_file_systems"): {"FileSystems": [FILE_SYSTEM]},
    ("ec2", "describe_vpc_endpoints"): {"VpcEndpoints": []},
    ("ec2", "describe_placement_groups"): {"PlacementGroups": [{"Strategy": "cluster"}]},
    ("ec2", "describe_subnets"): {"Subnets": [{"AvailabilityZone": "us-east-1a"}]},
}
PARAMETERS: dict[str, Any] = {
    "get_service_quota": {"ServiceCode": "ec2", "QuotaCode": "L-1216C47A"},
    "batch_get_image": {"registryId": "123456789012", "repositoryName": "aliquot", "acceptedMediaTypes": ANY,
                        "imageIds": [{"imageTag": "0.1.0"}]},
}  # fmt: skip


class Account:
    """Stands for the module boto3; every client answers as ANSWERS say, with `changes`. None: not authorised."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self.changes = changes

    def client(self, name: str) -> Any:
        client = boto3.client(name, "us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
        stubber = Stubber(client)
        for service, operation in ANSWERS:
            if service == name:
                answer = copy.deepcopy(self.changes.get(operation, ANSWERS[service, operation]))  # botocore changes it
                if isinstance(answer, str):
                    stubber.add_client_error(operation, answer)
                else:
                    stubber.add_response(operation, answer, PARAMETERS.get(operation))
        stubber.activate()
        if name == "ec2":  # two operations, each by a client of its own
            return _EitherOrder(self.changes)
        return client


class _EitherOrder:
    def __init__(self, changes: dict[str, Any]) -> None:
        self.changes = changes

    def __getattr__(self, operation: str) -> Any:
        client = boto3.client("ec2", "us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
        stubber = Stubber(client)
        stubber.add_response(operation, self.changes.get(operation, ANSWERS["ec2", operation]))
        stubber.activate()
        return getattr(client, operation)


def ask(section: dict[str, Any] | None = None, **changes: Any) -> list[tuple[str, str]]:
    made = ClusterSection.model_validate(section or cluster_section())
    return [(each.rule, each.message) for each in ask_resources(Account(changes), made)]


def test_all_in_order() -> None:
    assert ask() == []


@pytest.mark.parametrize(
    ("operation", "answer", "rule", "words"),
    [
        ("get_service_quota", {"Quota": {"Value": 5.0}}, "vcpu-quota", "128 vCPUs; the account may run 5"),
        ("get_role", "NoSuchEntity", "aws-resource", "GetRole: NoSuchEntity"),
        ("get_role", {"Role": {**ROLE, "AssumeRolePolicyDocument": "pods.eks"}}, "aws-resource", "no role for EC2"),
        ("describe_images", {"Images": []}, "aws-resource", "amazon-eks-node-al2023-x86_64-standard-*-v20260903"),
        ("batch_get_image", {"images": []}, "aws-resource", "aliquot:0.1.0 is not in the registry"),
        (
            "batch_get_image",
            {"images": [{"imageManifest": ARM}]},
            "aws-resource",
            "built for arm64, the nodes are amd64",
        ),
        ("batch_get_image", "RepositoryNotFoundException", "aws-resource", "RepositoryNotFound"),
        ("describe_file_systems", "FileSystemNotFound", "aws-resource", "FileSystemNotFound"),
        ("describe_file_systems", "AccessDeniedException", "permission", "was refused"),
        (
            "describe_file_systems",
            {"FileSystems": [FILE_SYSTEM | {"Lifecycle": "CREATING"}]},
            "aws-resource",
            "CREATING",
        ),
        ("describe_file_systems", {"FileSystems": [FILE_SYSTEM | {"StorageCapacity": 2400}]}, "aws-resource", "2400"),
        (
            "describe_file_systems",
            {"FileSystems": [FILE_SYSTEM | {"FileSystemTypeVersion": "2.10"}]},
            "aws-resource",
            "Lustre 2.10, which Amazon Linux 2023 cannot mount",
        ),
        (
            "describe_file_systems",
            {"FileSystems": [FILE_SYSTEM | {"LustreConfiguration": {"MountName": "abcdefgh"}}]},
            "aws-resource",
            "fsx, but FSx says abcdefgh",
        ),
        (
            "describe_file_systems",
            {"FileSystems": [FILE_SYSTEM | {"LustreConfiguration": {"PerUnitStorageThroughput": 1000}}]},
            "aws-resource",
            "125, but FSx says 1000",
        ),
        ("describe_subnets", {"Subnets": [{"AvailabilityZone": "us-east-1b"}]}, "aws-resource", "is in us-east-1b"),
    ],
    ids=str,
)
def test_each_answer(operation: str, answer: Any, rule: str, words: str) -> None:
    ((found, message),) = ask(**{operation: answer})
    assert found == rule and words in message


def test_many_nodes() -> None:
    """At 64 nodes: the bytes of the image, and the places of a placement group."""
    many = cluster_section(nodes=64, placement_group="training")
    plenty: dict[str, Any] = {"get_service_quota": {"Quota": {"Value": 1e6}}}
    plenty["batch_get_image"] = {"images": [{"imageManifest": LAYERS}]}
    assert ask(many) == [("vcpu-quota", ANY)]
    assert ask(many, **plenty) == [
        ("image-pull", "64 nodes pull 6.5 GiB each, 417 GiB together, and no VPC endpoint leads to S3")
    ]
    assert ask(many, **plenty, describe_vpc_endpoints={"VpcEndpoints": [{"VpcEndpointId": "vpce-1"}]}) == []
    plenty["batch_get_image"] = ANSWERS["ecr", "batch_get_image"]
    spread = {"describe_placement_groups": {"PlacementGroups": [{"Strategy": "spread"}]}}
    assert "at most 7 nodes" in str(ask(many, **plenty, **spread))
    assert "does not bring nodes close" in str(ask(cluster_section(placement_group="pg-01"), **spread))


def test_image_of_several_architectures() -> None:
    """The index names a manifest for each architecture, which has the layers."""
    answers = iter([INDEX, LAYERS])

    class Registry:
        def batch_get_image(self, **_: Any) -> dict[str, Any]:
            return {"images": [{"imageManifest": next(answers)}]}

    class Session(Account):
        def client(self, name: str) -> Any:
            return Registry() if name == "ecr" else super().client(name)

    section = ClusterSection.model_validate(cluster_section(nodes=64))
    found = ask_resources(Session({"get_service_quota": {"Quota": {"Value": 1e6}}}), section)
    assert [each.rule for each in found] == ["image-pull"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"capacity": ["spot"]}, "L-34B43A08"),
        ({"instance_types": ["g6e.8xlarge"]}, "L-DB2E81BA"),
        ({"instance_types": ["p5.48xlarge"], "capacity": ["spot"]}, "L-C4BD4855"),
        ({"instance_types": ["p5.48xlarge"], "capacity": ["reserved"], "capacity_reservation": "cr-01"}, None),
    ],
    ids=str,
)
def test_quota_of_the_family(changes: dict[str, Any], code: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARAMETERS, "get_service_quota", {"ServiceCode": "ec2", "QuotaCode": code})
    too_few = ask(cluster_section(**changes), get_service_quota={"Quota": {"Value": 0.0}})
    assert [rule for rule, _ in too_few] == ([] if code is None else ["vcpu-quota"])
