"""Show the progress of a run on the console of rank 0: a live view on a terminal, otherwise plain lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from aliquot.core.errors import printable
from aliquot.core.number_format import duration, gib, rate
from aliquot.observe.step_clock import PARTS

_MIN_SHOWN_BYTES = 10_000_000  # smaller traffic is not shown
_EVALUATING_INTERVAL_S = 20.0
_MIN_RATE_S = 1.0  # shorter work gives no useful rate
_FILE_COLUMNS = 200  # width of tables in files; rich would use the 80 columns of a terminal and truncate words
_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKS = 40
_BAR = 10
_SHOWN_RANKS = 8


class Display:
    """Writes to the console. Other code may write to the console only after `finish`, which ends the live view.

    Kind auto is live on a terminal and otherwise plain; verbose is auto with all details; quiet shows warnings only.
    Only rank 0 is `enabled`.
    """

    def __init__(
        self,
        kind: Literal["auto", "live", "plain", "verbose", "quiet"],
        enabled: bool = True,
        console: Console | None = None,
        errors: Console | None = None,
    ) -> None:
        self._console = console or Console(quiet=not enabled)
        self._errors = errors or Console(stderr=True, quiet=not enabled)
        if not self._console.is_terminal:
            self._console.width = max(self._console.width, _FILE_COLUMNS)
        self._quiet, self._verbose = kind == "quiet", kind == "verbose"
        self._is_live = (
            kind in ("auto", "live", "verbose")
            and enabled
            and self._console.is_terminal
            and not self._console.is_dumb_terminal
        )
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._view = LiveView(self._verbose)
        self._live: Live | None = None
        self._shown: dict[str, int] = {}
        self._start_s: dict[str, float] = {}

    def line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def detail(self, renderable: RenderableType) -> None:
        """Print a text or a table if the console is verbose."""
        if self._verbose:
            self._console.print(renderable, markup=False, highlight=False)

    def warning(self, text: str) -> None:
        # If a live view uses the terminal, print through the console of the view. Other output would break the view.
        where = self._console if self._live is not None and self._errors.is_terminal else self._errors
        where.print(f"warning: {printable(text)}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def notify(self, text: str) -> None:
        """Show a line soon, from any thread: in the live view, which is drawn four times a second, or on stderr."""
        self._view.notice = text.removeprefix("aliquot: ")
        if self._live is None or not self._errors.is_terminal:  # the view would overwrite a line on its terminal
            os.write(2, f"{text}\n".encode())  # the main thread may hold the lock of sys.stderr

    def start_training(self, limit_bytes: int | None, gpu_bytes: int | None = None) -> None:
        """Set the memory limits of a rank to show: of host memory, if known, and of the GPU."""
        self._view.limit_bytes, self._view.gpu_bytes = limit_bytes, gpu_bytes

    def tick(self, done: int, total: int, eta_s: float | None, saving: int | None, slow: Sequence[int]) -> None:
        """Update the live view at the end of a step.

        Args:
            saving: step whose checkpoint is being saved.
            slow: ranks for which other ranks wait.
        """
        if self._is_live:
            self._view.saving, self._view.slow = saving, slow
            self._bar("training", done, total, eta_s)

    def saved(self, step: int, seconds: float, stall_s: float) -> None:
        """Show that a checkpoint is complete."""
        text = f"step {step} saved in {seconds:.1f} s, training waited {stall_s:.2f} s"
        self._view.saved, self._view.saving = text, None
        if not self._is_live:
            self.line(f"checkpoint: {text}")

    def step(self, metrics: Mapping[str, Any], total_steps: int) -> None:
        """Show the known values among the `metrics` of a logged step."""
        if not self._is_live:
            names = _LINE + _DETAILS if self._verbose else _LINE
            ranks_bytes = metrics.get("gpu_memory_bytes") or metrics.get("memory_bytes")
            texts = _texts({**metrics, "ranks_bytes": ranks_bytes}, names)
            self.line("  ".join([f"step {metrics['step']}/{total_steps}", *texts]))
            return
        self._view.update(metrics)
        self._bar("training", metrics["step"], total_steps, metrics.get("eta_s"))

    def progress(self, description: str, done: int, total: int) -> None:
        """Show the progress and rate of work that is measured in bytes. Plain output prints a line at each quarter."""
        start_s = self._start_s.setdefault(description, time.perf_counter())
        seconds = time.perf_counter() - start_s
        pace = f", {rate(done / seconds, 'B/s')}" if seconds > _MIN_RATE_S else ""
        if self._is_live:
            left_s = seconds / done * (total - done) if done and pace else None
            self._bar(description, done, total, left_s, pace)
            return
        quarter = 4 * done // total if total else 4
        if quarter != self._shown.get(description, 0):
            self._shown[description] = quarter
            self.line(f"{description}: {25 * quarter} %{pace}")

    def evaluating(self, done: int, total: int, seconds: float, what: str = "evaluating") -> None:
        """Show the progress of an evaluation, named `what`. Plain output prints a line every 20 seconds."""
        left_s = seconds / done * (total - done) if done else None
        if self._is_live:
            if "training" in self._tasks:
                self._bars.update(self._tasks["training"], eta="")  # hide the ETA, which does not change
            self._bar(what, done, total, left_s)
            return
        turn = int(seconds // _EVALUATING_INTERVAL_S)
        if turn > self._shown.get(what, 0) and left_s is not None:
            self.line(f"{what}: {done} of {total} micro-batches, ETA {duration(left_s)}")
        self._shown[what] = turn

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
        if done >= total and description != "training":
            self._bars.remove_task(self._tasks.pop(description))


def _texts(metrics: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Format the known metrics among `names`: `epoch 0.5`, `loss 3.2100`, ..."""
    shown = (_FORMATS[name](metrics[name]) for name in names if metrics.get(name) is not None)
    return [text for text in shown if text]


