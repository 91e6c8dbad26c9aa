"""Draw the figures of the report as SVG: lines and stacked bars, with a sentence, a legend, a table, and tooltips.

The page scales the user units of a figure to the width of the page. Text elements have a class, so that the style sheet
can enlarge text in small figures. Colours are classes `c0` to `c7`. Every name and text is escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from markupsafe import Markup, escape

from aliquot.core.number_format import compact
from aliquot.observe.report.read_run import Points

WIDTH, _LOW, _HIGH = 600, 276, 350
_LEFT, _RIGHT, _TOP = 64, 14, 34
_MAX_POINTS, _MAX_HINTS, _MAX_ROWS = 400, 200, 120
_MAX_LABELS, _LONG_LABEL, _MAX_LABEL = 7, 8, 28  # number of bar labels; characters of a label
_MIN_SMOOTHED = 60  # lines with fewer points are not smoothed
_DASHES = ("", "dashed", "dotted")  # after every seven lines, the stroke changes
_COLOURS = 7

Format = Callable[[float], str]


@dataclass(frozen=True)
class Table:
    """The numbers of a figure as a table."""

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
    """A drawing with title, description, legend and table. If `svg` is None, `missing` says why nothing is drawn."""

    name: str  # the HTML anchor, unique in the page
    title: str
    says: str  # describes the drawing in one or two sentences, also for screen readers
    svg: Markup | None = None
    missing: str = ""
    unit: str = ""
    height: int = _LOW
    keys: Sequence[Key] = ()
    table: Table | None = None
    hints: Sequence[tuple[float, str]] = ()  # tooltips: x in user units, text

    @property
    def hints_json(self) -> str:
        return json.dumps([[round(x / WIDTH, 4), text] for x, text in self.hints])


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x`, with a text."""

    x: float
    text: str


@dataclass(frozen=True)
class Axis:
    """The vertical axis of a figure, and the horizontal and vertical lines across the figure."""

    unit: str
    scale: Format
    text: Format  # format of a value in the table and in tooltips
    from_zero: bool = False
    levels: Mapping[str, float] | None = None  # horizontal lines: a limit, a ceiling
    marks: Sequence[Mark] = ()
    x: str = "step"
    log: bool = False  # logarithmic, unless a value is not positive


@dataclass(frozen=True)
class Line:
    """A line of a figure: its points, and how to draw them."""

    name: str
    points: Points
    colour: int
    style: str = ""  # classes: dots, dashed, dotted, plan
    note: str = ""
    smooth: bool = False  # if there are many points, draw moving means over a thin line of the points

    @property
    def is_smoothed(self) -> bool:
        return self.smooth and len(self.points) >= _MIN_SMOOTHED

    @property
    def key(self) -> Key:
        name = f"{self.name}, smoothed (thin: as logged)" if self.is_smoothed else self.name
        return Key(name, self.colour, self.style.split()[0] if self.style else "line", self.note)


@dataclass(frozen=True)
class Layer:
    """One layer of stacked bars, in one colour: a value for each bar."""

    name: str
    values: Sequence[float]
    colour: int
    note: str = ""


