"""What the AWS account says about the security groups and subnets that the manifests select. Asked through boto3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.cluster.findings import Finding, finding
from aliquot.cluster.manifests import Manifest, mapping, of_kind
from aliquot.cluster.pools import ZONE, pool_view
from aliquot.config.cluster import ClusterSection

_LUSTRE_PORT = 988


def ask_account(manifests: Sequence[Manifest], section: ClusterSection | None) -> list[Finding]:
    """A finding says so where boto3, credentials or a permission is missing."""
    classes = of_kind(manifests, "EC2NodeClass")
    if not classes:
        return []
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return [finding("permission", "AWS", "boto3 is not installed", "pip install 'aliquot[cluster]'")]
    try:
        ec2 = boto3.client("ec2")
        found = [each for node_class in classes for each in _node_class(ec2, node_class, manifests)]
        if section is not None and section.storage.security_group_ids:
            groups = _groups(ec2, [{"id": group} for group in section.storage.security_group_ids])
            found += _lustre(groups, "cluster.storage.security_group_ids")
        return found
    except ClientError as error:
        details = mapping(error.response.get("Error"))
        return [
            finding("permission", "AWS", f"{error.operation_name} was refused: {details.get('Code')}",
                    f"a policy that allows ec2:{error.operation_name}")
        ]  # fmt: skip
    except BotoCoreError as error:
        return [finding("permission", "AWS", f"no answer: {error}", "aws configure, or run it where credentials are")]


def _node_class(ec2: Any, node_class: Manifest, manifests: Sequence[Manifest]) -> Iterator[Finding]:
    groups = _groups(ec2, node_class.items("spec", "securityGroupSelectorTerms"))
    if not groups:
        yield finding(
            "security-group", node_class, "no security group meets its terms", "tag one, or correct the terms"
        )
    elif not any(_all_traffic_from_itself(group, groups) for group in groups):
        names = ", ".join(group["GroupId"] for group in groups)
        yield finding(
            "security-group", node_class, f"{names}: no rule allows all traffic from the group itself",
            f"aws ec2 authorize-security-group-ingress --group-id {groups[0]['GroupId']} --protocol -1"
            f" --source-group {groups[0]['GroupId']}",
        )  # fmt: skip
    subnets = _subnets(ec2, node_class.items("spec", "subnetSelectorTerms"))
    zones = {subnet["AvailabilityZone"] for subnet in subnets}
    if not subnets:
        yield finding(
            "subnet", node_class, "no subnet meets its terms", "tag the private subnets, or correct the terms"
        )
    for pool in of_kind(manifests, "NodePool"):
        for zone in pool_view(pool).values(ZONE):
            if subnets and zone not in zones:
                yield finding("subnet", pool, f"none of its subnets is in {zone}", f"one of {', '.join(sorted(zones))}")


def _lustre(groups: Sequence[dict[str, Any]], where: str) -> Iterator[Finding]:
    if not any(_port_from_itself(group, groups, _LUSTRE_PORT) for group in groups):
        yield finding(
            "security-group", where, f"TCP {_LUSTRE_PORT} is not open among the nodes and the file system",
            "all traffic from the group itself, or TCP 988 and 1018-1023",
        )  # fmt: skip


def _groups(ec2: Any, terms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Terms are alternatives, as in Karpenter."""
    found: dict[str, dict[str, Any]] = {}
    for term in terms:
        names = [{"Name": "group-name", "Values": [term["name"]]}] if "name" in term else []
        filters = [*_tag_filters(term), *names]
        query = {"GroupIds": [term["id"]]} if "id" in term else {"Filters": filters}
        found |= {group["GroupId"]: group for group in ec2.describe_security_groups(**query)["SecurityGroups"]}
    return list(found.values())


def _subnets(ec2: Any, terms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for term in terms:
        query = {"SubnetIds": [term["id"]]} if "id" in term else {"Filters": _tag_filters(term)}
        found |= {subnet["SubnetId"]: subnet for subnet in ec2.describe_subnets(**query)["Subnets"]}
    return list(found.values())


def _tag_filters(term: dict[str, Any]) -> list[dict[str, Any]]:
    """`*` as a value means any, as in Karpenter."""
    return [
        {"Name": "tag-key", "Values": [key]} if value == "*" else {"Name": f"tag:{key}", "Values": [value]}
        for key, value in mapping(term.get("tags")).items()
    ]


def _all_traffic_from_itself(group: dict[str, Any], groups: Sequence[dict[str, Any]]) -> bool:
    return any(rule.get("IpProtocol") == "-1" and _from(rule, groups) for rule in group.get("IpPermissions", []))


def _port_from_itself(group: dict[str, Any], groups: Sequence[dict[str, Any]], port: int) -> bool:
    def allows(rule: dict[str, Any]) -> bool:
        if rule.get("IpProtocol") == "-1":
            return True
        return rule.get("IpProtocol") == "tcp" and rule.get("FromPort", 1) <= port <= rule.get("ToPort", 0)

    return any(allows(rule) and _from(rule, groups) for rule in group.get("IpPermissions", []))


def _from(rule: dict[str, Any], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether the rule's source is one of the node's own groups."""
    own = {group["GroupId"] for group in groups}
    return any(pair.get("GroupId") in own for pair in rule.get("UserIdGroupPairs", []))
