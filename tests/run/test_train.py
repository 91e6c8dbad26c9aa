"""Training as a person starts it: four launchers with one curve; interrupted, resumed, exported."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import aliquot
from aliquot.config.read_config import read_config
from aliquot.config.schema import TrainSection
from aliquot.core.errors import StorageError
from aliquot.data.batches import Batches
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.prepare import prepare
from aliquot.data.workload import BatchSize, batch_size
from aliquot.distributed.topology import Topology
from aliquot.machine.matmul import faster_precision_here
from aliquot.observe.run_directory import RunDirectory
from aliquot.run.resolved_run import choose_precision
from aliquot.run.training_progress import LossWatch
from tests import plain
from tests.runs import (
    command,
    curve,
    free_port,
    has_steps,
    refusal,
    refused,
    trained,
    wait_for,
    write_config,
    write_text,
)
from tests.tensor_io.world import run_world
from tests.tools import warm

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The reference run: one process without launcher or environment.

    tests/planner/test_cli.py trains in an interpreter of its own.
    """
    observe = {"sample_prompt": "the rank", "report_to": ["tensorboard"]}
    checkpoint = {"every": 3, "keep": 9}
    trained(write_config(folder, "alone", train={"compile": "auto"}, checkpoint=checkpoint, observe=observe))
    return folder / "alone"


def test_run_leaves_all_its_files(alone: Path) -> None:
    left = {path.name for path in alone.iterdir()}
    assert left >= {"config.yaml", "metrics.jsonl", "ledger.json", "checkpoints", "export", "logs", "tensorboard"}
    assert list((alone / "tensorboard").glob("events.*"))
    assert read_config(alone / "config.yaml").train.compile == "none"  # the choice of `auto` for a short run
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
    phase_bytes = {row["phase"]: row["accounted_bytes"] for row in ledger["rows"]}
    numel = sum(v.numel() for v in load_file(alone / "export" / "model.safetensors").values())
    # In fp32 the one copy that all ranks share is the master, too; the gradients' ring lies beside it.
    assert phase_bytes["weights loaded"]["weights"] == 0
    assert 4 * numel <= phase_bytes["weights loaded"]["shared"] <= 4 * numel + (65 << 20)
    assert phase_bytes["first backward"]["gradients"] == 4 * numel
    assert phase_bytes["first step"]["moments"] == 8 * numel
    assert phase_bytes["first forward"]["activations"] > 0


def test_the_curve_is_that_of_a_plain_loop(folder: Path, alone: Path) -> None:
    config = aliquot.read_config(folder / "alone.yaml")
    data = prepare(config.data, None, 1 << 20)
    model = AutoModelForCausalLM.from_pretrained(alone / "export")  # for its shape
    model.load_state_dict(plain.initial_weights(model.config, config.run.seed), strict=False)
    batches = Batches.of(data, config.data, config.run.seed, batch_size(config.train, 1), None)
    losses = plain.train(model, batches, config.train, 6)
    assert list(curve(alone).values()) == pytest.approx(losses, rel=1e-5)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Path:
    """This run chooses its micro-batch."""
    train, checkpoint = {"per_device_train_batch_size": "auto"}, {"every": 2}
    output = trained(write_config(folder, "two-ranks", train=train, launch={"ranks": 2}, checkpoint=checkpoint))
    assert "2 ranks x" in output
    chosen = read_config(folder / "two-ranks" / "config.yaml").train.per_device_train_batch_size
    assert f"micro-batches of {chosen} sequences (train.per_device_train_batch_size: auto)\n" in output
    assert "2 ranks connected by gloo over TCP: ranks 0-1 on " in output
    assert "weights and gradients: shared memory\n" in output
    return folder / "two-ranks"


def test_local_ranks_give_the_curve_of_one_process(alone: Path, two_ranks: Path) -> None:
    # Sums in another order, in fp32: see tests/engines/test_fsdp.py for the bound.
    assert curve(two_ranks) == pytest.approx(curve(alone), rel=1e-5)
    assert curve(two_ranks, "tokens") == curve(alone, "tokens")