def _interfaces(moved: Mapping[str, Mapping[str, int]]) -> str:
    """Format the bytes sent since the start by the two busiest interfaces: `eth0 sent 1.20 GB`."""
    sent = sorted(((counts["sent"], name) for name, counts in moved.items()), reverse=True)[:2]
    return "  ".join(f"{name} sent {count / 1e9:.2f} GB" for count, name in sent if count >= _MIN_SHOWN_BYTES)


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "epoch": "epoch {:.3g}".format,
    "loss": "loss {:.4f}".format,
    "evaluation": str,
    "caller": lambda values: "  ".join(f"{name} {value:.4g}" for name, value in values.items()),
    "rewards/accuracies": "accuracy {:.2f}".format,
    "rewards/margins": "margin {:.3f}".format,
    "learning_rate": "learning rate {:.2e}".format,
    "tokens_per_s": "{:,.0f} tokens/s".format,
    "eta_s": lambda value: f"ETA {duration(value)}",
    "ranks_bytes": lambda value: f"memory {gib(max(value))} a rank",
    "grad_norm": "gradient norm {:.3f}".format,
    "flops_per_s": lambda value: rate(value, "FLOP/s"),
    "mfu": lambda value: f"MFU {100 * value:.0f} %",
    "memory_bytes": lambda value: f"memory of each rank {' | '.join(map(gib, value))}",
    "gpu_memory_bytes": lambda value: f"GPU memory of each rank {' | '.join(map(gib, value))}",
    "staged_bytes": lambda value: f"shared memory {value / 1e9:.2f} GB" if value >= _MIN_SHOWN_BYTES else "",
    "interface_bytes": _interfaces,
}
_LINE = (
    "epoch",
    "loss",
    "caller",
    "rewards/accuracies",
    "rewards/margins",
    "learning_rate",
    "tokens_per_s",
    "eta_s",
    "ranks_bytes",
)
_DETAILS = ("grad_norm", "flops_per_s", "mfu", "memory_bytes", "gpu_memory_bytes", "staged_bytes", "interface_bytes")
# Rows of the live view. A text that begins with the label of its row is shown without the label.
_ROWS = {
    "rewards": ("rewards/accuracies", "rewards/margins"),
    "yours": ("caller",),
    "evaluation": ("evaluation",),
    "epoch": ("epoch", "learning_rate"),
    "speed": ("tokens_per_s",),
}
_DETAILED_ROWS = {"gradient": ("grad_norm",), "compute": ("flops_per_s", "mfu")}


