"""What the account says, on moto's EC2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import botocore.client
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from aliquot.cluster.aws_account import ask_account
from aliquot.cluster.job import describe
from aliquot.cluster.render import parsed
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
