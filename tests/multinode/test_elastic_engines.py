"""A node is killed, comes back, is told to stop, and comes back: with each engine the losses of an undisturbed run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.multinode.namespaces import kill, lift_limit, switched_hosts, why_not
from tests.multinode.test_elastic import Cluster, leader
from tests.runs import curve, trained, write_config

STEPS, MOST = 600, 3


# With the engine host: test_elastic.py.
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_elastic_nodes_train_with(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sections = {
        "shard": {"engine": engine},
        "train": {"max_steps": STEPS, "global_batch_size": 6},
        "checkpoint": {"every": 10, "export": False},
    }
    trained(write_config(tmp_path, "whole", **sections))
    launch = {"ranks": 1, "device": "cpu", "nodes": f"{MOST - 1}:{MOST}", "join_timeout_s": 300}
    config = write_config(tmp_path, "disturbed", **sections, launch=launch)
    with switched_hosts(MOST, "8mbit") as hosts:  # the run lasts until all has happened
        cluster = Cluster(hosts, config, tmp_path / "disturbed")
        try:
            for number in range(MOST):
                cluster.start(number)
            while cluster.look() < 3:
                assert cluster.here(), "no node is left"
            for kind in ("killed", "back", "told to stop", "back"):
                follows = [number for number in cluster.here() if hosts[number].address != leader(cluster.directory)]
                away = [number for number in range(MOST) if number not in cluster.here()]
                cluster.look()
                before, begun = len(cluster.beginnings()), cluster.times[-1][0]
                cluster.disturb(kind, (away if kind == "back" else follows)[0])
                cluster.lost_s(begun, before)
            assert cluster.look() < STEPS, "the run was over before all had happened"
            for host in hosts:
                lift_limit(host)
            for number in cluster.here():
                told = (tmp_path / f"node-{number}.txt").read_text()
                assert cluster.nodes[number].wait(300) == 0, told[-2000:]
        finally:
            for host in hosts:
                kill(host)
            for node in cluster.nodes.values():
                node.wait(10)
    assert curve(tmp_path / "disturbed") == pytest.approx(curve(tmp_path / "whole"), rel=1e-4)