class LiveView:
    """The rows below the progress bars: newest metrics, memory, checkpoint. Rows without a value are not shown."""

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self.metrics: Mapping[str, Any] = {}
        self.losses: list[float] = []
        self.limit_bytes: int | None = None  # host memory available to one rank
        self.gpu_bytes: int | None = None
        self.saving: int | None = None
        self.saved: str | None = None
        self.slow: Sequence[int] = ()
        self.notice: str | None = None

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Set the metrics to show to those of a logged step."""
        self.metrics = metrics
        if metrics.get("loss") is not None:
            self.losses.append(metrics["loss"])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, row in self._rows(options.ascii_only):
            grid.add_row(label, row)
        yield grid

    def _rows(self, plain: bool) -> list[tuple[str, RenderableType]]:
        metrics = self.metrics
        rows: list[tuple[str, RenderableType]] = []
        if self.losses:
            line = Text(f"{self.losses[-1]:.4f}", style="bold")
            if len(self.losses) > 1 and not plain:
                line.append("  ").append(sparkline(self.losses, _SPARKS), style="cyan")
                line.append(f"  from {self.losses[0]:.4f}", style="dim")
            rows.append(("loss", line))
        details = _DETAILED_ROWS if self._verbose else {}
        texts = {label: "  ".join(_texts(metrics, names)) for label, names in {**_ROWS, **details}.items()}
        if self._verbose:
            texts["time"] = _parts(metrics)
        rows += [(label, Text(text.removeprefix(f"{label} "))) for label, text in texts.items() if text]
        for label, name, limit in (
            ("memory", "memory_bytes", self.limit_bytes),
            ("GPU memory", "gpu_memory_bytes", self.gpu_bytes),
        ):
            if metrics.get(name):
                rows.append((label, _memory(metrics[name], limit, plain)))
        saving = self.saving is not None
        slow = f"rank {', '.join(map(str, self.slow))} is slow, the others wait for it" if self.slow else None
        states = (
            ("checkpoint", f"saving step {self.saving} ..." if saving else self.saved, "cyan" if saving else ""),
            ("stopping", self.notice, "bold yellow"),
            ("warning", slow, "bold yellow"),
        )
        return rows + [(label, Text(text, style)) for label, text, style in states if text is not None]


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as at most `width` block characters; each shows the mean of an interval of `values`."""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def _memory(sizes: Sequence[int], limit_bytes: int | None, plain: bool) -> Columns:
    """Draw a bar for the memory of each rank relative to the limit. Lines break between ranks."""
    pieces = []
    for rank, size in enumerate(sizes[:_SHOWN_RANKS]):
        piece = Text().append(f"{rank}: ", style="dim")
        if limit_bytes:
            share = size / limit_bytes
            filled = min(_BAR, round(_BAR * share))
            style = "green" if share < 0.8 else "yellow" if share < 0.95 else "bold red"
            full, empty = ("#", ".") if plain else ("█", "░")
            piece.append(full * filled + empty * (_BAR - filled), style=style).append(" ")
        pieces.append(piece.append(gib(size)))
    if len(sizes) > _SHOWN_RANKS:
        pieces.append(Text(f"... the largest of {len(sizes)} ranks {gib(max(sizes))}"))
    if limit_bytes:
        pieces.append(Text(f"of {gib(limit_bytes)} each", style="dim"))
    return Columns(pieces, padding=(0, 2))


def _parts(metrics: Mapping[str, Any]) -> str:
    """Format the parts that take at least 1 % of a step, largest first."""
    spent = {part: metrics.get(f"{part}_s") or 0.0 for part in PARTS}
    total = sum(spent.values()) or 1.0
    shares = sorted(((100 * seconds / total, part) for part, seconds in spent.items()), reverse=True)
    return "  ".join(f"{part} {share:.0f} %" for share, part in shares if share >= 1)
