"""The live view of a training run on a terminal, which rich redraws a few times per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from aliquot.observe.number_format import gib, rate
from aliquot.observe.step_clock import PARTS

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKS = 40
_BAR = 10
_SHOWN_RANKS = 8
_LABEL = len("GPU memory") + 2  # width of the first column and its separator


class LiveView:
    """Rows of the newest metrics; a row without a value is not shown."""

    def __init__(self) -> None:
        self.metrics: Mapping[str, Any] = {}
        self.losses: list[float] = []
        self.limit_bytes: int | None = None  # host memory available to one rank
        self.gpu_bytes: int | None = None
        self.saving: int | None = None
        self.saved: str | None = None
        self.slow: Sequence[int] = ()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Set the metrics of a logged step."""
        self.metrics = metrics
        if metrics.get("loss") is not None:
            self.losses.append(metrics["loss"])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, row in self._rows(options.ascii_only, options.max_width - _LABEL):
            grid.add_row(label, row)
        yield grid

    def _rows(self, plain: bool, width: int) -> list[tuple[str, Text]]:
        metrics, rows = self.metrics, []
        if self.losses:
            line = Text(f"{self.losses[-1]:.4f}", style="bold")
            if len(self.losses) > 1 and not plain:
                line.append("  ").append(sparkline(self.losses, _SPARKS), style="cyan")
                line.append(f"  from {self.losses[0]:.4f}", style="dim")
            rows.append(("loss", line))
        if metrics.get("tokens_per_s") is not None:
            speed = [f"{metrics['tokens_per_s']:,.0f} real tokens/s", rate(metrics.get("flops_per_s") or 0.0, "FLOP/s")]
            if metrics.get("mfu") is not None:
                speed.append(f"MFU {100 * metrics['mfu']:.0f} %")
            rows.append(("speed", Text("  ".join(speed))))
        if metrics.get("forward_s") is not None:
            rows.append(("time", Text(_shares(metrics))))
        if metrics.get("learning_rate") is not None and metrics.get("grad_norm") is not None:
            rows.append(("step", Text(f"lr {metrics['learning_rate']:.2e}  grad norm {metrics['grad_norm']:.3f}")))
        if metrics.get("memory_bytes"):
            rows.append(("memory", _memory(metrics["memory_bytes"], self.limit_bytes, plain, width)))
        if metrics.get("gpu_memory_bytes"):
            rows.append(("GPU memory", _memory(metrics["gpu_memory_bytes"], self.gpu_bytes, plain, width)))
        if self.saving is not None:
            rows.append(("checkpoint", Text(f"saving step {self.saving} ...", style="cyan")))
        elif self.saved is not None:
            rows.append(("checkpoint", Text(self.saved)))
        if self.slow:
            ranks = ", ".join(str(rank) for rank in self.slow)
            rows.append(("warning", Text(f"rank {ranks} is slow, the others wait for it", style="bold yellow")))
        return rows


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw one character for the mean of each of at most `width` equal stretches of `values`."""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def _memory(sizes: Sequence[int], limit_bytes: int | None, plain: bool, width: int) -> Text:
    """Draw a bar per rank relative to its limit; lines break between ranks."""
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
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + 2 + len(piece) <= width:
            lines[-1].append("  ").append_text(piece)
        else:
            lines.append(piece)
    return Text("\n").join(lines)


def _shares(metrics: Mapping[str, Any]) -> str:
    """Format the parts that take at least 1 % of a step, largest first: `backward 52 %  forward 31 %  ...`"""
    spent = {part: metrics.get(f"{part}_s") or 0.0 for part in PARTS}
    total = sum(spent.values())
    shares = sorted(((100 * seconds / total, part) for part, seconds in spent.items()), reverse=True) if total else []
    return "  ".join(f"{part} {share:.0f} %" for share, part in shares if share >= 1)
