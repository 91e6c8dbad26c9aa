"""A host that is killed while gradients or weights are on their way: the other ends at once, and the run goes on."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.multinode.namespaces import kill, switched_hosts, why_not
from tests.multinode.test_namespaces import on_both, start
from tests.runs import curve, write_config

pytestmark = [pytest.mark.long, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

WIDE = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LINK = "40mbit"  # most of a step's second is spent in one exchange or the other


def test_a_host_killed_in_any_phase_of_a_step(tmp_path: Path) -> None:
    sections = {
        "model": {"config": WIDE},
        "shard": {"engine": "host"},
        "train": {"max_steps": 5, "global_batch_size": 2, "per_device_train_batch_size": 1},
        "checkpoint": {"every": 2, "export": False},
        "launch": {"ranks": 1, "nodes": 2, "device": "cpu"},
    }
    whole = write_config(tmp_path, "whole", **sections)
    with switched_hosts(2, LINK) as (first, second):
        assert [code for code, _ in on_both((first, second), whole)] == [0, 0]
        for attempt in range(3):
            name = f"cut-{attempt}"
            cut = write_config(tmp_path, name, **sections)
            own = ["launch.master_port=29511", f"launch.master_address={first.address}"]
            nodes = [start(host, cut, f"launch.node_rank={n}", *own) for n, host in enumerate((first, second))]
            wait_for_step(tmp_path / name, 3)
            time.sleep(random.Random(attempt).random())
            kill(second)
            killed = time.monotonic()
            output = nodes[0].communicate(timeout=60)[0]
            assert time.monotonic() - killed < 20, output
            nodes[1].wait(10)
            assert nodes[0].returncode == 1, output
            assert "rank 1 has ended on another host" in output, output
            assert [code for code, _ in on_both((first, second), cut)] == [0, 0]
            assert curve(tmp_path / name) == curve(tmp_path / "whole")


def wait_for_step(directory: Path, step: int) -> None:
    for _ in range(600):
        metrics = directory / "metrics.jsonl"
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{directory} does not come to step {step}")
