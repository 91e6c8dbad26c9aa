"""What the account says, on moto's EC2.

Quota, role, images and file system are answers of the Stubber of botocore, which checks each request against the
models of the services.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.client
import pytest
from botocore.exceptions import ClientError
from botocore.stub import ANY, Stubber
from moto import mock_aws

from aliquot.cluster.aws_account import ask_account
from aliquot.cluster.aws_resources import ask_resources
from aliquot.cluster.job import describe
from aliquot.cluster.render import parsed
from aliquot.config.cluster_section import ClusterSection
from tests.cluster.cases import cluster_section, config, cpu_job, dynamic_storage, gpu_job, plan


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr("aliquot.cluster.aws_account.ask_resources", lambda session, section: ())
    with mock_aws():
        yield boto3.client("ec2", "us-east-1")


def network(ec2: Any, zone: str = "us-east-1a") -> str:
    """A VPC with one tagged subnet in `zone` and one tagged security group; the group's id."""
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24", AvailabilityZone=zone)["Subnet"]["SubnetId"]
    group: str = ec2.create_security_group(VpcId=vpc, GroupName="nodes", Description="nodes")["GroupId"]
    tags = [{"Key": "karpenter.sh/discovery", "Value": "training-on-eks"}]
    ec2.create_tags(Resources=[subnet, group], Tags=tags)
    return group


def allow(ec2: Any, group: str, protocol: str, source: str, first: int = -1, last: int = -1) -> None:
    rule = {"IpProtocol": protocol, "FromPort": first, "ToPort": last, "UserIdGroupPairs": [{"GroupId": source}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])


@pytest.fixture
def group(ec2: Any) -> str:
    """The security group of a network in which nothing is amiss."""
    group = network(ec2)
    allow(ec2, group, "-1", group)
    return group


def found(**changes: Any) -> dict[str, str]:
    job = cpu_job(**changes)
    return {each.rule: each.message for each in ask_account(parsed(job), job.section)}


def test_all_in_order(group: str) -> None:
    assert found() == {}


@pytest.mark.parametrize("nodes", [4, 64])
def test_addresses(group: str, nodes: int) -> None:
    """A /24 has 251 addresses: enough for four nodes, and not for 64."""
    job = describe(config(cluster_section(nodes=nodes)), plan(nodes=nodes))
    messages = [each.message for each in ask_account(parsed(job), job.section)]
    assert messages == ([] if nodes == 4 else ["64 nodes take about 3840 addresses, and 251 are free"])


def test_the_group_does_not_trust_itself(ec2: Any) -> None:
    group = network(ec2)
    allow(ec2, group, "tcp", group, 988, 988)
    assert group in found()["security-group"]


def egress(ec2: Any, group: str, allowed: bool, **pair: Any) -> None:
    change = ec2.authorize_security_group_egress if allowed else ec2.revoke_security_group_egress
    change(GroupId=group, IpPermissions=[{"IpProtocol": "-1", "FromPort": -1, "ToPort": -1, **pair}])


def test_egress(ec2: Any, group: str) -> None:
    """TCP leaves by a rule for all addresses; EFA leaves only by a rule for the group itself."""
    efa_job = gpu_job()

    def messages() -> list[str]:
        return [each.message for each in ask_account(parsed(efa_job), efa_job.section)]

    assert found() == {}
    (message,) = messages()
    assert "no egress rule" in message and "EFA" in message
    egress(ec2, group, True, UserIdGroupPairs=[{"GroupId": group}])
    assert messages() == []
    egress(ec2, group, False, UserIdGroupPairs=[{"GroupId": group}])
    egress(ec2, group, False, IpRanges=[{"CidrIp": "0.0.0.0/0"}])
    assert "no egress rule" in found()["security-group"]


def test_another_group_is_not_itself(ec2: Any) -> None:
    group = network(ec2)
    vpc = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["VpcId"]
    other = ec2.create_security_group(VpcId=vpc, GroupName="other", Description="other")["GroupId"]
    allow(ec2, group, "-1", other)
    assert "security-group" in found()


