"""Check with boto3 that the security groups and subnets that the manifests select exist in the AWS account."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aliquot.catalogue.aws_answers import aws_session
from aliquot.cluster.aws_resources import ask_resources, refusal
from aliquot.cluster.findings import Check, RuleFinding, failures, finding
from aliquot.cluster.job import EFA
from aliquot.cluster.job_view import job_views
from aliquot.cluster.manifests import ManifestObject, mapping, select_kinds
from aliquot.cluster.node_pool_view import ZONE, pool_view
from aliquot.config.cluster_section import ClusterSection

_LUSTRE_PORT = 988
_ADDRESSES_A_NODE = 60  # the VPC CNI keeps a spare network interface: two with 30 addresses on large types
_ALL_ADDRESSES = "0.0.0.0/0"
# What the terms of a node class select, by rule: operation of EC2, key of the answer, and key of an id.
_SELECTED = {
    "security-group": ("describe_security_groups", "SecurityGroups", "GroupId"),
    "subnet": ("describe_subnets", "Subnets", "SubnetId"),
}


def ask_account(manifests: Sequence[ManifestObject], section: ClusterSection | None) -> list[RuleFinding]:
    """Check the security groups and subnets of the node classes, and the security groups of the file system.

    Missing boto3, credentials or permissions are reported as a finding.
    """
    classes = select_kinds(manifests, "EC2NodeClass")
    if not classes:
        return []
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return [finding("permission", "AWS", "boto3 is not installed", "pip install 'aliquot[cluster]'")]
    try:
        session = aws_session()
        account = _Account(session.client("ec2"), ClientError, [])
        for node_class in classes:
            account.findings.extend(_node_class(account, node_class, manifests))
        if section is not None and (identities := section.storage.security_group_ids):
            where = "cluster.storage.security_group_ids"
            groups = account.select("security-group", [{"id": identity} for identity in identities], where)
            account.findings.extend(_lustre(groups, where) if groups else [])
        if section is not None:
            account.findings.extend(ask_resources(session, section))
        return account.findings
    except BotoCoreError as error:
        return [
            finding(
                "permission",
                "AWS",
                f"no answer: {' '.join(str(error).split())}",
                "run `aws configure`, or check on a machine that has credentials",
            )
        ]


@dataclass
class _Account:
    """Queries EC2. A refused query becomes a finding and does not stop the other queries."""

    ec2: Any
    refusal: type[Exception]  # botocore's ClientError
    findings: list[RuleFinding]

    def select(self, rule: str, terms: Sequence[dict[str, Any]], where: object) -> list[dict[str, Any]] | None:
        """Return what at least one of `terms` selects, as in Karpenter; None if AWS refused.

        Args:
            rule: security-group or subnet.
            terms: items of securityGroupSelectorTerms or subnetSelectorTerms.
            where: the place that findings name.
        """
        operation, answer, identity = _SELECTED[rule]
        answers: dict[str, dict[str, Any]] = {}
        refused = False
        for term in terms:
            names = [{"Name": "group-name", "Values": [term["name"]]}] if "name" in term else []
            filters = {"Filters": [*_tag_filters(term), *names]}
            query = {f"{identity}s": [term["id"]]} if "id" in term else filters
            try:
                answers |= {item[identity]: item for item in getattr(self.ec2, operation)(**query)[answer]}
            except self.refusal as error:
                refused = True
                self.findings.append(refusal(error, rule, where))
        return list(answers.values()) if answers or not refused else None


def _node_class(
    account: _Account, node_class: ManifestObject, manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    groups = account.select("security-group", node_class.items("spec", "securityGroupSelectorTerms"), node_class)
    subnets = account.select("subnet", node_class.items("spec", "subnetSelectorTerms"), node_class)
    if groups:
        needs_efa = any(view.count(EFA) for view in job_views(manifests))
        yield from _open_among_nodes(node_class, groups, needs_efa)
    yield from failures(
        node_class,
        Check(groups == [], "security-group", "no security group meets its terms", "tag one, or correct the terms"),
        Check(subnets == [], "subnet", "no subnet meets its terms", "tag the private subnets, or correct the terms"),
    )
    yield from _addresses(node_class, subnets or [], manifests)
    zones = {subnet["AvailabilityZone"] for subnet in subnets or []}
    for pool in select_kinds(manifests, "NodePool"):
        fix = f"one of {', '.join(sorted(zones))}"
        yield from failures(
            pool,
            *(
                Check(zones and zone not in zones, "subnet", f"none of its subnets is in {zone}", fix)
                for zone in pool_view(pool).values(ZONE)
            ),
        )


def _addresses(
    node_class: ManifestObject, subnets: Sequence[dict[str, Any]], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    """Check that the subnets of the job's zone have addresses for all nodes."""
    pools = [pool_view(pool) for pool in select_kinds(manifests, "NodePool")]
    zones = {zone for pool in pools if pool.node_class_name == node_class.name for zone in pool.values(ZONE)}
    usable = [subnet for subnet in subnets if not zones or subnet["AvailabilityZone"] in zones]
    free = sum(int(subnet.get("AvailableIpAddressCount", 0)) for subnet in usable)
    nodes = max((view.nodes for view in job_views(manifests)), default=0)
    return failures(
        node_class,
        Check(
            usable and free < nodes * _ADDRESSES_A_NODE,
            "addresses",
            f"{nodes} nodes take about {nodes * _ADDRESSES_A_NODE} addresses, and {free} are free",
            "a larger subnet, or WARM_IP_TARGET of the VPC CNI",
        ),
    )


