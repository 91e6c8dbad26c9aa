"""Show a run to a person: a live view on a terminal, plain lines elsewhere, on rank 0 only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from aliquot.core.errors import printable
from aliquot.observe.live_view import LiveView
from aliquot.observe.number_format import duration, gib, rate

_MIN_SHOWN_BYTES = 10_000_000  # smaller traffic is not shown
_EVALUATING_INTERVAL_S = 20.0
_MIN_RATE_S = 1.0  # shorter work gives no useful rate
_FILE_COLUMNS = 200  # width of tables in files; rich would use the 80 columns of a terminal and truncate words


class Display:
    """Writes to the console. Call `finish` before other code writes to it, because the live view hides the cursor.

    Args:
        kind: auto is live on a terminal and plain elsewhere; quiet shows warnings only.
        enabled: False on ranks other than 0.
    """

    def __init__(
        self,
        kind: Literal["auto", "live", "plain", "quiet"],
        enabled: bool = True,
        console: Console | None = None,
        errors: Console | None = None,
    ) -> None:
        self._console = console or Console(quiet=not enabled)
        self._errors = errors or Console(stderr=True, quiet=not enabled)
        if not self._console.is_terminal:
            self._console.width = max(self._console.width, _FILE_COLUMNS)
        self._quiet = kind == "quiet"
        capable = self._console.is_terminal and not self._console.is_dumb_terminal
        self._is_live = kind in ("auto", "live") and capable and enabled
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._view = LiveView()
        self._live: Live | None = None
        self._shown: dict[str, int] = {}
        self._start_s: dict[str, float] = {}

    def line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Print a table."""
        if not self._quiet:
            self._console.print(renderable)

    def warning(self, text: str) -> None:
        # On the terminal of a live view the line goes through the view's console, because it would tear the view.
        where = self._console if self._live is not None and self._errors.is_terminal else self._errors
        where.print(f"warning: {printable(text)}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def start_training(self, limit_bytes: int | None, gpu_bytes: int | None = None) -> None:
        """Set the memory limits of a rank: of host memory, if known, and of its GPU."""
        self._view.limit_bytes, self._view.gpu_bytes = limit_bytes, gpu_bytes

    def tick(self, done: int, total: int, eta_s: float | None, saving: int | None, slow: Sequence[int]) -> None:
        """Show the end of a step.

        Args:
            saving: the step whose checkpoint is being saved.
            slow: the ranks that delay the others.
        """
        if self._is_live:
            self._view.saving, self._view.slow = saving, slow
            self._bar("training", done, total, eta_s)

    def saved(self, step: int, seconds: float, stall_s: float) -> None:
        """Show that a checkpoint is complete."""
        text = f"step {step} saved in {seconds:.1f} s, training stood still for {stall_s:.2f} s"
        self._view.saved, self._view.saving = text, None
        if not self._is_live:
            self.line(f"checkpoint: {text}")

    def step(self, metrics: Mapping[str, Any], total_steps: int) -> None:
        """Show a logged step: those of the `metrics` in metrics.jsonl that exist."""
        if not self._is_live:
            self.line("  ".join([f"step {metrics['step']}/{total_steps}", *_readings(metrics)]))
            return
        self._view.update(metrics)
        self._bar("training", metrics["step"], total_steps, metrics.get("eta_s"))

    def progress(self, description: str, done: int, total: int) -> None:
        """Show the progress and rate of work in bytes; plain output prints a line at each quarter."""
        start_s = self._start_s.setdefault(description, time.perf_counter())
        seconds = time.perf_counter() - start_s
        pace = f", {rate(done / seconds, 'B/s')}" if seconds > _MIN_RATE_S else ""
        if self._is_live:
            left_s = seconds / done * (total - done) if done and pace else None
            self._bar(description, done, total, left_s, pace)
            if done >= total:
                self._bars.remove_task(self._tasks.pop(description))
            return
        quarter = 4 * done // total if total else 4
        if quarter != self._shown.get(description, 0):
            self._shown[description] = quarter
            self.line(f"{description}: {25 * quarter} %{pace}")

    def evaluating(self, done: int, total: int, seconds: float) -> None:
        """Show the progress of an evaluation; plain output prints a line at intervals of a long evaluation."""
        left_s = seconds / done * (total - done) if done else None
        if self._is_live:
            if "training" in self._tasks:
                self._bars.update(self._tasks["training"], eta="")  # the ETA would stand still
            self._bar("evaluating", done, total, left_s)
            if done >= total:
                self._bars.remove_task(self._tasks.pop("evaluating"))
            return
        turn = int(seconds // _EVALUATING_INTERVAL_S)
        if turn > self._shown.get("evaluating", 0) and left_s is not None:
            self.line(f"evaluating: {done} of {total} micro-batches, ETA {duration(left_s)}")
        self._shown["evaluating"] = turn

    def finish(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _bar(self, description: str, done: int, total: int, eta_s: float | None = None, pace: str = "") -> None:
        if self._live is None:
            self._live = Live(Group(self._bars, self._view), console=self._console, refresh_per_second=4)
            self._live.start()
        if description not in self._tasks:
            self._tasks[description] = self._bars.add_task(description, eta="")
        eta = f"ETA {duration(eta_s)}{pace}" if eta_s is not None else ""
        self._bars.update(self._tasks[description], completed=done, total=total, eta=eta)


def _readings(metrics: Mapping[str, Any]) -> list[str]:
    """Format the known metrics among `metrics`: `loss 3.2100`, `MFU 45 %`, ..."""
    formats: dict[str, Callable[[Any], str | None]] = {
        "loss": lambda value: f"loss {value:.4f}",
        "learning_rate": lambda value: f"lr {value:.2e}",
        "grad_norm": lambda value: f"grad norm {value:.3f}",
        "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
        "flops_per_s": lambda value: rate(value, "FLOP/s"),
        "mfu": lambda value: f"MFU {100 * value:.0f} %",
        "memory_bytes": lambda value: f"memory {' | '.join(gib(size) for size in value)} a rank",
        "gpu_memory_bytes": lambda value: f"GPU memory {' | '.join(gib(size) for size in value)} a rank",
        "staged_bytes": lambda value: f"passed on {value / 1e9:.2f} GB" if value >= _MIN_SHOWN_BYTES else None,
        "interface_bytes": _interfaces,
        "eta_s": lambda value: f"ETA {duration(value)}",
    }
    shown = (show(metrics[name]) for name, show in formats.items() if metrics.get(name) is not None)
    return [text for text in shown if text is not None]


def _interfaces(moved: Mapping[str, Mapping[str, int]]) -> str | None:
    """Format the bytes sent since the start by the two busiest interfaces: `eth0 sent 1.20 GB`."""
    sent = sorted(((counts["sent"], name) for name, counts in moved.items()), reverse=True)
    return (
        "  ".join(f"{name} sent {count / 1e9:.2f} GB" for count, name in sent[:2] if count >= _MIN_SHOWN_BYTES) or None
    )