def test_nothing_is_tagged(ec2: Any) -> None:
    assert set(found()) == {"security-group", "subnet"}


def test_no_subnet_in_the_zone(ec2: Any) -> None:
    group = network(ec2, zone="us-east-1b")
    allow(ec2, group, "-1", group)
    assert "us-east-1a" in found()["subnet"]


@pytest.mark.parametrize("port, complete", [(988, True), (22, False)])
def test_lustre_port(ec2: Any, group: str, port: int, complete: bool) -> None:
    vpc = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["VpcId"]
    lustre = ec2.create_security_group(VpcId=vpc, GroupName="lustre", Description="lustre")["GroupId"]
    allow(ec2, lustre, "tcp", lustre, port, port)
    storage = {**dynamic_storage(), "security_group_ids": [lustre]}
    assert (found(storage=storage) == {}) is complete


def test_missing_security_group(group: str) -> None:
    message = found(storage=dynamic_storage())["security-group"]
    assert "sg-068000ccf82dfba88" in message and "InvalidGroup.NotFound" in message


def test_missing_ids_do_not_stop_other_checks(ec2: Any) -> None:
    group = network(ec2, zone="us-east-1b")
    manifests = parsed(cpu_job())
    (spec,) = (each.document["spec"] for each in manifests if each.kind == "EC2NodeClass")
    spec["securityGroupSelectorTerms"] = [{"id": "sg-00000000000000000"}, {"id": group}]
    spec["subnetSelectorTerms"].append({"id": "subnet-00000000000000000"})
    all_found = ask_account(manifests, None)
    assert {each.level for each in all_found} == {"error"}
    messages = sorted(f"{each.rule}: {each.message}" for each in all_found)
    assert len(messages) == 4, messages
    assert "sg-00000000000000000" in messages[0] or "sg-00000000000000000" in messages[1]
    assert any(f"{group}: no ingress rule allows all traffic" in message for message in messages)
    assert any("subnet-00000000000000000" in message for message in messages)
    assert any("us-east-1a" in message for message in messages)


def test_denied_calls_are_reported_and_skipped(ec2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network(ec2, zone="us-east-1b")
    call = botocore.client.BaseClient._make_api_call

    def refuse(self: Any, operation: str, arguments: Any) -> Any:
        if operation == "DescribeSecurityGroups":
            raise ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}, operation)
        return call(self, operation, arguments)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", refuse)
    messages = found()
    assert set(messages) == {"permission", "subnet"}
    assert "DescribeSecurityGroups was refused: UnauthorizedOperation" in messages["permission"]


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert "no answer" in found()["permission"]


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
    """Stands for the module boto3; every client answers as ANSWERS say, with `changes`, or with the error they name."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self.changes = changes

    def client(self, name: str) -> Any:
        return _Client(name, self.changes)


class _Client:
    """Each operation has a client of its own, so that operations may come in any order."""

    def __init__(self, name: str, changes: dict[str, Any]) -> None:
        self.name, self.changes = name, changes

    def __getattr__(self, operation: str) -> Any:
        client = boto3.client(self.name, "us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
        answer = copy.deepcopy(self.changes.get(operation, ANSWERS[self.name, operation]))  # botocore changes it
        stubber = Stubber(client)
        if isinstance(answer, str):
            stubber.add_client_error(operation, answer)
        else:
            stubber.add_response(operation, answer, PARAMETERS.get(operation))
        stubber.activate()
        return getattr(client, operation)


def ask(section: dict[str, Any] | None = None, **changes: Any) -> list[tuple[str, str]]:
    made = ClusterSection.model_validate(section or cluster_section())
    return [(each.rule, each.message) for each in ask_resources(Account(changes), made)]


def test_resources_are_all_in_order() -> None:
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
