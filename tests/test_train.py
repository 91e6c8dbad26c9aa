"""The main job, started as a person starts it: four ways, one curve; interrupted, resumed, exported."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import aliquot, curve, refused, trained, write_config

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The run that the others are compared with: one process, no launcher, no environment."""
    trained(write_config(folder, "alone", checkpoint={"every": 3, "keep": 9}, observe={"sample_prompt": "the rank"}))
    return folder / "alone"


def test_a_run_leaves_what_it_promises(alone: Path) -> None:
    assert {path.name for path in alone.iterdir()} >= {
        "config.yaml", "metrics.jsonl", "ledger.json", "checkpoints", "export", "logs", "tensorboard"
    } - {"tensorboard"}  # fmt: skip
    lines = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for key in ("learning_rate", "grad_norm", "tokens", "tokens_per_s", "mfu", "flops_per_s", "memory_bytes"):
        assert all(line[key] is not None for line in steps), key
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert lines[-1]["eval_perplexity"] == pytest.approx(2.718281828 ** lines[-1]["eval_loss"], rel=1e-6)
    ledger = json.loads((alone / "ledger.json").read_text())
    phases = [row["phase"] for row in ledger["rows"]]
    assert phases == [
        "process start", "model built", "weights loaded", "optimizer state", "first forward", "first backward",
        "first step", "steady peak",
    ]  # fmt: skip
    assert all(row["private_bytes"] > 0 and row["rss_bytes"] >= row["private_bytes"] for row in ledger["rows"])
    by_phase = {row["phase"]: row["accounted_bytes"] for row in ledger["rows"]}
    numel = sum(v.numel() for v in load_file(alone / "export" / "model.safetensors").values())
    assert by_phase["weights loaded"]["weights"] == 4 * numel
    assert by_phase["first backward"]["gradients"] == 4 * numel
    assert by_phase["first step"]["moments"] == 8 * numel
    assert by_phase["first forward"]["activations"] > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_local_ranks_give_the_curve_of_one_process(folder: Path, alone: Path, ranks: int) -> None:
    output = trained(write_config(folder, f"ranks{ranks}", launch={"ranks": ranks}))
    assert f"{ranks} ranks x 1 thread" in output
    # Sums in another order, in fp32: see tests/engines/test_fsdp.py for the bound.
    assert curve(folder / f"ranks{ranks}") == pytest.approx(curve(alone), rel=1e-5)
    assert curve(folder / f"ranks{ranks}", "tokens") == curve(alone, "tokens")


@pytest.mark.long
def test_under_torchrun(folder: Path, alone: Path) -> None:
    config = write_config(folder, "torchrun")
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "aliquot", "train", str(config)],
        check=True, timeout=240, capture_output=True,
    )  # fmt: skip
    assert curve(folder / "torchrun") == pytest.approx(curve(alone), rel=1e-5)


