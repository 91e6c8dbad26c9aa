"""benchmarks/gpu.py and gpu_all.py with a tiny model on the CPU: every part, every contestant, every target."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from benchmarks import gpu_all
from benchmarks.gpu import targets
from benchmarks.gpu_all import Part, environment, main, parts, run

from tests.conftest import REPOSITORY
from tests.runs import wait_until


@pytest.mark.long
def test_every_part_runs_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    file = tmp_path / "gpu.json"
    for part in (["speed", "--documents", "packed", "short"], ["load"], ["plan"]):
        command = [sys.executable, "benchmarks/gpu.py", *part, "--device", "cpu", "--shape", "tiny", "--steps", "2"]
        done = subprocess.run(
            [*command, "--json", str(file)], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())
    assert [row for row in told["rows"] if row.get("note")] == []
    assert len(told["rows"]) == 8 * 2 + 2 + 1
    assert all(row["tokens_per_s"] > 0 for row in told["rows"] if row["part"] == "speed")
    assert all(each["value"] is None for each in told["targets"]), "what a CPU does is no value of a GPU's target"


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_all_parts_run_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_all.py", "--device", "cpu", "--shape", "tiny", "--seconds", "1400"]
    command += ["--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    states = json.loads((tmp_path / "parts.json").read_text())
    assert done.returncode == 0 and list(states) == [part.name for part in parts("cpu", "tiny", tmp_path)], done.stderr
    optional = {"aliquot, FA3", "aliquot, FA4", "aliquot, fp8, width of 8 B"}
    assert {name for name, state in states.items() if not state.startswith("done")} <= optional
    assert json.loads((tmp_path / "cpu-parts.json").read_text())["rows"]
    rows = [
        row for name in ("gpu", "gpu-allocator") for row in json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    ]
    assert {row["part"] for row in rows} == {"speed", "load", "plan"} and not any(row.get("note") for row in rows)


def test_a_part_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess; print('begun'); subprocess.run(['sleep', '987'])"
    state = run(Part("slow", ("-c", code)), environment("cpu", Part("slow", ())), tmp_path / "log.txt", 1.0)
    assert re.fullmatch(r"killed after \d s: begun", state)
    # The kernel may end a killed grandchild after its parent.
    wait_until(lambda: all(process.info["cmdline"] != ["sleep", "987"] for process in psutil.process_iter(["cmdline"])))


def test_parts_are_skipped_if_too_little_time_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["gpu_all.py", "--seconds", "50", "--first", "CPU step", "--directory", str(tmp_path)]
    )
    monkeypatch.setattr(gpu_all, "run", lambda part, *_: f"done: {part.name}")
    monkeypatch.setattr(gpu_all, "read_cpu", lambda: SimpleNamespace(isa=("amx_bf16",)))
    main()
    states = json.loads((tmp_path / "parts.json").read_text())
    assert states["CPU parts"] == "done: CPU parts" and "aliquot" not in states
    assert states["CPU step"] == "skipped: it takes about 90 s, and 50 s are left"


def test_missing_packages_are_named_before_the_first_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def installed(name: str) -> str:
        if name in ("pydantic", "hypothesis"):
            raise PackageNotFoundError(name)
        return "2.13"

    monkeypatch.setattr(gpu_all, "version", installed)
    monkeypatch.setattr(sys, "argv", ["gpu_all.py"])
    with pytest.raises(SystemExit):
        main()
    assert re.search(r"pip install pydantic==[\d.]+ hypothesis==[\d.]+\n$", capsys.readouterr().err)


def test_engines_of_several_gpus_are_measured_first(tmp_path: Path) -> None:
    names = [part.name for part in parts("cuda", "1b", tmp_path)]
    assert names[:4] == ["tests", "tests that run alone", "aliquot, sharded", "engine host"]


def test_targets_are_ratios_of_the_rows_that_they_name() -> None:
    def speed(documents: str, who: str, rate: float | None, **more: Any) -> dict[str, Any]:
        row = {"part": "speed", "device": "cuda", "shape": "1b", "rows": 1, "documents": documents, "who": who}
        return row | {"tokens_per_s": rate, "mfu": 0.71} | more

    rows = [
        speed("packed", "aliquot", 90.0),
        speed("short", "aliquot", 120.0),
        speed("packed", "FSDP2 + flex_attention", 60.0),
        speed("packed", "aliquot", None, rows=4, mfu=0.7),
        speed("full", "aliquot", 100.0, of_attention=0.2),
        *({"part": "load", "device": "cuda", "shape": "8b", "who": who, "seconds": s} for who, s in (
            ("transformers", 9.0), ("aliquot", 4.5))),
        speed("packed", "aliquot", 20.0, shape="8b-width", mfu=0.75),
        speed("packed", "aliquot, fp8", 24.0, shape="8b-width"),
        speed("packed", "aliquot, engine host", 10.0, shape="8b-width", rows=4),
        speed("packed", "aliquot, copied layers", 9.5, shape="8b-width", rows=4),
        {"part": "plan", "device": "cuda", "shape": "1b", "who": "aliquot", "memory_error": 0.04, "time_error": 0.2},
        {"part": "plan", "device": "cuda", "shape": "125m", "who": "aliquot", "note": "failed"},
    ]  # fmt: skip
    found = {each["name"]: (each["value"], each["met"]) for each in targets(rows)}
    assert found == {
        "gpu_mfu_1b": (0.71, False), "gpu_mfu_1b_four_rows": (0.7, False), "gpu_mfu_8b_width": (0.75, False),
        "gpu_speedup": (1.5, True),
        "gpu_packed_of_full": (0.96, True), "gpu_load_8b": (2.0, True), "gpu_fp8": (1.2, False),
        "gpu_copied_layers": (0.95, True),
        "gpu_memory_error": (0.04, True), "gpu_time_error": (0.2, False),
    }  # fmt: skip
