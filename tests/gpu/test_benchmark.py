"""benchmarks/gpu.py with a model of a few thousand weights on the CPU: every part, every contestant, every target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import targets

from tests.conftest import REPOSITORY


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
    assert len(told["rows"]) == 6 * 2 + 2 + 1
    assert all(row["tokens_per_s"] > 0 for row in told["rows"] if row["part"] == "speed")
    assert all(each["value"] is None for each in told["targets"]), "what a CPU does is no value of a GPU's target"


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
        {"part": "plan", "device": "cuda", "shape": "1b", "who": "aliquot", "memory_error": 0.04, "time_error": 0.2},
        {"part": "plan", "device": "cuda", "shape": "125m", "who": "aliquot", "note": "failed"},
    ]  # fmt: skip
    found = {each["name"]: (each["value"], each["met"]) for each in targets(rows)}
    assert found == {
        "gpu_mfu_1b": (0.71, False), "gpu_mfu_1b_four_rows": (0.7, False), "gpu_mfu_8b_width": (None, None),
        "gpu_speedup": (1.5, True),
        "gpu_packed_of_full": (0.96, True), "gpu_load_8b": (2.0, True), "gpu_fp8": (None, None),
        "gpu_memory_error": (0.04, True), "gpu_time_error": (0.2, False),
    }  # fmt: skip
