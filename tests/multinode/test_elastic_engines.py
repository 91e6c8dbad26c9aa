"""A node is killed, comes back, is told to stop, and comes back: with each engine the losses of an undisturbed run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.multinode.namespaces import why_not
from tests.multinode.test_elastic import running
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
    with running(config, "8mbit", MOST) as cluster:  # so slow that the run lasts until all has happened
        for kind in ("killed", "back", "told to stop", "back"):
            follows = [number for number in cluster.here() if not cluster.leads(number)]
            away = [number for number in range(MOST) if number not in cluster.here()]
            cluster.look()
            before, begun = len(cluster.beginnings()), cluster.times[-1][0]
            cluster.disturb(kind, (away if kind == "back" else follows)[0])
            cluster.lost_s(begun, before)
        cluster.ends(STEPS, 300)
    assert curve(tmp_path / "disturbed") == pytest.approx(curve(tmp_path / "whole"), rel=1e-4)