def _open_among_nodes(
    node_class: ManifestObject, groups: Sequence[dict[str, Any]], needs_efa: bool
) -> Iterator[RuleFinding]:
    """Check both directions. A node has all groups, so the rules of all groups apply to every node.

    Outgoing TCP may be open by addresses; EFA passes only a rule that names a group of the nodes.
    """
    names = ", ".join(group["GroupId"] for group in groups)
    last = groups[-1]["GroupId"]
    for direction, rules in (("ingress", "IpPermissions"), ("egress", "IpPermissionsEgress")):
        any_address = direction == "egress" and not needs_efa
        pair = f"IpProtocol=-1,UserIdGroupPairs=[{{GroupId={last}}}]"
        message = f"{names}: no {direction} rule allows all traffic among the nodes"
        yield from failures(
            node_class,
            Check(
                not any(_allows_itself(group, groups, rules, any_address=any_address) for group in groups),
                "security-group",
                f"{message}{', which EFA needs' if needs_efa else ''}",
                f"aws ec2 authorize-security-group-{direction} --group-id {last} --ip-permissions '{pair}'",
            ),
        )


def _lustre(groups: Sequence[dict[str, Any]], where: str) -> Iterator[RuleFinding]:
    is_open = all(
        any(_allows_itself(group, groups, rules, _LUSTRE_PORT, any_address) for group in groups)
        for rules, any_address in (("IpPermissions", False), ("IpPermissionsEgress", True))
    )
    return failures(
        where,
        Check(
            not is_open,
            "security-group",
            f"TCP {_LUSTRE_PORT} is not open in both directions among the nodes and the file system",
            "all traffic from the group itself, or TCP 988 and 1018-1023",
        ),
    )


def _tag_filters(term: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert the tags of a selector term to EC2 filters; the value `*` matches any value, as in Karpenter."""
    return [
        {"Name": "tag-key", "Values": [key]} if value == "*" else {"Name": f"tag:{key}", "Values": [value]}
        for key, value in mapping(term.get("tags")).items()
    ]


def _allows_itself(
    group: dict[str, Any], groups: Sequence[dict[str, Any]], rules: str, port: int | None = None,
    any_address: bool = False,
) -> bool:  # fmt: skip
    """Return whether a rule of `group` allows all traffic with one of `groups`.

    Args:
        rules: the key of the rules of one direction.
        port: a rule that allows TCP to this port is enough.
        any_address: a rule for all addresses is enough.
    """
    group_ids = {candidate["GroupId"] for candidate in groups}
    for rule in group.get(rules, []):
        protocol, pairs = rule.get("IpProtocol"), rule.get("UserIdGroupPairs", [])
        tcp = port is not None and protocol == "tcp" and rule.get("FromPort", 1) <= port <= rule.get("ToPort", 0)
        everywhere = any_address and any(item.get("CidrIp") == _ALL_ADDRESSES for item in rule.get("IpRanges", []))
        if (protocol == "-1" or tcp) and (everywhere or any(pair.get("GroupId") in group_ids for pair in pairs)):
            return True
    return False
