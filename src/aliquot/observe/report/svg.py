"""Draw SVG: axes, lines, stacked areas and bars, in user units that the page scales to its width.

Text has a class, so that the page's style can enlarge it in small figures. Colours are classes `c0` to `c7`. Every name
and text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 600, 276
PHASES_HEIGHT = 350  # an area chart over phases needs room for their names
_LEFT, _RIGHT, _TOP = 64, 14, 34
_MAX_POINTS = 400
_ROW = 54  # height of a bar with its name

Points = Sequence[tuple[float, float]]
Layer = tuple[str, Sequence[float], int]  # name, a value for each x, colour
Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    name: str
    points: Points
    colour: int
    style: str = ""  # extra classes: faint, dots, dashed


@dataclass(frozen=True)
class Level:
    """A horizontal line: a limit, a ceiling, a plan."""

    name: str
    value: float
    style: str = "limit"


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x`."""

    x: float
    text: str


@dataclass(frozen=True)
class Overlay:
    """Lines on top of stacked areas."""

    lines: Sequence[Line] = ()
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()


class Frame:
    """The plot area and its scales."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], bottom: int = 40, height: int = HEIGHT) -> None:
        self.x0, self.x1 = x if x[1] > x[0] else (x[0] - (abs(x[0]) or 1.0), x[0] + (abs(x[0]) or 1.0))
        self.y0, self.y1 = y if y[1] > y[0] else (y[0], y[0] + (abs(y[0]) or 1.0))
        self.floor = height - bottom

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return self.floor - (value - self.y0) / (self.y1 - self.y0) * (self.floor - _TOP)

    def path(self, points: Points) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def grid(self, format_y: Format) -> str:
        parts = []
        for value in ticks(self.y0, self.y1):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_label(_LEFT - 8, y + 4, format_y(value), "end"))
        return "".join(parts)

    def steps(self, format_x: Format) -> str:
        whole = [value for value in ticks(self.x0, self.x1) if value == int(value)]
        return "".join(_label(self.x(value), self.floor + 24, format_x(value), "middle") for value in whole)


def line_chart(
    lines: Sequence[Line],
    format_y: Format,
    *,
    format_x: Format,
    from_zero: bool = False,
    levels: Sequence[Level] = (),
    marks: Sequence[Mark] = (),
) -> Markup:
    """Draw lines with at least one point among them; return the content of an <svg>."""
    points = [point for line in lines for point in line.points]
    values = [y for _, y in points] + [level.value for level in levels]
    low, high = (0.0 if from_zero else min(values)), max(values)
    frame = Frame((min(x for x, _ in points), max(x for x, _ in points)), _axis_range(low, high, from_zero))
    parts = [frame.grid(format_y), frame.steps(format_x), _marks(frame, marks), _levels(frame, levels)]
    for line in lines:
        selected = thinned(line.points, _MAX_POINTS)
        if len(selected) > 1:
            parts.append(_polyline(frame, line, selected))
        if "dots" in line.style or len(selected) == 1:
            places = [(frame.x(x), frame.y(y)) for x, y in selected]
            parts += [f'<circle class="dot c{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in places]
    return Markup("".join(parts))


def area_chart(
    xs: Sequence[float],
    layers: Sequence[Layer],
    format_y: Format,
    *,
    format_x: Format | None = None,
    names: Sequence[str] = (),
    overlay: Overlay = Overlay(),
) -> Markup:
    """Draw layers on top of each other; `names` label the xs instead of a scale."""
    levels, lines = overlay.levels, overlay.lines
    tops = [sum(values[i] for _, values, _ in layers) for i in range(len(xs))]
    high = max([*tops, *(level.value for level in levels), *(y for line in lines for _, y in line.points)])
    frame = Frame((xs[0], xs[-1]), (0.0, high * 1.06 or 1.0), *((94, PHASES_HEIGHT) if names else ()))
    parts = [frame.grid(format_y)]
    base = [0.0] * len(xs)
    for _, values, colour in layers:
        top = [below + value for below, value in zip(base, values, strict=True)]
        if len(xs) == 1:  # a single x is drawn as a bar
            x, y = frame.x(xs[0]) - 60, frame.y(top[0])
            height = frame.y(base[0]) - y
            parts.append(f'<rect class="area c{colour}" x="{x:.1f}" width="120" y="{y:.1f}" height="{height:.1f}"/>')
        elif any(values):
            outline = [*zip(xs, top, strict=True), *list(zip(xs, base, strict=True))[::-1]]
            parts.append(f'<polygon class="area c{colour}" points="{frame.path(outline)}"/>')
        base = top
    parts += [_polyline(frame, line, line.points) for line in lines]
    parts += [_marks(frame, overlay.marks), _levels(frame, levels)]
    for x, name in zip(xs, names, strict=False):
        turned = f"translate({frame.x(x) + 4:.1f} {frame.floor + 16}) rotate(-35)"
        parts.append(f'<text class="tick phase" text-anchor="end" transform="{turned}">{escape(name)}</text>')
    if format_x is not None:
        parts.append(frame.steps(format_x))
    return Markup("".join(parts))


def bars(
    rows: Sequence[tuple[str, Sequence[tuple[float, int]]]], format_x: Format, levels: Sequence[Level] = ()
) -> Markup:
    """Draw a horizontal bar per row, made of (value, colour) pieces, with its name above and its sum at its end."""
    longest = max([sum(value for value, _ in pieces) for _, pieces in rows] + [level.value for level in levels]) or 1.0
    scale = (WIDTH - 110) / longest
    height = bars_height(len(rows))
    parts = []
    for i, (name, pieces) in enumerate(rows):
        y = 22 + i * _ROW
        parts.append(_label(2, y - 5, name, "start", "name"))
        x = 2.0
        for value, colour in pieces:
            width = value * scale
            if value > 0:
                parts.append(
                    f'<rect class="area c{colour}" x="{x:.1f}" y="{y}" width="{max(1.0, width):.1f}" height="22"/>'
                )
            x += width
        parts.append(_label(x + 8, y + 16, format_x(sum(value for value, _ in pieces)), "start"))
    for level in levels:
        x = 2 + level.value * scale
        parts.append(f'<line class="level {level.style}" x1="{x:.1f}" x2="{x:.1f}" y1="6" y2="{height - 4}"/>')
        parts.append(_label(x - 5, 12, level.name, "end", "note"))
    return Markup("".join(parts))


def bars_height(rows: int) -> int:
    return 6 + rows * _ROW


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers (1, 2, 5 x 10^n apart) inside [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def thinned(points: Points, most: int) -> list[tuple[float, float]]:
    """Select at most `most` points: the lowest and highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    selected = []
    stretches = most // 2
    for i in range(stretches):
        stretch = points[len(points) * i // stretches : len(points) * (i + 1) // stretches]
        selected += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return selected


def _axis_range(low: float, high: float, from_zero: bool) -> tuple[float, float]:
    """Return the range of an axis, with margins."""
    span = (high - low) or abs(high) or 1.0
    return (0.0 if from_zero else low - 0.06 * span), high + 0.06 * span


def _polyline(frame: Frame, line: Line, points: Points) -> str:
    return f'<polyline class="line c{line.colour} {line.style}" points="{frame.path(points)}"/>'


def _levels(frame: Frame, levels: Sequence[Level]) -> str:
    parts = []
    right = WIDTH - _RIGHT
    for level in levels:
        y = frame.y(level.value)
        parts.append(f'<line class="level {level.style}" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_label(right - 4, y - 5, level.name, "end", "note"))
    return "".join(parts)


def _marks(frame: Frame, marks: Sequence[Mark]) -> str:
    parts = []
    for mark in marks:
        x = frame.x(mark.x)
        if not _LEFT <= x <= WIDTH - _RIGHT:
            continue
        shift, anchor = (-8, "end") if x > WIDTH / 2 else (-3, "start")
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{frame.floor}"/>')
        parts.append(_label(x + shift, 15, mark.text, anchor, "note"))
    return "".join(parts)


def _label(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
