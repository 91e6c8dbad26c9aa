"""Runs with a DeepSpeed JSON: the curve of the other engines, phases of the ledger, and common checkpoints."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aliquot.engines.deepspeed.deepspeed_setup import missing_tools
from tests.runs import curve, refused, trained, write_config

if importlib.util.find_spec("deepspeed") is None:  # to import it takes seconds, of every worker
    pytest.skip("the extra `deepspeed` is not installed", allow_module_level=True)
if missing_tools():
    pytest.skip(f"DeepSpeed on CPUs needs {' and '.join(missing_tools())}", allow_module_level=True)

SETTINGS = {
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": "auto",
    },
    "zero_force_ds_cpu_optimizer": False,
    "train_batch_size": "auto",
    "steps_per_print": 10,
}


# Each of these starts DeepSpeed's ranks; its engine's short case is tests/engines/test_deepspeed.py.
long = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def settings(folder: Path) -> Path:
    file = folder / "cpu-ds.json"
    file.write_text(json.dumps(SETTINGS, indent=1))
    return file


@pytest.fixture(scope="module")
def host(folder: Path) -> Path:
    trained(write_config(folder, "host", checkpoint={"every": 3, "keep": 9}))
    return folder / "host"


@pytest.fixture(scope="module")
def zero(folder: Path, settings: Path) -> Path:
    """Two ranks for three steps, three ranks for the rest."""
    sections = {"shard": {"deepspeed_config": str(settings)}, "checkpoint": {"every": 3, "keep": 9}}
    schedule = {"lr_scheduler_type": "cosine"}
    trained(write_config(folder, "zero", launch={"ranks": 2}, train=schedule, **sections))
    return folder / "zero"


@long
def test_the_curve_and_the_export_are_those_of_engine_host(host: Path, zero: Path) -> None:
    # fp32 in another order of summation, six steps.
    assert curve(zero) == pytest.approx(curve(host), rel=1e-4)
    ours, theirs = (load_file(run / "export" / "model.safetensors") for run in (zero, host))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        torch.testing.assert_close(values, theirs[name], rtol=1e-3, atol=1e-4)


@long
def test_a_token_costs_the_same_whatever_the_engine(host: Path, zero: Path) -> None:
    """ZeRO-3 leaves empty parameters in the model, which must not count."""
    assert per_token(zero) == pytest.approx(per_token(host), rel=1e-6)


def per_token(run: Path) -> dict[int, float]:
    flops, tokens = curve(run, "flops_per_s"), curve(run, "tokens_per_s")
    return {step: flops[step] / tokens[step] for step in flops}


@long
def test_the_ledger_has_deepspeeds_phases_and_the_engine(zero: Path) -> None:
    ledger = json.loads((zero / "ledger.json").read_text())
    phases = [row["phase"] for row in ledger["rows"] if row["rank"] == 0]
    assert phases[1:6] == [
        "after load",
        "after bf16 partitions",
        "after fp32 master",
        "after optimizer state",
        "after ZeRO init",
    ]
    assert ledger["engine"] == "deepspeed"


@long
def test_a_checkpoint_of_one_engine_continues_in_the_other(folder: Path, host: Path, settings: Path) -> None:
    start = str(host / "checkpoints" / "step-00000003")
    trained(
        write_config(
            folder,
            "moved",
            shard={"deepspeed_config": str(settings)},
            launch={"ranks": 3},
            checkpoint={"resume": start},
        )
    )
    later = {step: loss for step, loss in curve(host).items() if step > 3}
    assert curve(folder / "moved") == pytest.approx(later, rel=1e-4)


def test_the_batch_of_the_json_must_multiply_out(folder: Path) -> None:
    file = folder / "wrong.json"
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    file.write_text(json.dumps(SETTINGS | sizes))
    config = write_config(
        folder,
        "wrong",
        shard={"deepspeed_config": str(file)},
        train={"global_batch_size": None, "per_device_train_batch_size": 1},
    )
    assert "train_batch_size is 64" in refused(config)