@pytest.mark.long
def test_as_two_nodes_of_a_train_job(folder: Path, alone: Path) -> None:
    config = write_config(folder, "trainjob", launch={"ranks": "auto"})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "aliquot", "train", str(config)],
            env={
                **ENVIRONMENT,
                "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank),
                "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "step 6/6" in outputs[0] and "step 6/6" not in outputs[1]
    assert curve(folder / "trainjob") == pytest.approx(curve(alone), rel=1e-5)


def test_killed_and_resumed_is_bit_for_bit_the_undisturbed_run(folder: Path) -> None:
    settings = {"launch": {"ranks": 2}, "checkpoint": {"every": 2}, "train": {"max_steps": 12}}
    trained(write_config(folder, "undisturbed", **settings))
    config, directory = write_config(folder, "killed", **settings), folder / "killed"
    process = subprocess.Popen([sys.executable, "-m", "aliquot", "train", str(config)], stdout=subprocess.DEVNULL)
    while not (directory / "checkpoints" / "step-00000004").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    output = trained(config)
    assert "resuming from" in output
    assert curve(directory) == curve(folder / "undisturbed")
    assert curve(directory, "grad_norm") == curve(folder / "undisturbed", "grad_norm")
    for ours in sorted((directory / "checkpoints" / "step-00000012").glob("*.safetensors")):
        theirs = folder / "undisturbed" / "checkpoints" / "step-00000012" / ours.name
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_resumed_at_another_world_size(folder: Path, alone: Path, ranks: int) -> None:
    name = f"moved{ranks}"
    config = write_config(folder, name, launch={"ranks": ranks})
    shutil.copytree(alone, folder / name)
    shutil.rmtree(folder / name / "checkpoints" / "step-00000006")
    trained(config)
    assert curve(folder / name) == pytest.approx(curve(alone), rel=1e-5)


def test_export_is_a_model_of_transformers_and_trains_on_with_the_same_loss(folder: Path, alone: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = alone / "export"
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32  # what it was trained in
    saved = load_file(alone / "checkpoints" / "step-00000006" / "model.safetensors")
    for name, values in load_file(directory / "model.safetensors").items():
        assert torch.equal(values, saved[name])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer("the rank").input_ids[0] == tokenizer.bos_token_id == model.config.bos_token_id

    again = write_config(folder, "again", train={"max_steps": 1, "warmup_steps": 1}, model={"path": str(directory)})
    text = again.read_text().replace("config:", "x:")
    import yaml

    config = yaml.safe_load(text)
    config["model"] = {"path": str(directory)}
    del config["data"]["tokenizer_vocab_size"]
    again.write_text(yaml.safe_dump(config))
    trained(again)  # one step at learning rate 0: the evaluation sees the exported weights
    assert curve(folder / "again", "eval_loss")[1] == pytest.approx(curve(alone, "eval_loss")[6], rel=1e-6)


def test_commands_on_what_a_run_left(folder: Path, alone: Path) -> None:
    out = folder / "from-checkpoint"
    result = aliquot("export", alone / "checkpoints" / "step-00000006", out, "--dtype", "float32")
    assert result.returncode == 0, result.stderr
    for name, values in load_file(alone / "export" / "model.safetensors").items():
        assert torch.equal(load_file(out / "model.safetensors")[name], values)
    result = aliquot("generate", out, "--prompt", "the rank", "--max-new-tokens", "4")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("the rank")
    result = aliquot("export", alone / "checkpoints" / "step-00000006", out)
    assert result.returncode == 2 and "not empty" in result.stderr


def test_a_complete_run_is_left_alone(folder: Path, alone: Path) -> None:
    before = (alone / "metrics.jsonl").read_text()
    assert "this run is complete at step 6" in trained(folder / "alone.yaml")
    after = (alone / "metrics.jsonl").read_text()
    assert after.startswith(before.rsplit("\n", 2)[0])


def test_runs_are_never_overwritten(folder: Path, alone: Path) -> None:
    config = folder / "alone.yaml"
    before = sorted(path.name for path in alone.rglob("*"))
    assert "exists already" in refused(config, "checkpoint.resume=never")
    assert "data.sequence_length was 32 and is 16" in refused(config, "data.sequence_length=16")
    assert "of another shape" in refused(config, "model.config.hidden_size=64", "model.config.head_dim=8")
    other = folder / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    assert "is not a run of aliquot" in refused(config, f"run.directory={other}")
    assert sorted(path.name for path in alone.rglob("*")) == before


def test_bad_input_is_one_line(folder: Path, tmp_path: Path) -> None:
    config = write_config(folder, "bad")
    assert "did you mean train.learning_rate" in refused(config, "train.learning_rte=1")
    assert "no such file" in refused(config, "data.path=nowhere.txt")
    assert "64 positions" in refused(config, "data.sequence_length=128")
    (tmp_path / "empty.txt").write_text("\n \n")
    assert "no usable document" in refused(config, f"data.path={tmp_path}/empty.txt")
    assert "no config.json here" in refused(config, f"model={{path: {tmp_path}}}")
    assert "only 200 rows" in refused(config, "model.config.vocab_size=200", "data.tokenizer_vocab_size=300")
    assert not (folder / "bad" / "checkpoints").exists() or not list((folder / "bad" / "checkpoints").iterdir())


def test_a_non_finite_loss_stops_and_keeps_the_last_checkpoint(folder: Path) -> None:
    config = write_config(
        folder, "diverged", checkpoint={"every": 1}, launch={"ranks": 2},
        train={"learning_rate": 1e30, "warmup_steps": 1, "max_steps": 50, "max_grad_norm": 0},
    )  # fmt: skip
    result = aliquot("train", config)
    assert result.returncode == 1
    line = next(line for line in result.stderr.splitlines() if "aliquot:" in line)
    assert "not finite" in line and "step" in line and "the last checkpoint is" in line
    kept = sorted((folder / "diverged" / "checkpoints").glob("step-*"))
    assert all(torch.isfinite(v).all() for v in load_file(kept[-1] / "model.safetensors").values())