class _Frame:
    """The plot area and its scales."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], floor: int = _LOW - 40, log: bool = False
    ) -> None:
        self.x0, self.x1 = x if x[1] > x[0] else (x[0] - (abs(x[0]) or 1.0), x[0] + (abs(x[0]) or 1.0))
        self.y0, self.y1 = y if y[1] > y[0] else (y[0], y[0] + (abs(y[0]) or 1.0))
        self.floor, self.log = floor, log

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high, at = (math.log(y) if self.log else y for y in (self.y0, self.y1, value))
        return self.floor - (at - low) / (high - low) * (self.floor - _TOP)

    def grid(self, scale: Format) -> str:
        return "".join(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}"/>'
            + _label(_LEFT - 8, self.y(value) + 4, scale(value), "end")
            for value in (log_ticks if self.log else ticks)(self.y0, self.y1)
        )

    def polyline(self, points: Points, classes: str) -> str:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline class="line {classes}" points="{path}"/>'

    def crossing(self, axis: Axis) -> str:
        """Draw the vertical marks and horizontal levels of an axis."""
        parts, right = [], WIDTH - _RIGHT
        for mark in axis.marks:
            if not self.x0 <= mark.x <= self.x1:
                continue
            x = self.x(mark.x)
            shift, anchor = (-8, "end") if x > WIDTH / 2 else (-3, "start")
            parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{self.floor}"/>')
            parts.append(_label(x + shift, 15, mark.text, anchor, "note"))
        for name, value in (axis.levels or {}).items():
            y = self.y(value)
            parts.append(f'<line class="level" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_label(right - 4, y - 5, name, "end", "note"))
        return "".join(parts)


def line_figure(
    figure: Figure, axis: Axis, lines: Sequence[Line], columns: Mapping[str, Mapping[float, str]] | None = None
) -> Figure:
    """Add a drawing of lines to a figure that has only texts so far. At least one line must have a point.

    Args:
        columns: further values by x, as columns of the table and lines of the tooltips.
    """
    lines = [line for line in lines if line.points]
    points = [point for line in lines for point in line.points]
    values = [y for _, y in points] + list((axis.levels or {}).values())
    low, high = (0.0 if axis.from_zero else min(values)), max(values)
    is_log = axis.log and low > 0
    margin = 0.06 * ((high - low) or abs(high) or 1.0)
    y = (low / 1.06, high * 1.06) if is_log else (low if axis.from_zero else low - margin, high + margin)
    frame = _Frame((min(points)[0], max(points)[0]), y, log=is_log)
    whole = [x for x in ticks(frame.x0, frame.x1) if x == int(x)]
    parts = [frame.grid(axis.scale), *(_label(frame.x(x), frame.floor + 24, compact(x), "middle") for x in whole)]
    parts.append(frame.crossing(axis))
    for line in lines:
        colour, shown = f"c{line.colour}", thinned(line.points, _MAX_POINTS)
        if line.is_smoothed:
            parts.append(frame.polyline(shown, f"{colour} faint"))
            shown = thinned(smoothed(line.points), _MAX_POINTS)
        if len(shown) > 1:
            parts.append(frame.polyline(shown, f"{colour} {line.style}"))
        if "dots" in line.style or len(shown) == 1:
            parts += [
                f'<circle class="dot {colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4"/>' for x, y in shown
            ]
    texts = {line.name: {x: axis.text(y) for x, y in line.points} for line in lines} | dict(columns or {})
    rows = [[f"{x:,.0f}", *(at.get(x, "") for at in texts.values())] for x in sorted({x for x, _ in points})]
    hints = [
        (frame.x(x), "\n".join([f"{axis.x} {x:,.0f}", *(f"{name} {at[x]}" for name, at in texts.items() if x in at)]))
        for x, _ in thinned(lines[0].points, _MAX_HINTS)
    ]
    return replace(
        figure, svg=Markup("".join(parts)), unit=axis.unit, keys=[line.key for line in lines],
        table=Table((axis.x, *texts), rows), hints=hints,
    )  # fmt: skip


def labelled_lines(
    figure: Figure, axis: Axis, labelled: Sequence[tuple[str, Points]], kind: str, smooth: bool = False
) -> Figure:
    """Draw several lines with labels. `kind` says what the labels name (run, source), in the head of the table."""
    missing = [label for label, points in labelled if not points]
    if len(missing) == len(labelled):
        return replace(figure, missing=f"no {kind} has logged it")
    smooth = smooth and all(len(points) >= _MIN_SMOOTHED for _, points in labelled if points)
    lines = []
    for i, (label, points) in enumerate(labelled):
        style = f"{_DASHES[i // _COLOURS % len(_DASHES)]} {'dots' if len(points) < 9 else ''}".strip()
        lines.append(Line(label, smoothed(points) if smooth else points, i % _COLOURS, style))
    logged = [(label, points) for label, points in labelled if points]
    says = "The last values: " + ", ".join(f"{label} {axis.text(points[-1][1])}" for label, points in logged) + "."
    says += f" Not logged by {', '.join(missing)}." if missing else ""
    rows = [
        [label, f"{points[0][0]:,.0f} to {points[-1][0]:,.0f}", axis.text(points[0][1]), axis.text(points[-1][1])]
        for label, points in logged
    ]
    drawn = line_figure(replace(figure, says=says), axis, lines)
    return replace(drawn, table=Table((kind, "from, to", "first", "last"), rows), hints=())


def stack_figure(
    figure: Figure, axis: Axis, bars: Sequence[str], layers: Sequence[Layer], lines: Sequence[Line] = ()
) -> Figure:
    """Add a drawing of stacked bars, one for each name in `bars`, to a figure that has only texts so far.

    Bar i covers x from i to i + 1; `lines` and marks use the same x.
    """
    tops = [sum(layer.values[i] for layer in layers) for i in range(len(bars))]
    high = max([*tops, *(axis.levels or {}).values(), *(y for line in lines for _, y in line.points)])
    is_turned = max(map(len, bars)) > _LONG_LABEL
    height, bottom = (_HIGH, 94) if is_turned else (_LOW, 40)
    frame = _Frame((0, len(bars)), (0.0, high * 1.06 or 1.0), height - bottom)
    parts = [frame.grid(axis.scale)]
    gap = 0.12 if len(bars) < 20 else 0.0
    bases = [0.0] * len(bars)
    for layer in layers:
        for i, value in enumerate(layer.values):
            left, right, top = frame.x(i + gap), frame.x(i + 1 - gap), frame.y(bases[i] + value)
            place = f'x="{left:.1f}" width="{right - left:.1f}" y="{top:.1f}" height="{frame.y(bases[i]) - top:.1f}"'
            parts.append(f'<rect class="area c{layer.colour}" {place}/>' if value > 0 else "")
            bases[i] += value
    parts += [frame.polyline(line.points, f"c{line.colour} {line.style}") for line in lines]
    parts.append(frame.crossing(axis))
    every = 1 if is_turned else math.ceil(len(bars) / _MAX_LABELS)
    for i, name in enumerate(bars):
        if is_turned:
            short = name if len(name) <= _MAX_LABEL else f"{name[:_MAX_LABEL]}…"
            turned = f"translate({frame.x(i + 0.5) + 4:.1f} {frame.floor + 16}) rotate(-35)"
            parts.append(f'<text class="tick phase" text-anchor="end" transform="{turned}">{escape(short)}</text>')
        elif i % every == every // 2:
            parts.append(_label(frame.x(i + 0.5), frame.floor + 24, name, "middle"))
    texts = [(layer.name, [axis.text(value) for value in layer.values]) for layer in layers]
    hints = [
        (frame.x(i + 0.5), "\n".join([f"{axis.x} {bar}", *(f"{name} {cells[i]}" for name, cells in reversed(texts))]))
        for i, bar in enumerate(bars)
    ]
    keys = [Key(layer.name, layer.colour, "area", layer.note) for layer in layers] + [line.key for line in lines]
    rows = [[bar, *(cells[i] for _, cells in texts)] for i, bar in enumerate(bars)]
    return replace(
        figure, svg=Markup("".join(parts)), unit=axis.unit, height=height, hints=hints,
        keys=keys if len(keys) > 1 else (), table=Table((axis.x, *(name for name, _ in texts)), rows),
    )  # fmt: skip


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers (1, 2, 5 x 10^n apart) inside [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return numbers 1, 2, 5 x 10^n or only 10^n inside [low, high]; less than a decade has evenly spaced ticks."""
    decades = math.log10(high) - math.log10(low)
    if decades < 1:
        return ticks(low, high)
    exponents = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1, math.ceil(decades / 8))
    numbers = [factor * 10.0**n for n in exponents for factor in ((1, 2, 5) if decades < 3 else (1,))]
    return [value for value in numbers if low <= value <= high]


def thinned(points: Sequence[tuple[float, float]], most: int) -> Points:
    """Select at most `most` points: the lowest and the highest point of each interval, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    selected: Points = []
    stretches = most // 2
    for i in range(stretches):
        stretch = points[len(points) * i // stretches : len(points) * (i + 1) // stretches]
        selected += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return selected


def smoothed(points: Points) -> Points:
    """Return moving means over a window of a thirtieth of all points, which shrinks at both ends."""
    reach = max(1, len(points) // 60)
    sums = [0.0, *accumulate(value for _, value in points)]
    means = []
    for i, (step, _) in enumerate(points):
        near = min(reach, i, len(points) - 1 - i)  # symmetric, so that smoothing does not shift a slope
        means.append((step, (sums[i + near + 1] - sums[i - near]) / (2 * near + 1)))
    return means


def _label(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
