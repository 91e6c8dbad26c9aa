"""A table that is no wider than the terminal: rich would cut numbers, and a cut number is a wrong one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.console import Console
from rich.table import Table

_PIPE_COLUMNS = 200  # into a pipe every column is written out


def show_table(
    columns: Mapping[str, Sequence[str]],
    least: Sequence[str],
    left: Collection[str],
    title: str | None = None,
    console: Console | None = None,
) -> None:
    """`columns` by their heads, those of `left` flush left. Where they do not fit, those of `least` are left out, one
    after the other, and a line says so."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_COLUMNS, file=console.file)
    widths = {head: max(len(head), *map(len, cells), 0) + 1 for head, cells in columns.items()}
    dropped: list[str] = []
    for head in least:
        if sum(widths.values()) - sum(widths[each] for each in dropped) <= console.width:
            break
        dropped.append(head)
    shown = [head for head in columns if head not in dropped]
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for head in shown:
        table.add_column(head, no_wrap=True, justify="left" if head in left else "right")
    for row in zip(*(columns[head] for head in shown), strict=True):
        table.add_row(*row)
    console.print(table)
    if dropped:
        console.print(f"left out, for a terminal of {console.width} columns: {', '.join(dropped)}", soft_wrap=True)
