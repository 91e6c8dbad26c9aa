"""Every benchmark runs: `--smoke` takes its real code path in seconds; no number is asserted.

A contestant of a benchmark that dies is a finding: row and target name its rank, its end and its last words.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import page
from benchmarks.breakdown import PACKED_LONG, Shapes, beside_products, marks
from benchmarks.step import ALONE, row, targets_of
from benchmarks.worlds import run_world

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


RANK = """
import os, sys, time
if os.environ["RANK"] == "0":
    print("warming up", flush=True)
    time.sleep(60)
print("{told}", "terminate called without an active exception", sep="\\n", flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "how"), [("os.abort()", "was killed by SIGABRT"), ("sys.exit(7)", "ended with exit code 7")]
)
def test_a_rank_that_dies_is_in_row_and_target(tmp_path: Path, end: str, how: str) -> None:
    script = tmp_path / "contestant.py"
    script.write_text(RANK.format(end=end, told="ValueError: no such shape"))
    dead = row("125m", ALONE, [run_world(str(script), 2)])
    assert dead["note"] == f"rank 1 {how}: ValueError: no such shape"
    targets = targets_of("125m", {ALONE: dead, "host": {"tokens_per_s": 100.0}})
    found = next(target for target in targets if target["name"] == "of_ceiling_125m")
    assert found["value"] is None and found["why"] == f"{ALONE}: {dead['note']}"


def test_a_rank_that_does_not_end_is_named(tmp_path: Path) -> None:
    script = tmp_path / "contestant.py"
    script.write_text("import time; time.sleep(60)")
    assert run_world(str(script), 1, timeout_s=0.2) == [{"failed": "rank 0 did not end within 0.2 s: without a word"}]


def test_the_breakdown_marks_what_the_engine_has() -> None:
    assert [f"{owner}.{method}" for owner, method, _ in marks() if not callable(getattr(owner, method, None))] == []


def test_the_breakdown_tells_products_apart() -> None:
    shapes = Shapes(tokens=2048, hidden=768, mlp=2048, vocabulary=32000)
    for of_weight in ((32000, 2048, 768), (32000, 1792, 768), (768, 1792, 512)):  # some columns at a time
        assert shapes.part(of_weight, True) == "head, gradient of weight"
    assert shapes.part((1792, 32000, 768), True) == "head, gradient of hidden"
    assert shapes.part((1792, 768, 32000), True) == shapes.part((2048, 768, 4096), True) == "head, logits"
    assert shapes.part((2048, 768, 2048), False) == "mlp"
    assert shapes.part((2048, 768, 768), False) == "projections"


def test_what_a_step_does_beside_products() -> None:
    parts = [("whole step", 120.0), ("the same, not profiled", 100.0), ("mlp, forward", 60.0), ("head, logits", 20.0)]
    rows = [{"part": part, "ms": ms} for part, ms in [*parts, ("rest", 40.0)]]
    assert beside_products(rows) == 20e6 / PACKED_LONG.tokens
    assert beside_products([{"part": "not measured"}]) is None


def test_the_page_is_that_of_the_result_files() -> None:
    assert page.PAGE.read_text() == page.page(), "run `python -m benchmarks.page`"


def test_the_page_takes_the_newest_file_of_each_benchmark_and_hardware(tmp_path: Path) -> None:
    for name in ("step-2026-11-20-zen4", "step-2026-11-24-zen4", "step-2026-11-21-amx", "step-2026-11-22-amx-500m"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": []}))
    newest = [(result.hardware, result.part, result.date) for result in page.newest(tmp_path)]
    assert newest == [("amx", "", "2026-11-21"), ("amx", "500m", "2026-11-22"), ("zen4", "", "2026-11-24")]
    (tmp_path / "stepping.json").write_text("{}")
    with pytest.raises(SystemExit, match="expected BENCHMARK-DATE-HARDWARE"):
        page.newest(tmp_path)


def test_a_comparison_takes_rows_of_one_file_that_differ_in_the_tool() -> None:
    rows = [
        {"who": "aliquot", "s": 2.0, "model": "1b"},
        {"who": "aliquot", "s": 5.0, "model": "8b"},
        {"who": "peer", "s": 3.0, "model": "1b"},
        {"who": "third", "note": "died", "model": "1b"},
    ]
    comparison = page.Comparison(
        "load", "{model}", {"s": "seconds"}, {"who": "aliquot"}, ("peer", "third"), same=("model",)
    )
    results = [page.Result("load", "2026-11-20", "zen4", "", {"rows": rows})]
    results.append(page.Result("load", "2026-11-20", "zen5", "", {"rows": rows[:1]}))
    assert list(page.compared(comparison, results)) == [
        ["1b: seconds", "zen4", "2", "peer", "3", "1.5", "[load.py](#loading)"]
    ]
