"""Several lines of one kind in a picture: of runs, of sources of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aliquot.observe.report.figure import Figure, Key, Table
from aliquot.observe.report.read_run import Points
from aliquot.observe.report.series import smoothed
from aliquot.observe.report.svg import Line, line_chart
from aliquot.observe.report.words import compact

_STYLES = ("", "dashed", "dotted")  # seven colours, then the same with another stroke
_COLOURS = 7


def labelled_lines(
    name: str, title: str, unit: str, labelled: Sequence[tuple[str, Points]], kind: str,
    format_y: Callable[[float], str], from_zero: bool, smooth: bool,
) -> Figure:  # fmt: skip
    """`kind`: what each line is of, for the head of the table."""
    drawn = [(i, label, points) for i, (label, points) in enumerate(labelled)]
    missing = [label for _, label, points in drawn if not points]
    drawn = [(i, label, points) for i, label, points in drawn if points]
    if not drawn:
        return Figure(name, title, "", missing=f"no {kind} has logged it")
    style = [_STYLES[i // _COLOURS % len(_STYLES)] for i, _, _ in drawn]
    lines = [
        Line(label, smoothed(points) if smooth else points, i % _COLOURS, f"{look} {'dots' if len(points) < 9 else ''}")
        for (i, label, points), look in zip(drawn, style, strict=True)
    ]
    says = "The last values: " + ", ".join(f"{label} {format_y(points[-1][1])}" for _, label, points in drawn) + "."
    says += f" Not logged by {', '.join(missing)}." if missing else ""
    rows = [
        [label, f"{points[0][0]:,.0f} to {points[-1][0]:,.0f}", format_y(points[0][1]), format_y(points[-1][1])]
        for _, label, points in drawn
    ]
    keys = [Key(label, i % _COLOURS, look or "line") for (i, label, _), look in zip(drawn, style, strict=True)]
    return Figure(
        name, title, says, line_chart(lines, format_y, format_x=compact, from_zero=from_zero), unit=unit, keys=keys,
        table=Table((kind, "from, to", "first", "last"), rows),
    )  # fmt: skip
