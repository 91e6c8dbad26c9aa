"""Runs for the tests of GPUs: on a GPU, or on the CPU to check the tests themselves.

make test-gpu                                             on a machine with a GPU
ALIQUOT_GPU_TESTS=cpu .venv/bin/python -m pytest tests/gpu
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.gpu.run_server import trained
from tests.tools import warm

# Asked of the driver's library instead of a CUDA context, which would not survive the fork of tests/tools/warm.py.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

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
    device: str | None = None,
    model: dict[str, object] = LLAMA,
    shard: dict[str, object] | None = None,
    in_new_process: bool = False,
    **train: object,
) -> list[float]:
    """Train and return the loss of each step, of resumed runs too. By default, engine host runs on the CPU.

    DeepSpeed always runs in a new process, because it keeps the first group of ranks.
    """
    device = device or ("cpu" if engine == "host" else DEVICE)
    config = {
        "run": {"name": name, "directory": str(folder / name)},
        "model": {"config": model},
        "data": {"path": str(_text(folder)), "tokenizer_vocab_size": 512, "sequence_length": 128},
        "train": {
            "max_steps": steps, "global_batch_size": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant", **train
        },
        "shard": {"engine": engine, **(shard or {})},
        "checkpoint": {"every": 4},
        "observe": {"report_to": [], "console": "plain"},
        "launch": {"device": device, "ranks": 1, "threads_per_rank": 2},
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    if in_new_process or engine == "deepspeed":
        done = warm.run("-m", "aliquot", "train", file)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    else:
        trained(file)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def _text(folder: Path) -> Path:
    """Write the documents of every run: the curves of cpu_curves.json are of this text."""
    file = folder / "text.txt"
    if not file.exists():
        draw = random.Random(0)
        words = ["".join(draw.choices("aeinorst", k=draw.randint(1, 7))) for _ in range(400)]
        lines = [" ".join(draw.choices(words, k=draw.randint(2, 120))) for _ in range(600)]
        file.write_text("\n".join(lines) + "\n")
    return file


def exported(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / name / "export" / "model.safetensors")