def test_bits_per_byte_are_those_of_a_plain_loop(folder: Path, alone: Path, two_ranks: Path) -> None:
    config = aliquot.read_config(folder / "alone.yaml")
    data = prepare(config.data, None, 1 << 20)
    batches = EvalBatches.of(data, config.data, batch_size(config.train, 1))[""]
    store = batches.store
    model = AutoModelForCausalLM.from_pretrained(alone / "export")
    perplexity = plain.perplexity(model, batches.micro_batches(0, 1), batches.predicted)
    ends = pairwise(store.offsets.tolist())
    texts = [data.load_tokenizer().decode(store.tokens[a:b], skip_special_tokens=True) for a, b in ends]
    assert all(text in Path(str(config.data.path)).read_text().splitlines() for text in texts)
    bits = math.log2(perplexity) * batches.predicted / sum(len(text.encode()) for text in texts)
    for run in (alone, two_ranks):
        assert curve(run, "eval_bits_per_byte")[6] == pytest.approx(bits, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("asked", "used"), [("auto", "shared memory"), ("gloo", "gloo")])
def test_a_run_says_what_carries_its_collectives(folder: Path, asked: str, used: str) -> None:
    shard = {"engine": "fsdp", "collectives": asked}
    output = trained(write_config(folder, asked, shard=shard, launch={"ranks": 2}, train={"max_steps": 1}))
    assert f"weights and gradients: {used}\n" in output
    line = json.loads((folder / asked / "metrics.jsonl").read_text().splitlines()[0])
    assert (line["staged_bytes"] > 0, line["wire_bytes"] > 0) == (asked == "auto", asked == "gloo")


