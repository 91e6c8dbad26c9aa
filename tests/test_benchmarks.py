"""Every benchmark runs: `--smoke` takes its real code path in seconds; no number is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multinode.namespaces import why_not

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PROGRAMS = [file for file in sorted(BENCHMARKS.glob("*.py")) if "smoke.parse(" in file.read_text()]
NEED_NAMESPACES = {"hosts", "reduce_dtype"}


@pytest.mark.long
@pytest.mark.timeout(1200)  # DeepSpeed compiles its optimizer when it first runs on a machine
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda file: file.stem)
def test_smoke(program: Path, tmp_path: Path) -> None:
    if program.stem in NEED_NAMESPACES and (reason := why_not()) is not None:
        pytest.skip(reason)
    written = tmp_path / "written.json"
    command = [sys.executable, str(program), "--smoke", "--json", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads(written.read_text())
    assert result["machine"] and result["rows"]
