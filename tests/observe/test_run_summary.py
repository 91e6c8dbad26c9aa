"""The plan in three lines at the head of a run."""

from __future__ import annotations

from dataclasses import replace

from aliquot.observe.run_summary import foreseen
from aliquot.planner.plan import PhaseMemory, Plan


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
