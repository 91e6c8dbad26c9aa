"""Both GPU engines on a real GPU: training, resume, export, offload, and loading straight to the device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def run(folder: Path, name: str, steps: int, engine: str, **shard: object) -> list[float]:
    """The losses of a run, by step, resumed runs included."""
    config = {
        "run": {"name": name, "directory": str(folder / name)},
        "model": {"config": MODEL},
        "data": {"path": str(Path(__file__).parents[2] / "docs"), "tokenizer_vocab_size": 512, "sequence_length": 128},
        "train": {"max_steps": steps, "global_batch_size": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant"},
        "shard": {"engine": engine, **shard},
        "checkpoint": {"every": 4},
        "observe": {"report_to": [], "console": "plain"},
        "launch": {"device": "cpu" if engine == "host" else "cuda", "ranks": 1},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "aliquot", "train", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_trains_as_the_cpu_does_and_exports(tmp_path: Path, engine: str) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    expected = run(tmp_path, "cpu", 8, "host")
    found = run(tmp_path, engine, 8, engine)
    # bf16 products on two kinds of hardware: eight bits each, over eight steps of training.
    assert found == pytest.approx(expected, rel=2e-2)
    exported = load_file(tmp_path / engine / "export" / "model.safetensors")
    assert all(bool(values.isfinite().all()) for values in exported.values())


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_resumes_where_it_was(tmp_path: Path, engine: str) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    whole = run(tmp_path, "whole", 8, engine)
    run(tmp_path, "parts", 4, engine)
    parts = run(tmp_path, "parts", 8, engine)
    # Sums of a GPU's atomic additions are not in a fixed order.
    assert parts == pytest.approx(whole, rel=1e-3)


def test_offload_gives_the_same_curve(tmp_path: Path) -> None:
    assert run(tmp_path, "offload", 6, "fsdp", offload="cpu") == pytest.approx(
        run(tmp_path, "resident", 6, "fsdp"), rel=1e-3
    )


def test_loads_to_the_device_through_bounded_pinned_memory(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoConfig, AutoModelForCausalLM

    from aliquot import load_sharded

    config = AutoConfig.for_model(**MODEL, vocab_size=4096)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        loaded = load_sharded(config, tmp_path, init_device_mesh("cuda", (1,)), dtype=torch.bfloat16)
        stored = load_file(tmp_path / "model.safetensors")
        for name, weight in loaded.named_parameters():
            local = weight.to_local()
            assert local.device.type == "cuda"
            assert torch.equal(local.cpu(), stored[name].bfloat16()), name
    finally:
        torch.distributed.destroy_process_group()
