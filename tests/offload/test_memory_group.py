"""A run with the disk tier lives in a control group that allows what the plan foresaw and five hundredths more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import yaml

from aliquot.machine.cgroup import groups, read

GIB = 1 << 30
MARGIN = 1.05
MODEL = {
    "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory group below this process's, of version 1 or 2."""
    above = next(groups("memory"), None)
    if above is None:
        pytest.skip("no control group of memory is mounted")
    own = above / f"aliquot-{uuid4().hex}"
    try:
        own.mkdir()
        _limit_file(own)
    except OSError:
        pytest.skip("no control group can be made here")
    yield own
    own.rmdir()


def _limit_file(group: Path) -> Path:
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (group / name).exists():
            return group / name
    group.rmdir()
    raise OSError("the memory controller is not enabled in the group")


def _plan(config: Path, memory_gib: float) -> dict[str, float]:
    command = [sys.executable, "-m", "aliquot", "plan", str(config), f"shard.memory={memory_gib}", "--json"]
    plan: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert plan["fits"]
    return plan


@pytest.mark.long
@pytest.mark.parametrize(("freeze", "frozen_shapes"), [([], 0), (["model.layers.*.mlp.*"], 2)])
def test_the_planned_peak_and_five_hundredths_are_enough(
    tmp_path: Path, group: Path, freeze: list[str], frozen_shapes: int
) -> None:
    config = tmp_path / "run.yaml"
    values = {
        "run": {"name": "run", "directory": str(tmp_path / "run")},
        "model": {"config": MODEL},
        "data": {"path": "stdlib", "tokenizer_vocab_size": 4096, "sequence_length": 256},
        "train": {
            "max_steps": 4,
            "global_batch_size": 2,
            "per_device_train_batch_size": 1,
            "precision": "fp32",
            "freeze": freeze,
        },
        "shard": {"engine": "host", "offload": "disk"},
        "launch": {"ranks": 2, "device": "cpu"},
        "checkpoint": {"every": 2},
        "observe": {"report_to": []},
    }
    config.write_text(yaml.safe_dump(values))
    plan = _plan(config, 1.7)
    assert len(plan["on_disk"]["frozen"]) == frozen_shapes  # type: ignore[index]
    assert plan["on_disk"]["layers"] == 8, "all layers are to be on disk: no plan holds less"  # type: ignore[index]
    limit = int(MARGIN * (2 * plan["peak_bytes_per_rank"] + plan["beside_bytes"]))
    _limit_file(group).write_text(str(limit))

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-m", "aliquot", "train", str(config), f"shard.memory={limit / GIB}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=enter, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "8 layers whole" in done.stdout
    events = (read(group / "memory.oom_control") or "") + (read(group / "memory.events") or "")
    assert "oom_kill 0" in events
