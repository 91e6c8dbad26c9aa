"""Where the tests of GPUs run: on one, or, to know that the tests themselves work, on the CPU.

ALIQUOT_GPU_TESTS=cpu .venv/bin/python -m pytest tests/gpu
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
needs_device = pytest.mark.skipif(
    not HAS_GPU and os.environ.get("ALIQUOT_GPU_TESTS") != "cpu",
    reason="no GPU (ALIQUOT_GPU_TESTS=cpu runs the same tests on the CPU)",
)
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU, and no CPU has these kernels")

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def run(
    folder: Path,
    name: str,
    steps: int,
    engine: str,
    device: str = DEVICE,
    model: dict[str, object] = LLAMA,
    shard: dict[str, object] | None = None,
    **train: object,
) -> list[float]:
    """The losses of a run, by step, resumed runs included. Engine host is the CPU's, whatever `device`."""
    config = {
        "run": {"name": name, "directory": str(folder / name)},
        "model": {"config": model},
        "data": {
            "path": str(Path(__file__).parents[2] / "docs" / "*.md"),
            "tokenizer_vocab_size": 512,
            "sequence_length": 128,
        },
        "train": {
            "max_steps": steps, "global_batch_size": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant", **train
        },
        "shard": {"engine": engine, **(shard or {})},
        "checkpoint": {"every": 4},
        "observe": {"report_to": [], "console": "plain"},
        "launch": {"device": "cpu" if engine == "host" else device, "ranks": 1},
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "aliquot", "train", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def exported(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / name / "export" / "model.safetensors")
