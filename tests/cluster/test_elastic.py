"""Manifests of a job whose nodes may come and go: a pod that is lost is replaced, and the others go on."""

from __future__ import annotations

from typing import Any

import pytest

from aliquot.cluster.check import check_job_of_config
from aliquot.cluster.job import Job, describe
from aliquot.cluster.pod_config import shipped_config
from aliquot.cluster.trainjob import train_job, training_runtime
from aliquot.config.plan import PhaseMemory
from aliquot.errors import UserError
from tests.cluster.cases import GIB, cluster_section, config, plan


def elastic(**changes: Any) -> Job:
    settings = config(cluster_section(nodes="2:4", **changes), train={"global_batch_size": 32})
    return describe(settings, plan(), plan(nodes=2))


def node_job(job: Job) -> dict[str, Any]:
    (replicated,) = training_runtime(job)["spec"]["template"]["spec"]["replicatedJobs"]
    return dict(replicated["template"]["spec"])


@pytest.mark.parametrize("trainer", ["2.1", "2.3"])
def test_what_is_rendered_passes_its_own_rules(trainer: str) -> None:
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


def test_the_fewest_nodes_must_hold_it() -> None:
    settings = config(cluster_section(nodes="2:4"), train={"global_batch_size": 32})
    large = PhaseMemory("steady peak", {"moments": 120 * GIB}, {})
    with pytest.raises(UserError, match=r"with 2 nodes the plan needs 240.0 GiB a node"):
        describe(settings, plan(), plan(nodes=2, phases=(large,)))
