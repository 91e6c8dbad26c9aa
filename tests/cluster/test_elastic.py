"""Manifests of a job whose nodes may come and go: a pod that is lost is replaced, and the others go on."""

from __future__ import annotations

from typing import Any

import pytest

from aliquot.cluster.check import check_job_of_config, check_manifests
from aliquot.cluster.job import Job, describe
from aliquot.cluster.pod import shipped_config
from aliquot.cluster.render import documents
from aliquot.cluster.trainjob import _all_together, cluster_training_runtime, train_job, training_runtime
from aliquot.core.errors import UserError
from aliquot.planner.plan import PhaseMemory
from tests.cluster.cases import GIB, cluster_section, config, cpu_job, plan
from tests.cluster.edits import manifests_of


def elastic(**changes: Any) -> Job:
    settings = config(cluster_section(nodes="2:4", **changes), train={"global_batch_size": 32})
    return describe(settings, plan(), plan(nodes=2))


def node_job(job: Job) -> dict[str, Any]:
    (replicated,) = training_runtime(job)["spec"]["template"]["spec"]["replicatedJobs"]
    return dict(replicated["template"]["spec"])


@pytest.mark.parametrize("trainer", ["2.1", "2.3"])
def test_rendered_elastic_job_passes_the_rules(trainer: str) -> None:
    assert check_job_of_config(elastic(trainer=trainer)) == []


def test_a_lost_pod_is_replaced_and_counts_nothing() -> None:
    job = elastic(max_restarts=3)
    assert train_job(job)["spec"]["trainer"]["numNodes"] == 4
    assert shipped_config(job)["launch"]["nodes"] == "2:4"
    spec = node_job(job)
    assert spec["backoffLimit"] == 12
    assert spec["podReplacementPolicy"] == "Failed"
    actions = [
        (rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in spec["podFailurePolicy"]["rules"]
    ]
    assert actions == [("Ignore", None), ("Ignore", [143]), ("FailJob", [2])]
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 1}]}


IN_PEACE = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
BY_HAND = {
    "nothing is said": (lambda spec: spec.pop("podFailurePolicy"), "told to stop, the reaction is Count"),
    "as for a fixed number": (lambda spec: spec.update(_all_together()), "told to stop, the reaction is RestartJobSet"),
    "a drain alone": (
        lambda spec: spec["podFailurePolicy"].update(rules=[IN_PEACE]), "told to stop, the reaction is Count"),
    "the code alone": (
        lambda spec: spec["podFailurePolicy"]["rules"].pop(0), "lost with its node, the reaction is Count"),
    "no pod may fail": (lambda spec: spec.update(backoffLimit=0), "crashes, the reaction is RestartJobSet"),
    "every pod must succeed": (lambda spec: spec.pop("successPolicy"), "successPolicy is None"),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_policies_that_end_the_job_are_findings(case: str) -> None:
    spoil, told = BY_HAND[case]
    found = documents(elastic())
    spoil(found["training-runtime.yaml"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"])
    messages = [each.message for each in check_manifests(manifests_of(found)) if each.rule == "failure-rules"]
    assert any(told in each for each in messages), messages


def test_a_pod_group_would_wait_for_all_nodes() -> None:
    found = documents(elastic())
    found["training-runtime.yaml"]["spec"]["podGroupPolicy"] = {"volcano": {}}
    (finding,) = [each for each in check_manifests(manifests_of(found)) if each.rule == "failure-rules"]
    assert finding.message == "cluster.nodes is 2:4, and podGroupPolicy waits for all 4 nodes"


def test_jobs_of_others_keep_their_number_of_nodes() -> None:
    """Ended by its first pod, a job of torchrun would be stopped while the others' pods still write."""
    (replicated,) = cluster_training_runtime(elastic())["spec"]["template"]["spec"]["replicatedJobs"]
    (fixed,) = cluster_training_runtime(cpu_job())["spec"]["template"]["spec"]["replicatedJobs"]
    assert "successPolicy" not in replicated["template"]["spec"]
    assert replicated["template"]["spec"]["podFailurePolicy"] == fixed["template"]["spec"]["podFailurePolicy"]


def test_model_must_fit_the_minimum_nodes() -> None:
    settings = config(cluster_section(nodes="2:4"), train={"global_batch_size": 32})
    large = PhaseMemory("steady peak", {"moments": 120 * GIB}, {})
    with pytest.raises(UserError, match=r"with 2 nodes the plan needs 240.00 GiB a node"):
        describe(settings, plan(), plan(nodes=2, phases=(large,)))
