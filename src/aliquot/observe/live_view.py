"""The live view of a training run on a terminal: what changes while a person watches."""

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
_LABEL = len("GPU memory") + 2  # of the first column at most, and what parts it from the next


class LiveView:
    """Rows that appear as soon as there is something to show in them. Redrawn by rich; set and forget."""

    def __init__(self) -> None:
        self.metrics: Mapping[str, Any] = {}
        self.losses: list[float] = []
        self.limit_bytes: int | None = None  # what one rank may have of the machine's memory
        self.gpu_bytes: int | None = None
        self.saving: int | None = None
        self.saved: str | None = None
        self.slow: Sequence[int] = ()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """A logged step."""
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
        told, rows = self.metrics, []
        if self.losses:
            line = Text(f"{self.losses[-1]:.4f}", style="bold")
            if len(self.losses) > 1 and not plain:
                line.append("  ").append(sparkline(self.losses, _SPARKS), style="cyan")
                line.append(f"  from {self.losses[0]:.4f}", style="dim")
            rows.append(("loss", line))
        if told.get("tokens_per_s") is not None:
            speed = [f"{told['tokens_per_s']:,.0f} real tokens/s", rate(told.get("flops_per_s") or 0.0, "FLOP/s")]
            if told.get("mfu") is not None:
                speed.append(f"MFU {100 * told['mfu']:.0f} %")
            rows.append(("speed", Text("  ".join(speed))))
        if told.get("forward_s") is not None:
            rows.append(("time", Text(_shares(told))))
        if told.get("learning_rate") is not None and told.get("grad_norm") is not None:
            rows.append(("step", Text(f"lr {told['learning_rate']:.2e}  grad norm {told['grad_norm']:.3f}")))
        if told.get("memory_bytes"):
            rows.append(("memory", _memory(told["memory_bytes"], self.limit_bytes, plain, width)))
        if told.get("gpu_memory_bytes"):
            rows.append(("GPU memory", _memory(told["gpu_memory_bytes"], self.gpu_bytes, plain, width)))
        if self.saving is not None:
            rows.append(("checkpoint", Text(f"saving step {self.saving} ...", style="cyan")))
        elif self.saved is not None:
            rows.append(("checkpoint", Text(self.saved)))
        if self.slow:
            ranks = ", ".join(str(rank) for rank in self.slow)
            rows.append(("warning", Text(f"rank {ranks} is slow, the others wait for it", style="bold yellow")))
        return rows


def sparkline(values: Sequence[float], width: int) -> str:
    """One character for each of at most `width` equal stretches of `values`, by the mean of each."""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def _memory(sizes: Sequence[int], limit_bytes: int | None, plain: bool, width: int) -> Text:
    """A bar a rank against what it may have; lines break between ranks."""
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
    """`forward 31 %  backward 52 %  ...`: the parts of a step that take 1 % of it or more, the largest first."""
    spent = {part: metrics.get(f"{part}_s") or 0.0 for part in PARTS}
    total = sum(spent.values())
    shares = sorted(((100 * seconds / total, part) for part, seconds in spent.items()), reverse=True) if total else []
    return "  ".join(f"{part} {share:.0f} %" for share, part in shares if share >= 1)
