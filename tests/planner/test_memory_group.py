"""A run fits into a control group of its planned peak plus 5 percent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from aliquot.machine.cgroup import control_groups, read_text

GIB = 1 << 30
MARGIN = 1.05
MODEL = {
    "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory group below this process's, of version 1 or 2."""
    above = next(control_groups("memory"), None)
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


def _plan(config: Path, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "aliquot", "plan", str(config), *overrides, "--json"]
    plan: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert plan["fits"]
    return plan


def _train_within(group: Path, plan: dict[str, Any], config: Path, *overrides: str) -> str:
    """Trains in a group of what `plan` foresees and five hundredths more; what is printed. `{limit}`: in GiB."""
    limit = int(MARGIN * (plan["ranks_per_node"] * plan["peak_bytes_per_rank"] + plan["beside_bytes"]))
    _limit_file(group).write_text(str(limit))

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    words = [word.format(limit=limit / GIB) for word in overrides]
    command = [sys.executable, "-m", "aliquot", "train", str(config), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=enter, cwd=config.parent)
    assert done.returncode == 0, done.stderr
    events = (read_text(group / "memory.oom_control") or "") + (read_text(group / "memory.events") or "")
    assert "oom_kill 0" in events
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(("freeze", "frozen_shapes"), [([], 0), (["model.layers.*.mlp.*"], 2)])
def test_planned_peak_plus_5_percent_suffices(
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
    plan = _plan(config, "shard.memory=1.7")
    assert len(plan["on_disk"]["frozen"]) == frozen_shapes
    assert plan["on_disk"]["layers"] == 8, "all layers are to be on disk: no plan holds less"
    assert "8 layers whole" in _train_within(group, plan, config, "shard.memory={limit}")


@pytest.mark.long
@pytest.mark.parametrize("engine", ["host", "fsdp"])
@pytest.mark.parametrize("vocabulary", [4096, 128256])
def test_so_they_are_with_evaluation_export_and_a_sample(
    tmp_path: Path, group: Path, engine: str, vocabulary: int
) -> None:
    config = tmp_path / "run.yaml"
    values = {
        "run": {"name": "run", "directory": str(tmp_path / "run")},
        "model": {"config": {**MODEL, "num_hidden_layers": 2, "hidden_size": 384, "vocab_size": vocabulary}},
        "data": {
            "path": "stdlib", "tokenizer_vocab_size": 4096, "sequence_length": 512, "packing": True,
            "eval_fraction": 0.002,
        },
        "train": {
            "max_steps": 4, "global_batch_size": 4, "per_device_train_batch_size": 2, "precision": "fp32",
            "eval_steps": 2,
        },
        "shard": {"engine": engine},
        "launch": {"ranks": 2, "device": "cpu"},
        "checkpoint": {"every": 2},
        "observe": {"report_to": ["tensorboard"], "sample_prompt": "def "},
    }  # fmt: skip
    config.write_text(yaml.safe_dump(values))
    _train_within(group, _plan(config), config)
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
