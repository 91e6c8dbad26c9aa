"""Runs on a GPU against the same runs on the CPU: curves, checkpoints that cross over, what else a run can ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gpu.on_device import HAS_GPU, LLAMA, exported, needs_device, run

pytestmark = needs_device

WINDOWS = {**LLAMA, "model_type": "mistral", "sliding_window": 24}
CAPPED = {**LLAMA, "model_type": "gemma2", "head_dim": 32, "sliding_window": 24, "attn_logit_softcapping": 20.0}
SINKS = {
    **LLAMA, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
    "intermediate_size": 128, "sliding_window": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def _deepspeed(engine: str) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Twelve steps in fp32, with nothing special about them."""
    folder = tmp_path_factory.mktemp("resident")
    return folder, run(folder, "resident", 12, "fsdp", precision="fp32")


def test_the_curve_is_the_cpus(tmp_path: Path) -> None:
    expected = run(tmp_path, "cpu", 20, "host", precision="fp32")
    assert run(tmp_path, "gpu", 20, "fsdp", precision="fp32") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_trains_in_bf16_as_the_cpu_does_and_exports(tmp_path: Path, engine: str) -> None:
    _deepspeed(engine)
    expected = run(tmp_path, "cpu", 8, "host")
    found = run(tmp_path, engine, 8, engine)
    # bf16 products on two kinds of hardware: eight bits each, over eight steps of training.
    assert found == pytest.approx(expected, rel=2e-2)
    assert all(bool(values.isfinite().all()) for values in exported(tmp_path, engine).values())


@pytest.mark.parametrize("model", [WINDOWS, CAPPED, SINKS], ids=["windows", "soft-caps", "sinks-and-experts"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_attention(tmp_path: Path, model: dict[str, object], precision: str) -> None:
    expected = run(tmp_path, "cpu", 6, "host", model=model, precision=precision)
    found = run(tmp_path, "gpu", 6, "fsdp", model=model, precision=precision)
    assert found == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("kept", ["selective", "full"])
def test_what_is_recomputed_is_the_same(tmp_path: Path, resident: tuple[Path, list[float]], kept: str) -> None:
    found = run(tmp_path, kept, 6, "fsdp", precision="fp32", gradient_checkpointing=kept)
    assert found == pytest.approx(resident[1][:6], rel=1e-5)


def test_compiled_layers_give_the_same_curve(tmp_path: Path, resident: tuple[Path, list[float]]) -> None:
    found = run(tmp_path, "compiled", 6, "fsdp", precision="fp32", compile="layers")
    assert found == pytest.approx(resident[1][:6], rel=1e-4)


def test_several_micro_batches_give_the_same_curve(tmp_path: Path, resident: tuple[Path, list[float]]) -> None:
    """On a GPU the plan keeps weights and gradient sums whole over them."""
    one = run(tmp_path, "one", 6, "fsdp", precision="fp32", per_device_train_batch_size=4)
    assert one == pytest.approx(resident[1][:6], rel=1e-4)
    plan = json.loads((resident[0] / "resident" / "ledger.json").read_text())["plan"]
    assert plan["unsharded"] == {"weights": HAS_GPU, "gradients": HAS_GPU}


@pytest.mark.skipif(not HAS_GPU, reason="no GPU: from a CPU nothing is offloaded")
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_offload_gives_the_same_curve(tmp_path: Path, engine: str) -> None:
    _deepspeed(engine)
    expected = run(tmp_path, "resident", 6, engine)
    assert run(tmp_path, "offload", 6, engine, shard={"offload": "cpu"}) == pytest.approx(expected, rel=1e-3)
    rows = json.loads((tmp_path / "offload" / "ledger.json").read_text())["rows"]
    assert rows[-1]["accounted_bytes"]["moments"] > 0 and "moments" not in rows[-1]["gpu"]["accounted_bytes"]


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_resumes_where_it_was(tmp_path: Path, engine: str) -> None:
    _deepspeed(engine)
    whole = run(tmp_path, "whole", 8, engine)
    run(tmp_path, "parts", 4, engine)
    parts = run(tmp_path, "parts", 8, engine)
    # Sums of a GPU's atomic additions are not in a fixed order.
    assert parts == pytest.approx(whole, rel=1e-3)


def test_a_checkpoint_goes_to_the_other_device_and_back(tmp_path: Path, resident: tuple[Path, list[float]]) -> None:
    run(tmp_path, "crossing", 4, "host", precision="fp32")
    run(tmp_path, "crossing", 8, "fsdp", precision="fp32")
    assert run(tmp_path, "crossing", 12, "host", precision="fp32") == pytest.approx(resident[1], rel=1e-4)


def test_an_export_is_what_transformers_reads_and_continues(resident: tuple[Path, list[float]]) -> None:
    folder = resident[0] / "resident" / "export"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stored = exported(resident[0], "resident")
    assert all(torch.equal(values, model.state_dict()[name].to(values.dtype)) for name, values in stored.items())
    command = [sys.executable, "-m", "aliquot", "generate", str(folder), "--prompt", "The", "--max-new-tokens", "8"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0 and len(said.stdout) > len("The\n"), said.stderr


@pytest.mark.skipif(not HAS_GPU, reason="no GPU: its memory is not there to be measured")
def test_the_ledger_tells_both_memories_and_the_plan_is_near(tmp_path: Path) -> None:
    model = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    run(tmp_path, "large", 6, "fsdp", model=model)
    ledger = json.loads((tmp_path / "large" / "ledger.json").read_text())
    steady = ledger["rows"][-1]
    assert steady["gpu"]["peak_bytes"] >= steady["gpu"]["reserved_bytes"] > steady["gpu"]["allocated_bytes"] > 0
    assert steady["gpu"]["planned_bytes"] == pytest.approx(steady["gpu"]["peak_bytes"], rel=0.25)
    assert steady["planned_bytes"] == pytest.approx(steady["peak_bytes"], rel=0.5)
