"""Rules about a job whose nodes come and go (launch.nodes MIN:MAX): a pod that goes must not end it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.job_view import NODE, JobView, configs_of
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping

_RANGE = re.compile(r"\d+:\d+")
_STOPPED = 143
# How a pod goes: its exit code, None where nothing is left to say one, and whether it was disrupted.
_WAYS = (
    ("is drained or reclaimed", _STOPPED, True),
    ("is told to stop", _STOPPED, False),
    ("is lost with its node", None, True),
)


def check_elastic(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    if job.runtime is None or (nodes := _nodes(job, manifests)) is None:
        return
    replicated = [
        each for each in job.runtime.items("spec", "template", "spec", "replicatedJobs") if each.get("name") == NODE
    ]
    spec = mapping(dig(replicated, 0, "template", "spec"))
    for told, code, disrupted in _WAYS:
        action = _action(mapping(spec.get("podFailurePolicy")), code, disrupted)
        if action != "Ignore":
            what = "counts against backoffLimit" if action in ("Count", None) else f"ends the Job ({action})"
            yield finding(
                "nodes-that-go", job.runtime, f"launch.nodes is {nodes}, and a pod that {told} {what}",
                "podFailurePolicy: first Ignore for DisruptionTarget, then for exit code 143, as `render` writes it",
            )  # fmt: skip
            return
    if spec.get("backoffLimit") == 0:
        yield finding(
            "nodes-that-go", job.runtime, f"launch.nodes is {nodes}, and the first pod that fails ends the Job",
            "a backoffLimit above 0: restarts a node x nodes",
        )  # fmt: skip
    if spec.get("successPolicy") is None:
        yield finding(
            "nodes-that-go", job.runtime,
            f"launch.nodes is {nodes}, and the Job is over only when each of its pods has succeeded, one that finds no"
            " node, too", "successPolicy: {rules: [{succeededCount: 1}]}", "warning",
        )  # fmt: skip


def _nodes(job: JobView, manifests: Sequence[ManifestObject]) -> str | None:
    """MIN:MAX, from the command or from a config that the pods mount; None: a number, or nothing is known."""
    trainer = mapping(job.manifest.get("spec", "trainer"))
    told = [str(word) for key in ("command", "args") for word in listed(trainer.get(key))]
    for word in reversed(told):
        if word.startswith("launch.nodes="):
            return _range(word.partition("=")[2])
    found = (_range(dig(config, "launch", "nodes")) for config in configs_of(job, manifests))
    return next((each for each in found if each is not None), None)


def _range(value: object) -> str | None:
    return value if isinstance(value, str) and _RANGE.fullmatch(value) else None


def _action(policy: dict[str, Any], code: int | None, disrupted: bool) -> object:
    """Of the first rule that holds; None: none does."""
    for rule in listed(policy.get("rules")):
        exits, conditions = mapping(mapping(rule).get("onExitCodes")), listed(mapping(rule).get("onPodConditions"))
        if conditions and disrupted and any(mapping(each).get("type") == "DisruptionTarget" for each in conditions):
            return rule.get("action")
        if exits and code is not None and exits.get("containerName") in (None, NODE):
            listed_there = code in listed(exits.get("values"))
            if listed_there == (exits.get("operator") == "In"):
                return rule.get("action")
    return None
