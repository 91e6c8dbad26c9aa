"""Draw the figures of the report as SVG: lines and stacked bars, with a sentence, a legend, a table, and tooltips.

The page scales the user units of a figure to the width of the page. Text elements have a class, so that the style sheet
can enlarge text in small figures. Colours are classes `c0` to `c7`. Every name and text is escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from markupsafe import Markup, escape

from aliquot.core.number_format import compact
from aliquot.observe.report.read_run import Points, last

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
class Line:
    """A line of a figure: its points, and how to draw them."""

    name: str
    points: Points
    colour: int
    style: str = ""  # classes: dots, dashed, dotted, plan
    note: str = ""  # a number after the name in the legend
    smooth: bool = False  # if there are many points, draw moving means over a thin line of the points

    @property
    def is_smoothed(self) -> bool:
        return self.smooth and len(self.points) >= _MIN_SMOOTHED


@dataclass(frozen=True)
class Layer:
    """One layer of stacked bars, in one colour: a value for each bar."""

    name: str
    values: Sequence[float]
    colour: int
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure of lines over a number, or of stacked bars with lines.

    The figure is drawn if there are bars, or if a line has a point. Otherwise `missing` is shown in place of `says`,
    whose numbers then mean nothing.
    """

    name: str  # the HTML anchor, unique in the page
    title: str
    says: str  # describes the drawing in one or two sentences, also for screen readers
    missing: str  # why nothing is drawn
    unit: str
    scale: Format  # of numbers at the vertical axis
    text: Format  # of a value in the table and in tooltips
    lines: Sequence[Line] = ()
    bars: Sequence[str] = ()  # bar i covers x from i to i + 1; lines and marks use the same x
    layers: Sequence[Layer] = ()
    from_zero: bool = False
    log: bool = False  # logarithmic, unless a value is not positive
    levels: Mapping[str, float] = field(default_factory=dict)  # horizontal lines: a limit, a ceiling
    marks: Mapping[float, str] = field(default_factory=dict)  # vertical lines: x -> text
    x: str = "step"
    columns: Mapping[str, Mapping[float, str]] = field(default_factory=dict)  # further values by x: columns, tooltips
    other_table: Table | None = None  # in place of a table of the values; lines then have no tooltips

    @cached_property
    def drawn_lines(self) -> list[Line]:
        return [line for line in self.lines if line.points]

    @property
    def is_drawn(self) -> bool:
        return bool(self.bars or self.drawn_lines)

    @cached_property
    def is_turned(self) -> bool:
        """Whether the names of bars are so long that they are written at an angle."""
        return any(len(name) > _LONG_LABEL for name in self.bars)

    @property
    def height(self) -> int:
        return _HIGH if self.is_turned else _LOW

    @cached_property
    def cells(self) -> dict[str, Mapping[float, str]]:
        """The formatted values of each line or layer by x; the x of a bar is its index."""
        if self.bars:
            return {layer.name: dict(enumerate(map(self.text, layer.values))) for layer in self.layers}
        return {line.name: {x: self.text(y) for x, y in line.points} for line in self.drawn_lines} | dict(self.columns)

    @property
    def table(self) -> Table:
        steps = sorted({x for line in self.drawn_lines for x, _ in line.points})
        rows: dict[float, str] = dict(enumerate(self.bars)) if self.bars else {x: f"{x:,.0f}" for x in steps}
        cells = [[name, *(at.get(x, "") for at in self.cells.values())] for x, name in rows.items()]
        return self.other_table or Table((self.x, *self.cells), cells)

    @property
    def hints_json(self) -> str:
        """Tooltips: x as a fraction of the width, and text."""
        texts, frame = list(self.cells.items()), self._frame
        hints = [
            (i + 0.5, name, [f"{layer} {at[i]}" for layer, at in reversed(texts)]) for i, name in enumerate(self.bars)
        ]
        if self.other_table is None and not self.bars:
            hints = [
                (x, f"{x:,.0f}", [f"{name} {at[x]}" for name, at in texts if x in at])
                for x, _ in thinned(self.drawn_lines[0].points, _MAX_HINTS)
            ]
        return json.dumps(
            [[round(frame.x(x) / WIDTH, 4), "\n".join([f"{self.x} {name}", *more])] for x, name, more in hints]
        )

    @cached_property
    def svg(self) -> Markup:
        lines = "".join(self._frame.line(line) for line in self.drawn_lines)
        axis = _label(WIDTH - _RIGHT, self.height - 2, self.x, "end")
        parts = [self._x_labels(), axis, self._frame.crossing(self.marks, self.levels), lines]
        if self.bars:  # limits are above bars
            parts = [self._stack(), *reversed(parts)]
        return Markup("".join([self._frame.grid(self.scale), *parts]))

    @cached_property
    def _frame(self) -> _Frame:
        points = [point for line in self.drawn_lines for point in line.points]
        tops = [sum(layer.values[i] for layer in self.layers) for i in range(len(self.bars))]
        values = [*tops, *(y for _, y in points), *self.levels.values()]
        low, high = (0.0 if self.from_zero or self.bars else min(values)), max(values)
        margin, is_log = 0.06 * ((high - low) or abs(high) or 1.0), self.log and low > 0
        y = (low / 1.06, high * 1.06) if is_log else (low - margin if low else low, high + margin)
        x = (0.0, float(len(self.bars))) if self.bars else (min(points)[0], max(points)[0])
        return _Frame(x, y, self.height - (94 if self.is_turned else 40), is_log)

    def _x_labels(self) -> str:
        frame, every = self._frame, math.ceil(len(self.bars) / _MAX_LABELS)
        if self.is_turned:
            return "".join(frame.turned_label(i + 0.5, name) for i, name in enumerate(self.bars))
        labels = [(i + 0.5, name) for i, name in enumerate(self.bars) if i % every == every // 2]
        if not self.bars:
            labels = [(x, compact(x)) for x in ticks(frame.x0, frame.x1) if x == int(x)]
        return "".join(_label(frame.x(x), frame.floor + 24, text, "middle") for x, text in labels)

    def _stack(self) -> str:
        frame, parts = self._frame, []
        gap = 0.12 if len(self.bars) < 20 else 0.0
        bases = [0.0] * len(self.bars)
        for layer in self.layers:
            for i, value in enumerate(layer.values):
                left, right, top = frame.x(i + gap), frame.x(i + 1 - gap), frame.y(bases[i] + value)
                place = (
                    f'x="{left:.1f}" width="{right - left:.1f}" y="{top:.1f}" height="{frame.y(bases[i]) - top:.1f}"'
                )
                parts.append(f'<rect class="area c{layer.colour}" {place}/>' if value > 0 else "")
                bases[i] += value
        return "".join(parts)


class _Frame:
    """The plot area and its scales."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], floor: int, log: bool) -> None:
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

    def line(self, line: Line) -> str:
        colour, shown, parts = f"c{line.colour}", thinned(line.points, _MAX_POINTS), []
        if line.is_smoothed:
            parts.append(self._polyline(shown, f"{colour} faint"))
            shown = thinned(smoothed(line.points), _MAX_POINTS)
        if len(shown) > 1:
            parts.append(self._polyline(shown, f"{colour} {line.style}"))
        if "dots" in line.style or len(shown) == 1:
            parts += [
                f'<circle class="dot {colour}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4"/>' for x, y in shown
            ]
        return "".join(parts)

    def _polyline(self, points: Points, classes: str) -> str:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline class="line {classes}" points="{path}"/>'

    def turned_label(self, x: float, text: str) -> str:
        short = text if len(text) <= _MAX_LABEL else f"{text[:_MAX_LABEL]}…"
        turned = f"translate({self.x(x) + 4:.1f} {self.floor + 16}) rotate(-35)"
        return f'<text class="tick phase" text-anchor="end" transform="{turned}">{escape(short)}</text>'

    def crossing(self, marks: Mapping[float, str], levels: Mapping[str, float]) -> str:
        """Draw vertical marks and horizontal levels."""
        parts, right = [], WIDTH - _RIGHT
        for x, text in ((self.x(at), text) for at, text in marks.items() if self.x0 <= at <= self.x1):
            shift, anchor = (-8, "end") if x > WIDTH / 2 else (-3, "start")
            parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{self.floor}"/>')
            parts.append(_label(x + shift, 15, text, anchor, "note"))
        for text, y in ((text, self.y(value)) for text, value in levels.items()):
            parts.append(f'<line class="level" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_label(right - 4, y - 5, text, "end", "note"))
        return "".join(parts)


def labelled_lines(figure: Figure, labelled: Sequence[tuple[str, Points]], kind: str, smooth: bool = False) -> Figure:
    """Add lines with labels to a figure. `kind` says what the labels name (run, source), in the head of the table."""
    logged = [(label, points) for label, points in labelled if points]
    smooth = smooth and all(len(points) >= _MIN_SMOOTHED for _, points in logged)
    lines = [
        Line(
            label, smoothed(points) if smooth else points, i % _COLOURS,
            f"{_DASHES[i // _COLOURS % len(_DASHES)]} {'dots' if len(points) < 9 else ''}".strip(),
        )
        for i, (label, points) in enumerate(labelled)
    ]  # fmt: skip
    says = "The last values: " + ", ".join(f"{label} {figure.text(last(points))}" for label, points in logged) + "."
    if missing := [label for label, points in labelled if not points]:
        says += f" Not logged by {', '.join(missing)}."
    rows = [
        [label, f"{points[0][0]:,.0f} to {points[-1][0]:,.0f}", figure.text(points[0][1]), figure.text(last(points))]
        for label, points in logged
    ]
    table = Table((kind, "from, to", "first", "last"), rows)
    return replace(figure, says=says, missing=f"no {kind} has logged it", lines=lines, other_table=table)


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
    count = most // 2
    stretches = [points[len(points) * i // count : len(points) * (i + 1) // count] for i in range(count)]
    ends = [{min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])} for stretch in stretches]
    return [point for extremes in ends for point in sorted(extremes)]


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
