"""Plain output has no control characters; a terminal gets a live view; quiet and other ranks say nothing."""

from __future__ import annotations

import io
from typing import Any, Literal

import pytest
from rich.console import Console

from aliquot.observe.console import Display, LiveView

METRICS = {
    "step": 3,
    "epoch": 0.75,
    "loss": 2.5,
    "eval_loss": 2.75,
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
    shown = [task.fields["eta"] for task in display._bars.tasks]
    display.finish()
    assert shown == ["", "ETA 30 s"]


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
    assert "0.75  learning rate 3.00e-04" in out and "loss 2.7500" in out and ("MFU 45 %" in out) == (kind == "verbose")
    assert out.rstrip("\n\r").endswith("\x1b[?25h")  # the cursor is back


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
