"""Runs on a GPU against the same runs on the CPU: curves, checkpoints that cross over, what else a run can ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gpu.cpu_curves import CASES, expected
from tests.gpu.on_device import DEVICE, HAS_GPU, LLAMA, exported, needs_device, run
from tests.tools import warm

pytestmark = needs_device
# Tests that share the run of `resident` run in one worker of pytest-xdist.
shares_resident = pytest.mark.xdist_group("resident")


def _deepspeed(engine: str) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Twenty steps in fp32, of four micro-batches each: the plan of a GPU could choose fewer."""
    folder = tmp_path_factory.mktemp("resident")
    return folder, run(folder, "resident", 20, "fsdp", precision="fp32", per_device_train_batch_size=1)


@shares_resident
def test_the_curve_is_the_cpus(resident: tuple[Path, list[float]]) -> None:
    assert resident[1] == pytest.approx(expected("llama-fp32"), rel=1e-4)


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_trains_in_bf16_as_the_cpu_does_and_exports(tmp_path: Path, engine: str) -> None:
    _deepspeed(engine)
    # bf16 products on two kinds of hardware: eight bits each, over eight steps of training.
    assert run(tmp_path, engine, 8, engine) == pytest.approx(expected("llama-bf16"), rel=2e-2)
    assert all(bool(values.isfinite().all()) for values in exported(tmp_path, engine).values())


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("llama")])
def test_other_attention(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    losses = run(tmp_path, "gpu", case.steps, "fsdp", model=case.model, precision=case.precision)
    assert losses == pytest.approx(expected(name), rel=1e-4 if case.precision == "fp32" else 2e-2)


@shares_resident
@pytest.mark.parametrize(
    ("setting", "bound"),
    [
        ({"gradient_checkpointing": "selective"}, 1e-5),
        ({"gradient_checkpointing": "full"}, 1e-5),
        ({"compile": "layers"}, 1e-4),
    ],
    ids=str,
)
def test_a_setting_of_speed_or_memory_gives_the_same_curve(
    tmp_path: Path, resident: tuple[Path, list[float]], setting: dict[str, str], bound: float
) -> None:
    losses = run(tmp_path, "same", 6, "fsdp", precision="fp32", **setting)
    assert losses == pytest.approx(resident[1][:6], rel=bound)


@shares_resident
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


@shares_resident
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_a_checkpoint_goes_to_another_engine_and_back(
    tmp_path: Path, resident: tuple[Path, list[float]], device: str
) -> None:
    """Engine host computes on the CPU or on the GPU, and fsdp on the GPU."""
    run(tmp_path, "crossing", 4, "host", device, precision="fp32")
    run(tmp_path, "crossing", 8, "fsdp", precision="fp32")
    losses = run(tmp_path, "crossing", 12, "host", device, precision="fp32")
    assert losses == pytest.approx(resident[1][:12], rel=1e-4)


@pytest.mark.parametrize("name", ["llama-fp32", "llama-bf16", "sinks-and-experts-fp32", "windows-bf16"])
def test_host_engine_computes_on_the_gpu(tmp_path: Path, name: str) -> None:
    """Weights are copied to it, and gradients from it; masters, moments and sums are in the memory of the host."""
    case = CASES[name]
    losses = run(tmp_path, "host", case.steps, "host", DEVICE, case.model, precision=case.precision)
    assert losses == pytest.approx(expected(name), rel=1e-4 if case.precision == "fp32" else 2e-2)
    rows = json.loads((tmp_path / "host" / "ledger.json").read_text())["rows"]
    assert rows[-1]["accounted_bytes"]["moments"] > 0
    assert not HAS_GPU or rows[-1]["gpu"]["accounted_bytes"]["gathered"] > 0


def test_compressed_states_are_for_gpus_too(tmp_path: Path) -> None:
    on_cpu = run(tmp_path, "cpu", 6, "host", "cpu", optimizer_states="int8")
    on_gpu = run(tmp_path, "gpu", 6, "host", DEVICE, optimizer_states="int8")
    assert on_gpu == pytest.approx(on_cpu, rel=2e-2)


@shares_resident
def test_an_export_is_what_transformers_reads_and_continues(resident: tuple[Path, list[float]]) -> None:
    folder = resident[0] / "resident" / "export"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stored = exported(resident[0], "resident")
    assert all(torch.equal(values, model.state_dict()[name].to(values.dtype)) for name, values in stored.items())
    said = warm.run("-m", "aliquot", "generate", folder, "--prompt", "The", "--max-new-tokens", "8")
    assert said.returncode == 0 and len(said.stdout) > len("The\n"), said.stderr


@pytest.mark.alone  # memory of the GPU counts whoever uses it
@pytest.mark.skipif(not HAS_GPU, reason="no GPU: its memory is not there to be measured")
def test_the_ledger_tells_both_memories_and_the_plan_is_near(tmp_path: Path) -> None:
    model = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    run(tmp_path, "large", 6, "fsdp", model=model, in_new_process=True)
    ledger = json.loads((tmp_path / "large" / "ledger.json").read_text())
    steady = ledger["rows"][-1]
    assert steady["gpu"]["peak_bytes"] >= steady["gpu"]["reserved_bytes"] > steady["gpu"]["allocated_bytes"] > 0
    assert steady["gpu"]["planned_bytes"] == pytest.approx(steady["gpu"]["peak_bytes"], rel=0.25)
    assert steady["planned_bytes"] == pytest.approx(steady["peak_bytes"], rel=0.5)
