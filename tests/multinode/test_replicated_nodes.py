"""`shard.replicate: nodes` on two hosts of two ranks: the curve of one host, a kill, and the bytes of the cable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aliquot.checkpoint.directories import complete_directories
from tests.multinode.namespaces import switched_hosts, why_not
from tests.multinode.test_namespaces import killed_when, trained_on
from tests.runs import curve, trained, write_config

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

FSDP = {"engine": "fsdp", "replicate": "nodes"}
TWO_BY_TWO = {"ranks": 2, "nodes": 2, "device": "cpu"}
LARGER = {"model_type": "llama", "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def settings(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    every: dict[str, dict[str, Any]] = {
        "train": {"max_steps": 40, "per_device_train_batch_size": 1, "lr_scheduler_type": "constant"},
        "checkpoint": {"every": 5, "export": False},
    }
    return every | sections


def test_killed_run_continues_at_other_layouts(tmp_path: Path) -> None:
    """Two nodes of two ranks are killed; three ranks of one host go on, and then two nodes again."""
    trained(write_config(tmp_path, "whole", **settings(), shard={"engine": "fsdp"}))
    config = write_config(tmp_path, "disturbed", **settings(), shard=FSDP, launch=TWO_BY_TWO)
    checkpoints = tmp_path / "disturbed/checkpoints"
    with switched_hosts(2, "10mbit") as hosts:  # slow, so that the run lasts until it is killed
        output = killed_when(lambda: bool(complete_directories(checkpoints)), hosts, config)
    assert "shared memory within a node, gloo among 2 replicas" in output
    reached = len(curve(tmp_path / "disturbed"))
    assert reached < 25, "the run was over before it was killed"
    trained(config, "launch.nodes=1", "launch.ranks=3", "shard.replicate=none", "train.max_steps=30")
    with switched_hosts(2) as hosts:
        trained_on(hosts, config)
    assert curve(tmp_path / "disturbed") == pytest.approx(curve(tmp_path / "whole"), rel=1e-4)


def test_cable_carries_the_planned_bytes(tmp_path: Path) -> None:
    """Runs of 2 and of 12 steps: ten steps more."""
    sent = []
    for steps in (2, 12):
        sections = settings(train={"max_steps": steps, "global_batch_size": 12, "per_device_train_batch_size": 1})
        config = write_config(
            tmp_path, f"run-{steps}", **sections, model={"config": LARGER}, shard=FSDP, launch=TWO_BY_TWO
        )
        with switched_hosts(2) as hosts:
            trained_on(hosts, config, "checkpoint.every=0")
            sent.append(sum(host.sent_bytes() for host in hosts))
    directory = tmp_path / "run-12"
    plan = json.loads((directory / "ledger.json").read_text())["plan"]
    counted = curve(directory, "wire_bytes")
    planned = plan["wire_bytes_per_step"]
    assert 4 * (counted[12] - counted[2]) / 10 == pytest.approx(planned, rel=1e-3)
    assert (sent[1] - sent[0]) / 10 == pytest.approx(planned, rel=0.05)  # headers, losses and norms
