"""The rendered job really runs: four nodes, a slow network, a shared directory, one node lost on the way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cluster, small_job
from tests.multinode.namespaces import switched_hosts, why_not
from tests.runs import curve, trained, write_config

STEPS = 12
TIMEOUT_S = 600.0
SECTIONS: dict[str, dict[str, Any]] = {
    "shard": {"engine": "host"},
    "train": {"max_steps": STEPS},
    "checkpoint": {"every": 3, "export": False},
    "launch": {"threads_per_rank": 1},
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    """The test's run, rendered for four nodes and about to run on them."""
    job = small_job(tmp_path / "shared", "four", 4, SECTIONS)
    with switched_hosts(4, rate="20mbit") as hosts:
        found = Cluster(job, hosts, tmp_path / "pods", tmp_path / "shared")
        try:
            yield found
        finally:
            found.stop()


def test_a_lost_node_costs_nothing(cluster: Cluster, tmp_path: Path) -> None:
    trained(write_config(tmp_path / "one", "one", **SECTIONS))
    expected = curve(tmp_path / "one" / "one")
    run = cluster.shared / "runs" / "four"

    pods = cluster.start()
    deadline = time.monotonic() + TIMEOUT_S
    while not list((run / "checkpoints").glob("step-*")):
        states = [pod.process.poll() for pod in pods]
        assert time.monotonic() < deadline and states == [None] * 4, [pod.log.read_text() for pod in pods]
        time.sleep(0.05)
    pods[2].kill()
    results = [pod.ended(TIMEOUT_S) for pod in pods]
    codes = [code for code, _ in results]
    assert codes[2] == 137 and all(codes), results
    assert cluster.decision(codes) == "RestartJobSet"
    assert max(curve(run)) < STEPS, "killed too late to prove anything"

    results = [pod.ended(TIMEOUT_S) for pod in cluster.start()]
    assert [code for code, _ in results] == [0, 0, 0, 0], results
    assert "resuming from" in results[0][1]
    assert curve(run) == pytest.approx(expected, rel=1e-5)
    assert len(curve(run)) == STEPS


def test_bad_input_is_not_tried_again(cluster: Cluster) -> None:
    (cluster.shared / "text.txt").unlink()
    codes = [pod.ended(TIMEOUT_S)[0] for pod in cluster.start()]
    assert cluster.decision(codes) == "FailJobSet"
