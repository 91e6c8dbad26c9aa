"""The plan in three lines at the head of a run, and the result at its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aliquot.observe.report import run_facts
from aliquot.observe.report.read_run import read_run
from aliquot.observe.run_directory import RunDirectory
from aliquot.observe.run_summary import Outcome, foreseen, summary
from aliquot.observe.throughput import Speed
from aliquot.planner.plan import PhaseMemory, Plan
from tests.observe.report.directories import MACHINE, start, step, whole_run


def plan(usd_per_hour: float | None) -> Plan:
    phases = (
        PhaseMemory("process start", {"process": 1 << 28}, {}),
        PhaseMemory("steady peak", {"process": 1 << 28, "weights": 1 << 28}, {"weights": 1 << 30}),
    )
    return Plan(
        "llama", 8_000_000, "host", "bf16", "cpu", 1, 2, 1, None, phases, 0, 8 << 30, 0, 1_500_000, 1, 96_000_000, 160,
        2000.0, 0.5, "compute-bound", "measured here", usd_per_hour,
    )  # fmt: skip


def test_memory_time_and_traffic() -> None:
    assert foreseen(plan(None).as_json()) == (
        "plan: 1.00 GiB of 4.00 GiB a rank at most (steady peak)",
        "plan: 0.5 s a step, 4,000 real tokens/s, compute-bound; 1 min 20 s in all; rates: measured here",
        "plan: 0 B a step between hosts, 1.5 MB through sockets on them; 96 MB a checkpoint",
    )


def test_summary_shows_known_cost() -> None:
    assert "1 min 20 s in all, 1.00 USD;" in foreseen(plan(45.0).as_json())[1]


def test_an_estimate_is_a_band() -> None:
    """A number of tokens/s alone is one that was planned by what was measured."""
    assert replace(plan(None), off_by=2.5).speed == "1,600 to 10,000 real tokens/s (estimate: 4,000)"
    assert "1,600 to 10,000" in foreseen(replace(plan(None), off_by=2.5).as_json())[1]


def lines(directory: Path, exported: bool = True, is_chat: bool = False, speed: float = 4000.0) -> dict[str, str]:
    outcome = Outcome([], Speed(speed, 0.0, None), None, directory / "export" if exported else None, is_chat)
    now = 1_700_000_150.0
    return dict(summary(read_run(directory), RunDirectory(directory), outcome, now))


def test_a_run_ends_with_its_result(tmp_path: Path) -> None:
    evaluations = [{"step": 0, "eval_loss": 9.0}, {"step": 100, "eval_loss": 1.6, "eval_perplexity": 4.95}]
    steps = [evaluations[0], *(step(number, epoch=0.03 * number) for number in range(1, 101)), evaluations[1]]
    directory = whole_run(tmp_path / "run", steps=steps)
    assert lines(directory) == {
        "finished": "step 100 of 100, epoch 3, in 1 min 50 s",  # without the pause before the resume
        "training loss": "8.5714 (step 1) -> 1.5000 (step 100)",
        "evaluation loss": "9.0000 (step 0) -> 1.6000 (step 100), perplexity 4.95",
        "tokens": "100,000 at 4,000 tokens/s",
        "peak memory": "1.56 GiB a rank, planned 1.45 GiB",
        "report": f"{directory}/report.html",
        "model": f"{directory}/export",
        "next": f"aliquot generate --prompt TEXT {directory}/export",
    }
    assert lines(directory, is_chat=True)["next"] == f"aliquot chat {directory}/export"


def test_without_an_export_the_checkpoint_is_named(tmp_path: Path) -> None:
    told = lines(whole_run(tmp_path / "run"), exported=False)
    assert "model" not in told and "next" not in told  # nor is a checkpoint left


CALIBRATE = "calibrate the idle machine (`aliquot plan --calibrate`)"


@pytest.mark.parametrize(
    ("speed", "device", "expected"),
    [
        (4800.0, "cpu", None),  # within the band
        (2980.0, "cpu", f"planned 5,425 tokens/s, measured 2,980: {CALIBRATE}"),
        (9750.0, "cpu", f"planned 5,425 tokens/s, measured 9,750: {CALIBRATE}"),
        (
            650.0,
            "cpu",
            "planned 5,425 tokens/s, measured 650: look for other processes on these cores (top) and a"
            " CPU quota (aliquot doctor)",
        ),
        (2980.0, "cuda", "planned 5,425 tokens/s, measured 2,980"),
        (float("nan"), "cpu", None),  # no step was measured
    ],
)
def test_a_speed_outside_the_band_of_the_plan(speed: float, device: str, expected: str | None) -> None:
    planned = {"tokens_per_s": 5425.0, "off_by": 1.15, "device": device}
    assert run_facts.speed_beside_plan(planned, speed) == expected


@pytest.mark.parametrize(("instance", "price"), [("c7i.2xlarge", True), (None, False), ("x9.huge", False)])
def test_the_cost_is_that_of_a_known_instance(tmp_path: Path, instance: str | None, price: bool) -> None:
    events: list[dict[str, Any]] = [start(machine={**MACHINE, "instance": instance}, nodes=2)]
    told = lines(whole_run(tmp_path / "run", events=events)).get("cost", "")
    assert told.endswith(" USD, 2 x c7i.2xlarge on demand (us-east-1, 2026-07-20)") == price and bool(told) == price