def test_traffic_is_in_the_metrics(two_ranks: Path) -> None:
    moved = curve(two_ranks, "interface_bytes")
    assert list(moved) == list(curve(two_ranks))
    sent = [interfaces["lo"]["sent"] for interfaces in moved.values()]  # type: ignore[index]
    assert sent == sorted(sent) and sent[0] > 0  # the ranks tell each other their losses
    assert curve(two_ranks, "staged_bytes")[6] > 0
    assert set(curve(two_ranks, "wire_bytes").values()) == {0}  # no weights, no gradients


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
    port = free_port()
    nodes = [
        warm.popen(
            "-m", "aliquot", "train", config,
            env={
                **ENVIRONMENT,
                "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank),
                "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "step 6/6" in outputs[0] and "step 6/6" not in outputs[1]
    assert curve(folder / "trainjob") == pytest.approx(curve(alone), rel=1e-5)


def test_killed_and_resumed_is_bit_for_bit_the_undisturbed_run(folder: Path, two_ranks: Path) -> None:
    size = read_config(two_ranks / "config.yaml").train.per_device_train_batch_size
    train, launch = {"per_device_train_batch_size": size}, {"ranks": 2}
    config = write_config(folder, "killed", train=train, launch=launch, checkpoint={"every": 2})
    directory = folder / "killed"
    process = warm.popen("-m", "aliquot", "train", config, stdout=subprocess.DEVNULL)
    wait_for((directory / "checkpoints" / "step-00000002").exists, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (directory / "export").exists()
    # Where states lie makes no difference either: the limit sends to disk all that can be there.
    output = trained(config, "--force", "shard.offload=disk", "shard.memory=0.1")
    assert (
        "resuming from" in output
        and "plan: on disk states of" in output
        and "gradient sums of" in output
        and "layers whole" in output
    )
    assert curve(directory) == curve(two_ranks)
    assert curve(directory, "grad_norm") == curve(two_ranks, "grad_norm")
    files = sorted((two_ranks / "checkpoints" / "step-00000006").glob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        assert (directory / "checkpoints" / "step-00000006" / file.name).read_bytes() == file.read_bytes()


def told_to_stop(
    number: signal.Signals, directory: Path, *arguments: str | Path, steps: int = 2, with_ranks: bool = False
) -> str:
    """Signal a run after some steps, `with_ranks` its ranks first; check its exit code, and return its stderr."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = warm.popen("-m", "aliquot", "train", *arguments, **streams)
    wait_for(lambda: has_steps(directory, steps), process)
    ranks = psutil.Process(process.pid).children(recursive=True) if with_ranks else []
    for each in (*ranks, process):
        each.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + number, errors
    assert f"stopped by {number.name} after step" in errors and "Traceback" not in errors
    return str(errors)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_ctrl_c_saves_and_says_how_to_continue(folder: Path, ranks: int) -> None:
    config, directory = write_config(folder, f"ctrl-c-{ranks}", launch={"ranks": ranks}), folder / f"ctrl-c-{ranks}"
    errors = told_to_stop(signal.SIGINT, directory, config, "train.max_steps=100000")
    assert "a second signal ends it at once, losing all" in errors and "start again to continue" in errors
    (saved,) = (directory / "checkpoints").iterdir()
    assert list(curve(directory)) == list(range(1, int(saved.name.removeprefix("step-")) + 1))


@pytest.mark.long
def test_closed_terminal_saves_and_nohup_ignores_it(folder: Path) -> None:
    config, directory = write_config(folder, "terminal", launch={"ranks": 2}), folder / "terminal"
    told_to_stop(signal.SIGHUP, directory, config, "train.max_steps=100000")
    config, directory = write_config(folder, "nohup", launch={"ranks": 2}), folder / "nohup"
    words = [sys.executable, "-m", "aliquot", "train", str(config), "train.max_steps=12"]
    command = (
        f"trap '' HUP INT; exec {shlex.join(words)}"  # as nohup does, and a shell with what runs in the background
    )
    launcher = subprocess.Popen(["sh", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: has_steps(directory, 2), launcher)
    for process in [launcher, *psutil.Process(launcher.pid).children(recursive=True)]:
        for number in (signal.SIGHUP, signal.SIGINT):
            process.send_signal(number)
    _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, errors
    assert len(curve(directory)) == 12


def test_signal_during_evaluation_saves_and_skips_it(folder: Path) -> None:
    config, directory = write_config(folder, "evaluating", launch={"ranks": 2}), folder / "evaluating"
    lines = (folder / "text.txt").read_text().splitlines()
    (folder / "much.txt").write_text("\n".join(lines * 100) + "\n")
    more = [f"data.eval_path={folder / 'much.txt'}", "data.eval_fraction=0", "train.eval_steps=1"]
    began = time.monotonic()
    told_to_stop(signal.SIGTERM, directory, config, *more, steps=1)
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step-00000001"], time.monotonic() - began
    assert not curve(directory, "eval_loss")


@pytest.mark.long
def test_evaluation_is_compiled_after_the_first_step(folder: Path) -> None:
    """During the compilation of an evaluation a signal could not be obeyed within its grace period."""
    kernels = folder / "kernels"
    sections = {"train": {"compile": "layers", "max_steps": 4, "eval_steps": 4, "logging_steps": 1}}
    config = write_config(folder, "compiling", **sections)
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(kernels)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = warm.popen("-m", "aliquot", "train", config, "observe.console=plain", env=environ, **streams)
    assert run.stdout is not None
    made: dict[str, set[str]] = {}
    is_compiling = False
    for line in run.stdout:
        is_compiling = is_compiling or "compiling the evaluation" in line
        if line.startswith("step "):
            made[line.split("/")[0]] = {file.name for file in kernels.rglob("*.cpp")}
    _, errors = run.communicate(timeout=100)
    assert run.returncode == 0 and curve(folder / "compiling", "eval_loss"), errors
    assert is_compiling and made["step 1"] < made["step 2"] == {file.name for file in kernels.rglob("*.cpp")}


def test_sigterm_saves_and_exits_143(folder: Path, two_ranks: Path) -> None:
    config, directory = write_config(folder, "told", launch={"ranks": 2}), folder / "told"
    endless = [config, "train.max_steps=100000", "train.lr_scheduler_type=constant"]
    told_to_stop(signal.SIGTERM, directory, *endless)
    (saved,) = (directory / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert list(curve(directory)) == list(range(1, step + 1))
    # A stopped control group signals the launcher and the ranks, and the launcher signals the ranks again.
    told_to_stop(signal.SIGTERM, directory, *endless, steps=step + 2, with_ranks=True)
    steps = list(curve(directory))
    assert steps == list(range(1, len(steps) + 1))
    assert steps[-1] == max(int(path.name.removeprefix("step-")) for path in (directory / "checkpoints").iterdir())


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_resumed_at_another_world_size(folder: Path, alone: Path, ranks: int) -> None:
    name = f"moved{ranks}"
    train = {"per_device_train_batch_size": "auto", "global_batch_size": None}
    config = write_config(folder, name, train=train, launch={"ranks": ranks})
    shutil.copytree(alone, folder / name)
    shutil.rmtree(folder / name / "checkpoints" / "step-00000006")
    assert "train.global_batch_size is 5, as in the checkpoint" in trained(config)
    assert curve(folder / name) == pytest.approx(curve(alone), rel=1e-5)
    recorded = read_config(folder / name / "config.yaml").train.per_device_train_batch_size
    assert recorded == 2  # as in the checkpoint


@pytest.mark.long
@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_frugal_states_go_on_bit_for_bit(folder: Path, states: str) -> None:
    """The checkpoint holds the compressed states, in memory and on disk."""
    name = f"frugal-{states}"
    shape = {"train": {"optimizer_states": states}, "checkpoint": {"every": 2, "keep": 9}, "launch": {"ranks": 2}}
    whole = write_config(folder, name, **shape)
    trained(whole)
    for place, shard in (("memory", []), ("disk", ["--force", "shard.offload=disk", "shard.memory=0.1"])):
        directory = folder / f"{name}-{place}"
        shutil.copytree(folder / name, directory)
        for step in (4, 6):
            shutil.rmtree(directory / "checkpoints" / f"step-{step:08d}")
        trained(write_config(folder, directory.name, **shape), *shard)
        assert curve(directory) == curve(folder / name)
        for file in (folder / name / "checkpoints" / "step-00000006").glob("*.safetensors"):
            assert (directory / "checkpoints" / "step-00000006" / file.name).read_bytes() == file.read_bytes()


def test_export_loads_in_transformers_and_trains_with_same_loss(folder: Path, alone: Path) -> None:
    directory = alone / "export"
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32  # what it was trained in
    saved = load_file(alone / "checkpoints" / "step-00000006" / "model.safetensors")
    for name, values in load_file(directory / "model.safetensors").items():
        assert torch.equal(values, saved[name])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer("the rank").input_ids[0] == tokenizer.bos_token_id == model.config.bos_token_id

    again = write_config(folder, "again", train={"max_steps": 1, "warmup_steps": 1})
    # One step at learning rate 0: the evaluation sees the exported weights.
    source = ["model.config=null", f"model.path={directory}", "data.tokenizer_vocab_size=null"]
    aliquot.train(aliquot.read_config(again, source))
    assert curve(folder / "again", "eval_loss")[1] == pytest.approx(curve(alone, "eval_loss")[6], rel=1e-6)


def test_commands_on_what_a_run_left(folder: Path, alone: Path) -> None:
    out = folder / "from-checkpoint"
    result = command("export", alone / "checkpoints" / "step-00000006", out)
    assert result.returncode == 0 and result.stdout.endswith("(float32)\n"), result.stdout + result.stderr
    for name, values in load_file(alone / "export" / "model.safetensors").items():
        assert torch.equal(load_file(out / "model.safetensors")[name], values)
    result = command("generate", out, "--prompt", "the rank", "--max-new-tokens", "4")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("the rank")
    result = command("export", alone / "checkpoints" / "step-00000006", out)
    assert result.returncode == 2 and "not empty" in result.stderr
    result = command("export", alone / "checkpoints" / "step-7", folder / "none")
    assert result.returncode == 2 and "step-7: no such directory; there are step-0000" in result.stderr


def test_a_complete_run_is_left_alone(folder: Path, alone: Path) -> None:
    before = {name: (alone / name).read_bytes() for name in ("metrics.jsonl", "ledger.json", "export/config.json")}
    result = aliquot.train(aliquot.read_config(folder / "alone.yaml"))
    assert (result.steps, result.export) == (6, alone / "export")
    assert (result.loss, result.perplexity) == (curve(alone)[6], curve(alone, "eval_perplexity")[6])
    assert {name: (alone / name).read_bytes() for name in before} == before


@pytest.mark.long
def test_without_last_checkpoint_only_the_export_remains(folder: Path, alone: Path) -> None:
    file, directory = folder / "alone.yaml", folder / "export-alone"
    overrides = [f"run.directory={directory}", "checkpoint.every=0", "checkpoint.last=false"]
    assert "the run would save nothing" in refused(file, *overrides, "checkpoint.export=false")
    assert aliquot.train(aliquot.read_config(file, overrides)).export == directory / "export"
    assert not list((directory / "checkpoints").iterdir())
    one, other = (load_file(path / "export" / "model.safetensors") for path in (alone, directory))
    assert all(torch.equal(values, other[name]) for name, values in one.items())
    assert "no checkpoint is left to continue from" in refused(file, *overrides)


def test_complete_run_finishes_a_killed_retention(folder: Path, alone: Path) -> None:
    copy = folder / "killed-in-retention"
    shutil.copytree(alone, copy)
    (copy / "checkpoints" / ".step-00000001.trash-0123abcd").mkdir()
    assert len(list((copy / "checkpoints").glob("step-*"))) == 2
    aliquot.train(aliquot.read_config(folder / "alone.yaml", [f"run.directory={copy}", "checkpoint.keep=1"]))
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["step-00000006"]


@pytest.mark.long
def test_resume_from_path_then_from_checkpoints_of_the_run(folder: Path, alone: Path) -> None:
    shutil.copytree(alone / "checkpoints" / "step-00000003", folder / "best")
    config = write_config(folder, "branch", checkpoint={"resume": str(folder / "best")})
    aliquot.train(aliquot.read_config(config))
    assert curve(folder / "branch") == {step: loss for step, loss in curve(alone).items() if step > 3}
    aliquot.train(aliquot.read_config(config, ["train.max_steps=8"]))
    assert list(curve(folder / "branch")) == [4, 5, 6, 7, 8]
    assert "already has the newer step-00000006" in refusal(
        folder / "alone.yaml", f"checkpoint.resume={alone}/checkpoints/step-00000003"
    )


def test_runs_are_never_overwritten(folder: Path, alone: Path) -> None:
    config = folder / "alone.yaml"
    before = {path: path.stat().st_mtime_ns for path in alone.rglob("*") if path.is_file() and path.name != ".lock"}
    assert "exists already" in refusal(config, "checkpoint.resume=never")
    assert "data.sequence_length was 32 and is 16" in refusal(config, "data.sequence_length=16")
    assert "train.global_batch_size was 5 and is 7" in refusal(config, "train.global_batch_size=7")
    assert "hidden_size was 32 and is 64" in refusal(config, "model.config.hidden_size=64", "model.config.head_dim=8")
    (folder / "changed").mkdir()
    text = write_text(folder / "changed", documents=70)
    output = refusal(config, f"data.path={text}")
    assert re.search(
        r"data: the training data had \d+ documents with [\d,]+ tokens and have \d+ documents with", output
    )
    assert f"is '{text}'; {text} changed after the checkpoint)" in output and not re.search("[0-9a-f]{64}", output)
    output = refusal(config, "model.config.rms_norm_eps=1e-3")
    assert "the model's configuration has changed: rms_norm_eps was 1e-06 and is 0.001. Undo the change" in output
    other = folder / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    assert "is not a run of aliquot" in refusal(config, f"run.directory={other}")
    (other / "config.yaml").write_text("# my own notes\n")
    assert "is not a run of aliquot" in refusal(config, f"run.directory={other}")
    assert (other / "config.yaml").read_text() == "# my own notes\n"
    with RunDirectory(alone).lock.hold():
        assert "another process is training" in refusal(config, "train.max_steps=9")
    after = {path: path.stat().st_mtime_ns for path in alone.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_where_the_run_directory_should_be(tmp_path: Path, below: str) -> None:
    file = tmp_path / "README.md"
    file.write_text("x")
    with pytest.raises(StorageError, match=r"cannot write the run directory: .* choose another run.directory"):
        RunDirectory(file / below).lock.hold().__enter__()
    assert file.read_text() == "x"


def test_error_of_the_run_is_not_blamed_on_its_directory(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="of the body"), RunDirectory(tmp_path / "run").lock.hold():
        shutil.rmtree(tmp_path / "run")  # then there is nothing to clean up, which is not told
        raise PermissionError("of the body")


def test_bad_input(folder: Path, alone: Path, tmp_path: Path) -> None:
    config = write_config(folder, "bad")
    no_config = ["model.config=null", "data.tokenizer_vocab_size=null"]
    (tmp_path / "empty.txt").write_text("\n \n")
    for override, message in {
        "train.learning_rte=1": "did you mean train.learning_rate",
        "data.path=nowhere.txt": "no such file",
        "data.sequence_length=128": "64 positions",
        f"data.path={tmp_path}/empty.txt": "no usable document",
        "model.config.vocab_size=200": "only 200 rows",
        "model.config.model_type=bart": "encoder-decoder",
    }.items():
        assert message in refusal(config, override)
    assert "no config.json here" in refusal(config, *no_config, f"model.path={tmp_path}")
    assert "no such directory" in refusal(config, *no_config, f"model.path={tmp_path}/nowhere")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(alone / "export" / name, bare)
    assert "safetensors" in refusal(config, *no_config, f"model.path={bare}")
    weights = (alone / "export" / "model.safetensors").read_bytes()
    (bare / "model.safetensors").write_bytes(weights[:-100])
    assert "model.safetensors" in refusal(config, *no_config, f"model.path={bare}")
    assert not (folder / "bad").exists()


def test_bad_input_on_the_command_line_is_one_line(folder: Path, alone: Path) -> None:
    assert "did you mean train.learning_rate" in refused(folder / "alone.yaml", "train.learning_rte=1")
    config = write_config(folder, "bad-ranks", launch={"ranks": 2})
    assert "no such file" in refused(config, "data.path=nowhere.txt")
    output = command("report", folder / "bad-ranks").stderr  # of what never began
    assert "bad-ranks: this run ended before it began: " in output and "nowhere.txt: data.path: no such file" in output
    log = (folder / "bad-ranks" / "logs" / "rank-0.log").read_text()
    assert "no such file" in log and "Traceback" not in log


def test_nodes_of_a_new_run_agree_on_a_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node has instructions for bf16, the second one has not."""

    def chosen(ranks: Any, setting: str, recorded: Any) -> Any:
        ranks.topology, ranks.allowed_cores = Topology(ranks.rank, 2, 0, 1, ranks.rank, 2, "cpu", 1, ()), {0}
        faster = ("bf16", "fp32")[ranks.rank]
        monkeypatch.setattr("aliquot.run.resolved_run.faster_precision_here", lambda device: faster)
        train = TrainSection(precision=setting)
        return choose_precision(SimpleNamespace(ranks=ranks, requested=SimpleNamespace(train=train)), recorded)

    for setting, recorded in (("auto", "fp32"), ("fp32", "bf16")):
        assert run_world(2, partial(chosen, setting=setting, recorded=recorded)) == ["fp32", "fp32"]
    errors = map(str, run_world(2, partial(chosen, setting="auto", recorded=None)))
    assert all("is bf16 there and fp32 here" in error and "set train.precision" in error for error in errors)


@pytest.mark.skipif(faster_precision_here("cpu") == "bf16", reason="this CPU has instructions for bf16")
def test_precision_of_a_cpu_without_bf16(folder: Path, alone: Path) -> None:
    """A run keeps its precision where another one would be faster, and says so."""
    for steps, setting, why in ((1, "bf16", "train.precision is bf16"), (2, "auto", "this run began in bf16")):
        result = command("train", write_config(folder, "slow", train={"max_steps": steps, "precision": setting}))
        assert f"{why}, but " in result.stderr and "no instructions for bf16: matrix products" in result.stderr
        assert read_config(folder / "slow" / "config.yaml").train.precision == "bf16"
    trained(folder / "alone.yaml", "train.precision=auto", f"run.directory={folder}/automatic-precision")
    assert curve(folder / "automatic-precision") == curve(alone)
    assert read_config(folder / "automatic-precision" / "config.yaml").train.precision == "fp32"


def test_a_non_finite_loss_names_step_and_rank(folder: Path, alone: Path, tmp_path: Path) -> None:
    shutil.copytree(alone / "export", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["lm_head.weight"][3] = 3e38  # finite, as a weight must be; its logits are not
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    config = write_config(folder, "infinite")
    overrides = ["model.config=null", "data.tokenizer_vocab_size=null", f"model.path={tmp_path}/model"]
    with pytest.raises(aliquot.TrainingError, match="step 1: the loss is not finite on rank 0; there is no checkpoint"):
        aliquot.train(aliquot.read_config(config, overrides))


@pytest.mark.long
def test_a_diverging_run_stops_and_keeps_the_last_checkpoint(folder: Path) -> None:
    config = write_config(
        folder, "diverged", checkpoint={"every": 1}, launch={"ranks": 2},
        train={"learning_rate": 1e30, "warmup_steps": 1, "max_steps": 50, "max_grad_norm": 0},
    )  # fmt: skip
    result = command("train", config)
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("aliquot:")]
    assert len(lines) == 1
    assert "step 3" in lines[0] and "the last checkpoint is" in lines[0]
    checkpoints = sorted((folder / "diverged" / "checkpoints").glob("step-*"))
    assert [path.name for path in checkpoints] == ["step-00000001", "step-00000002"]
    assert all(torch.isfinite(v).all() for v in load_file(checkpoints[-1] / "model.safetensors").values())


def test_loss_that_explodes_while_finite_is_noticed_once() -> None:
    watch = LossWatch()
    learning = [5 - step / 20 for step in range(40)]
    assert not any(map(watch.explodes, [*learning, *[90.0] * 19, 3.0, *[12.0] * 30]))
    assert [watch.explodes(80.0 + step) for step in range(50)] == [step == 19 for step in range(50)]
    assert 3 < watch.usual < 12 and not any(map(watch.explodes, [4.0] * 100))


@pytest.mark.long
def test_exploding_run_names_its_learning_rate(folder: Path) -> None:
    settings = {"learning_rate": 30.0, "warmup_steps": 100, "max_steps": 100, "lr_scheduler_type": "constant"}
    errors = command("train", write_config(folder, "explodes", train=settings)).stderr
    said = r"warning: since step \d+ the loss is above 10 times its usual value of \S+: (\S+ \S+)"
    assert re.findall(said, errors) == ["train.learning_rate (30)"], errors


def test_accumulation_and_the_global_batch_fix_the_micro_batch(tmp_path: Path) -> None:
    file = write_config(tmp_path, train={"max_steps": 2, "global_batch_size": 8, "gradient_accumulation_steps": 2})
    values = yaml.safe_load(file.read_text())
    del values["train"]["per_device_train_batch_size"]
    file.write_text(yaml.safe_dump(values))
    train = {"max_steps": 2, "global_batch_size": 8, "per_device_train_batch_size": 4}
    for config in (file, write_config(tmp_path, "same", train=train)):
        aliquot.train(aliquot.read_config(config))
    assert curve(tmp_path / "run") == curve(tmp_path / "same")
    again = read_config(tmp_path / "run" / "config.yaml")
    assert batch_size(again.train, 1) == BatchSize(8, 4)


@pytest.mark.long
def test_run_recomputes_as_its_memory_requires(tmp_path: Path) -> None:
    """The loss curve does not depend on the choice, which a resumed run keeps."""
    llama = yaml.safe_load(write_config(tmp_path).read_text())["model"]["config"]
    model = {"config": llama | {"num_hidden_layers": 8, "max_position_embeddings": 256}}

    def chosen(name: str, steps: int, **shard: float) -> str:
        data, train = {"sequence_length": 256}, {"max_steps": steps, "per_device_train_batch_size": 5}
        config = write_config(tmp_path, name, model=model, data=data, train=train, shard={"engine": "host", **shard})
        aliquot.train(aliquot.read_config(config))
        return read_config(tmp_path / name / "config.yaml").train.gradient_checkpointing

    assert chosen("free", 2) == "none"
    needed = json.loads((tmp_path / "free" / "ledger.json").read_text())["plan"]["peak_bytes_per_rank"]
    assert chosen("short", 1, memory=(needed - 2**20) / 2**30) == "selective"
    assert chosen("short", 2) == "selective"
    assert curve(tmp_path / "short") == curve(tmp_path / "free")


def test_run_goes_on_uncompiled_if_torch_compile_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first compiler in PATH ends with an error. In so many steps, compiled layers would save minutes."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho no space left on the device >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("CXX", raising=False)
    config = write_config(tmp_path, train={"compile": "auto"})
    errors = told_to_stop(signal.SIGTERM, tmp_path / "run", config, "train.max_steps=10000000", steps=1)
    assert "torch.compile fails here, so layers stay uncompiled: " in errors
    assert read_config(tmp_path / "run" / "config.yaml").train.compile == "none"


@pytest.mark.long
def test_resumed_run_keeps_the_choice_of_compilation(tmp_path: Path) -> None:
    trained(write_config(tmp_path, train={"max_steps": 1, "compile": "layers"}))
    said = trained(write_config(tmp_path, train={"max_steps": 2, "compile": "auto"}))
    assert "compiled layers" in said and "train.compile" not in said
    assert read_config(tmp_path / "run" / "config.yaml").train.compile == "layers"


def test_too_long_sequences_are_refused_before_tokenising(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    file = write_config(tmp_path, data={"sequence_length": 65, "cache_directory": str(cache)})
    assert "data.sequence_length is 65, but the model has 64 positions" in refused(file)
    assert not [path for path in cache.rglob("*") if path.is_file()]
