"""A figure of the report: its drawing, a description, a legend, and the numbers as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from aliquot.observe.number_format import compact
from aliquot.observe.report.read_run import Points
from aliquot.observe.report.series import smoothed
from aliquot.observe.report.svg import HEIGHT, WIDTH, Line, line_chart

_MAX_ROWS = 120
_STYLES = ("", "dashed", "dotted")  # for every seven lines another stroke
_COLOURS = 7


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def shown(self) -> Sequence[Sequence[str]]:
        """All rows, or at most `_MAX_ROWS` evenly spaced rows and the last one."""
        if len(self.rows) <= _MAX_ROWS:
            return self.rows
        step = len(self.rows) / _MAX_ROWS
        return [*(self.rows[int(i * step)] for i in range(_MAX_ROWS)), self.rows[-1]]


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    name: str
    colour: int
    style: str = "line"  # line, area, dots, dashed, dotted
    note: str = ""  # a number after the name


@dataclass(frozen=True)
class Figure:
    """A drawing with its words. Without `svg` there is nothing to draw, and `missing` is the reason."""

    name: str  # the anchor; unique in a page
    title: str
    says: str  # describes the drawing in one or two sentences, also for screen readers
    svg: Markup | None = None
    missing: str = ""
    unit: str = ""
    height: int = HEIGHT
    keys: Sequence[Key] = ()
    table: Table | None = None
    hints: Sequence[tuple[float, str]] = field(default=())  # x in user units, text to show there

    @property
    def hints_json(self) -> str:
        return json.dumps([[round(x / WIDTH, 4), text] for x, text in self.hints])


@dataclass(frozen=True)
class Axis:
    """The vertical axis of a figure."""

    unit: str
    format: Callable[[float], str]
    from_zero: bool = False


def labelled_lines(
    name: str, title: str, axis: Axis, labelled: Sequence[tuple[str, Points]], kind: str, smooth: bool
) -> Figure:
    """Draw several lines with labels; `kind` (run, source) names what a line belongs to in the table's head."""
    format_y = axis.format
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
        name, title, says, line_chart(lines, format_y, format_x=compact, from_zero=axis.from_zero), unit=axis.unit,
        keys=keys,
        table=Table((kind, "from, to", "first", "last"), rows),
    )  # fmt: skip
