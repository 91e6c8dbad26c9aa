"""The command `aliquot plan`, and training that plans first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from aliquot.cli.main import app
from aliquot.cli.terminal import one_line_errors
from aliquot.core.errors import UserError
from aliquot.machine.cpu import read_cpu
from aliquot.planner import machine_profile
from aliquot.planner.machine_profile import keep
from tests.conftest import RATES
from tests.runs import command, refused, trained, write_config

KEYS = {
    "fits", "peak_bytes_per_rank", "limit_bytes", "phases", "wire_bytes_per_step", "step_s", "tokens_per_s",
    "bottleneck", "cost_usd", "engine",
}  # fmt: skip


def test_json_has_the_fixed_keys(tmp_path: Path) -> None:
    result = command(
        "plan", write_config(tmp_path), "--instance", "c7i.4xlarge", "--nodes", "2", "--ranks-per-node", "2", "--json",
        "--picture", tmp_path / "memory.svg",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert set(told) >= KEYS and told["fits"] is True and told["nodes"] == 2
    assert (tmp_path / "memory.svg").read_text().startswith("<svg")
    assert not (tmp_path / "run").exists()  # planning leaves nothing behind


def test_plan_that_does_not_fit_exits_1_with_remedies(tmp_path: Path) -> None:
    result = command("plan", write_config(tmp_path), "--memory", "0.3", "--cores", "4")
    assert result.returncode == 1
    assert "does not fit" in result.stdout and "No tried setting fits" in result.stdout


def test_plan_names_the_frozen_base_of_an_adapter(tmp_path: Path) -> None:
    own = ("--cores", "2", "--memory", "8", "--isa", "amx", "model.config.hidden_size=64")
    shown = plan_in_this_process(write_config(tmp_path), "adapter.r=4", "adapter.base=nf4", *own).stdout
    assert re.search(r"parameters \([\d,]+ trained\), fp32 with frozen layers in nf4, engine host", shown)


def test_tokens_on_own_machines_set_the_steps(tmp_path: Path) -> None:
    """write_config has sequences of 32 tokens, and 5 in a step."""
    own = ("--cores", "8", "--memory", "64", "--nodes", "2", "--tokens", "1M", "--json")
    plans = {
        isa: json.loads(plan_in_this_process(write_config(tmp_path), "train.precision=bf16", "--isa", isa, *own).stdout)
        for isa in ("amx", "avx512")
    }
    assert {plan["steps"] for plan in plans.values()} == {1_000_000 // (5 * 32)}
    assert {plan["nodes"] for plan in plans.values()} == {2}
    assert plans["amx"]["total_s"] < plans["avx512"]["total_s"]
    shown = plan_in_this_process(write_config(tmp_path), *own[:-1], "--isa", "amx").stdout
    assert "2 x 8 ranks" in shown or "on 8 cores, 64 GiB, amx (cpu)" in shown
    assert "6,250 steps, 1,000,000 tokens, " in shown


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tokens", "1M", "--isa", "amx"], "for other machines give --cores and --memory"),
        (["--cores", "8", "--memory", "8", "--global-batch", "8"], "write train.global_batch_size=N"),
        (["--cores", "8", "--memory", "8", "--tokens", "1M", "--optimize", "cost"], "--optimize cost needs EC2 types"),
        (["--cores", "8", "--memory", "8", "--tokens", "many"], "--tokens many is no number of tokens: write one like"),
    ],
)
def test_options_of_own_machines_and_of_ec2_exclude_each_other(tmp_path: Path, options: list[str], told: str) -> None:
    result = plan_in_this_process(write_config(tmp_path), *options)
    assert result.exit_code == 2 and told in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


def test_errors_are_one_line(tmp_path: Path) -> None:
    result = command("plan", write_config(tmp_path), "--instance", "c7i.8xlrge")
    assert result.returncode == 2 and "c7i.8xlarge" in result.stderr and len(result.stderr.splitlines()) == 1


def plan_in_this_process(*arguments: str | Path) -> Result:
    """Starting a process takes seconds."""
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.mark.parametrize("option", ["--memory", "--network"])
@pytest.mark.parametrize("value", ["0", "-10", "nan", "inf", "1e300"])
def test_impossible_machine_numbers_are_refused(tmp_path: Path, option: str, value: str) -> None:
    machine = {"--memory": "8", "--cores": "4", "--network": "10", option: value}
    told = plan_in_this_process(write_config(tmp_path), *(word for pair in machine.items() for word in pair))
    assert told.exit_code == 2 and option in told.stderr.splitlines()[-1], told.output


def test_unwritable_picture_is_one_line(tmp_path: Path) -> None:
    arguments = (write_config(tmp_path), "--memory", "8", "--cores", "4", "--picture")
    for picture, why in (
        (tmp_path / "no/x.svg", "No such file or directory"),
        ("/dev/full", "No space left on device"),
    ):
        told = plan_in_this_process(*arguments, picture)
        *progress, error = told.stderr.splitlines()  # a line where a plan takes longer than a second
        assert (told.exit_code, error) == (2, f"aliquot: {picture}: cannot write: {why} [disk]") and len(progress) < 2
    told = plan_in_this_process(*arguments, "/dev/full", "--debug")
    assert isinstance(told.exception, UserError) and isinstance(told.exception.__cause__, OSError)


def test_unwritable_cache_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ALIQUOT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(machine_profile, "_measure", lambda *_: pytest.fail("measured for half a minute first"))
    told = plan_in_this_process("--calibrate")
    assert (told.exit_code, told.stderr) == (2, f"aliquot: {tmp_path}/file/machines: Not a directory [disk]\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="a full disk of its own needs root")
def test_full_disk_leaves_no_partial_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)], check=True)
    try:
        (tmp_path / "full").write_bytes(bytes(16384))
        monkeypatch.setenv("ALIQUOT_CACHE", str(tmp_path))
        with pytest.raises(OSError, match="No space left on device"):
            keep(read_cpu(), 1, 1, RATES)
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["full"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ConnectionRefusedError(111, "refused")])
def test_unrelated_errors_are_not_called_file_errors(error: OSError) -> None:
    with pytest.raises(type(error)), one_line_errors(debug=False):
        raise error


def test_ctrl_c_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, one_line_errors(debug=False):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130 and capsys.readouterr().err == "aliquot: stopped by SIGINT\n"


def test_training_ends_with_plan_beside_measurement(tmp_path: Path) -> None:
    output = trained(write_config(tmp_path, launch={"ranks": 2}), "observe.console=verbose")
    head = next(line.split() for line in output.splitlines() if line.startswith("phase "))
    assert head[:3] == ["phase", "planned", "peak"] and {"gradients", "moments", "shared"} <= set(head)
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert ledger["plan"]["engine"] == "host"
    planned = {row["phase"]: row["planned_bytes"] for row in ledger["rows"]}
    assert planned == ledger["plan"]["peak_bytes"]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["host", "fsdp"])
def test_memory_is_foreseen(tmp_path: Path, engine: str) -> None:
    """Of a model that takes as much as the process itself: 8 % of all is 16 % of what it adds."""
    file = write_config(tmp_path, launch={"ranks": 2}, shard={"engine": engine})
    model = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 16384}
    changes = [f"model.config.{key}={value}" for key, value in model.items()]
    changes += ["train.precision=bf16", "train.max_steps=3", "train.global_batch_size=4"]
    trained(file, *changes, cold=True)  # a warm process holds what the server has imported
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    measured = max(row["peak_bytes"] for row in ledger["rows"])
    assert max(ledger["plan"]["peak_bytes"].values()) == pytest.approx(measured, rel=0.08)


def test_train_refuses_a_run_that_cannot_fit(tmp_path: Path) -> None:
    """A hundred billion parameters fit no machine that runs tests. With --force it would start."""
    line = refused(
        write_config(tmp_path, launch={"ranks": 2}),
        "model.config.hidden_size=32768",
        "model.config.intermediate_size=131072",
        "model.config.num_hidden_layers=8",
    )
    assert "would not fit" in line and "--force" in line
    assert not (tmp_path / "run" / "ledger.json").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_planning_imports_no_distributed_engine() -> None:
    """A laptop plans: of engines only what says what they hold is loaded, and torch only for a model not known yet."""
    code = "import sys, aliquot.planner.planner; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = (
        "deepspeed",
        "datasets",
        "torch",
        "transformers",
        "numpy",
        "aliquot.data.batches",
        "aliquot.distributed.rendezvous",
        "aliquot.distributed.collectives.peers",
    )
    assert not [name for name in loaded if name.startswith(heavy)]
    of_engines = {name.rpartition(".")[2] for name in loaded if name.startswith("aliquot.engines.")}
    others = {name for name in of_engines if not name.endswith("_memory")}
    assert others == {"host", "fsdp", "deepspeed", "deepspeed_settings", "engine_plan", "select"}
