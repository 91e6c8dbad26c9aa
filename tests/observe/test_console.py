"""Plain output has no control characters; a terminal gets a live view; quiet and other ranks say nothing.

The plan in three lines at the head of a run, and the result at its end.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from aliquot.observe.console import Display, LiveView
from aliquot.observe.report import run_facts
from aliquot.observe.report.read_run import read_run
from aliquot.observe.run_directory import RunDirectory
from aliquot.observe.run_summary import foreseen, summary
from aliquot.planner.plan import PhaseMemory, Plan
from tests.observe.report.directories import MACHINE, start, step, whole_run

METRICS = {
    "step": 3,
    "epoch": 0.75,
    "loss": 2.5,
    "evaluation": "evaluation books: loss 2.7500",
    "learning_rate": 3e-4,
    "grad_norm": 1.0,
    "tokens_per_s": 12345.6,
    "flops_per_s": 1.2e12,
    "mfu": 0.45,
    "eta_s": 65.0,
    "memory_bytes": [2**30, 2**31],
}


Kind = Literal["auto", "live", "plain", "verbose", "quiet"]


def shown(kind: Kind, terminal: bool) -> tuple[str, str]:
    """What a short run writes to the console and to stderr."""
    out, err = (
        Console(file=io.StringIO(), force_terminal=terminal, width=200, _environ={"TERM": "xterm"}) for _ in range(2)
    )
    display = Display(kind, console=out, errors=err)
    display.line("[a] header " + "that is long " * 20)
    for done in range(9):
        display.progress("reading", done, 8)
    display.step(METRICS, 10)
    display.line("half way")
    display.warning("careful")
    display.notify("aliquot: SIGINT: the run saves and stops")
    display.step({"step": 4, "mfu": None}, 10)
    display.finish()
    texts: list[Any] = [console.file for console in (out, err)]
    return texts[0].getvalue(), texts[1].getvalue()


LINE = (
    "step 3/10  epoch 0.75  loss 2.5000  learning rate 3.00e-04  12,346 tokens/s  ETA 1 min 05 s"
    "  memory 2.00 GiB a rank"
)
DETAILS = "  gradient norm 1.000  1.2 TFLOP/s  MFU 45 %  memory of each rank 1.00 GiB | 2.00 GiB"


@pytest.mark.parametrize("kind", ["auto", "plain", "live", "verbose"])
def test_plain_lines(kind: Kind) -> None:
    out, err = shown(kind, terminal=False)
    assert all(character.isprintable() or character == "\n" for character in out + err)
    assert out.splitlines() == [
        "[a] header " + "that is long " * 20,
        "reading: 25 %",
        "reading: 50 %",
        "reading: 75 %",
        "reading: 100 %",
        LINE + (DETAILS if kind == "verbose" else ""),
        "half way",
        "step 4/10",
    ]
    assert err == "warning: careful\n"


def test_only_long_evaluations_show_progress() -> None:
    out = Console(file=io.StringIO(), width=200)
    display = Display("plain", console=out)
    for done in range(5):
        display.evaluating(done, 4, seconds=done)
    assert out.file.getvalue() == ""  # type: ignore[attr-defined]
    for done in range(5):
        display.evaluating(done, 4, seconds=done * 15.0)
    told = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert told == ["evaluating: 2 of 4 micro-batches, ETA 30 s", "evaluating: 3 of 4 micro-batches, ETA 15 s",
                    "evaluating: 4 of 4 micro-batches, ETA 0 s"]  # fmt: skip


def test_while_a_run_is_evaluated_no_estimate_stands_still() -> None:
    out = Console(file=io.StringIO(), force_terminal=True, width=200, _environ={"TERM": "xterm"})
    display = Display("live", console=out)
    display.step(METRICS, 10)
    display.evaluating(0, 4, seconds=0)
    display.evaluating(2, 4, seconds=30)
    assert [task.fields["eta"] for task in display._bars.tasks] == ["", "ETA 30 s"]
    display.finish()


def test_lines_of_memory_break_between_ranks() -> None:
    view = LiveView()
    view.limit_bytes, view.saved = 2**33, "step 3 saved"
    view.update({"memory_bytes": [2**29] * 3})
    out = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "xterm"}, color_system=None)
    out.print(view)
    lines = [line.strip() for line in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines[0].endswith("1: █░░░░░░░░░ 0.50 GiB") and lines[1] == "2: █░░░░░░░░░ 0.50 GiB  of 8.00 GiB each"


@pytest.mark.parametrize("kind", ["auto", "live", "verbose"])
def test_live_on_a_terminal(kind: Kind) -> None:
    out, _ = shown(kind, terminal=True)
    assert "\x1b[" in out and "2.5000" in out and "12,346 tokens/s" in out and "half way" in out
    assert (
        "0.75  learning rate 3.00e-04" in out
        and "books: loss 2.7500" in out
        and ("MFU 45 %" in out) == (kind == "verbose")
    )
    # The last drawing, which would have erased a line beside the view, shows the signal; then the cursor is back.
    assert "SIGINT: the run saves" in out.rpartition("training")[2] and out.rstrip("\n\r").endswith("\x1b[?25h")


def test_plain_on_a_terminal_stays_plain() -> None:
    assert "\x1b[2K" not in shown("plain", terminal=True)[0]


def test_a_gpu_run_shows_the_memory_of_the_gpus() -> None:
    out = Console(file=io.StringIO(), width=200)
    Display("plain", console=out).step({"step": 1, "memory_bytes": [2**30], "gpu_memory_bytes": [2**32]}, 2)
    assert out.file.getvalue() == "step 1/2  memory 4.00 GiB a rank\n"  # type: ignore[attr-defined]


def test_a_verbose_line_shows_traffic_if_any() -> None:
    moved = {name: {"received": 0, "sent": sent} for name, sent in (("lo", 2 * 10**9), ("eth0", 10**7), ("a", 5))}
    console = Console(file=io.StringIO(), width=200)
    display = Display("verbose", console=console)
    display.step({"step": 1, "staged_bytes": 3_456_000_000, "interface_bytes": moved}, 2)
    display.step({"step": 2, "staged_bytes": 0, "interface_bytes": {}}, 2)
    text: Any = console.file
    assert text.getvalue() == "step 1/2  shared memory 3.46 GB  lo sent 2.00 GB  eth0 sent 0.01 GB\nstep 2/2\n"


def test_quiet_says_only_warnings() -> None:
    assert shown("quiet", terminal=False) == ("", "warning: careful\n")
    assert shown("quiet", terminal=True)[0] == ""


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display("verbose", enabled=False)
    display.line("x")
    display.detail("x")
    display.step(METRICS, 10)
    display.progress("reading", 1, 1)
    display.warning("x")
    display.finish()
    assert capsys.readouterr() == ("", "")


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
    export = directory / "export" if exported else None
    return dict(summary(read_run(directory), RunDirectory(directory), speed, export, is_chat, now=1_700_000_150.0))


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
