"""A host that is killed while gradients or weights are on their way: the other ends at once, and the run goes on."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import pytest

from tests.multinode.namespaces import kill, switched_hosts, why_not
from tests.multinode.test_namespaces import start, trained_on
from tests.runs import curve, has_steps, wait_for, write_config

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
    with switched_hosts(2, LINK) as hosts:
        trained_on(hosts, whole)
        for attempt in range(3):
            name = f"cut-{attempt}"
            cut = write_config(tmp_path, name, **sections)
            nodes = start(hosts, cut)
            wait_for(partial(has_steps, tmp_path / name, 3), nodes[0])
            time.sleep(random.Random(attempt).random())
            kill(hosts[1])
            killed = time.monotonic()
            output = nodes[0].communicate(timeout=60)[0]
            assert time.monotonic() - killed < 20, output
            nodes[1].wait(10)
            assert nodes[0].returncode == 1, output
            assert "rank 1 has ended on another host" in output, output
            trained_on(hosts, cut)
            assert curve(tmp_path / name) == curve(tmp_path / "whole")
