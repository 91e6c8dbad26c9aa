"""Hand-written SVG: axes, lines and stacked areas, in user units that the page scales to its width.

Text is given by class, so that the page's style can enlarge it where the picture is small. Colours are classes `c0` to
`c7`. Everything that is not a number is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 600, 276
PHASES_HEIGHT = 350  # of an area chart over named phases, whose names need room
_LEFT, _RIGHT, _TOP = 64, 14, 34
_MOST_POINTS = 400
_ROW = 54  # of a bar with its name

Points = Sequence[tuple[float, float]]
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

    def grid(self, format_y: Format) -> Markup:
        parts = []
        for value in ticks(self.y0, self.y1):
            parts.append(
                Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                    _LEFT, WIDTH - _RIGHT, self.y(value), self.y(value)
                )
            )
            parts.append(_label(_LEFT - 8, self.y(value) + 4, format_y(value), "end"))
        return Markup("").join(parts)

    def steps(self, format_x: Format) -> Markup:
        parts = [
            _label(self.x(value), self.floor + 24, format_x(value), "middle")
            for value in ticks(self.x0, self.x1)
            if value == int(value)
        ]
        return Markup("").join(parts)


def line_chart(
    lines: Sequence[Line],
    format_y: Format,
    *,
    format_x: Format,
    from_zero: bool = False,
    levels: Sequence[Level] = (),
    marks: Sequence[Mark] = (),
) -> Markup:
    """What goes into an <svg>; `lines` with at least one point among them."""
    points = [point for line in lines for point in line.points]
    values = [y for _, y in points] + [level.value for level in levels]
    low, high = (0.0 if from_zero else min(values)), max(values)
    frame = Frame((min(x for x, _ in points), max(x for x, _ in points)), _room(low, high, from_zero))
    parts = [frame.grid(format_y), frame.steps(format_x), _marks(frame, marks), _levels(frame, levels)]
    for line in lines:
        kept = thinned(line.points, _MOST_POINTS)
        if len(kept) > 1:
            path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in kept)
            parts.append(Markup('<polyline class="line c{} {}" points="{}"/>').format(line.colour, line.style, path))
        if "dots" in line.style or len(kept) == 1:
            parts += [
                Markup('<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="4"/>').format(
                    line.colour, frame.x(x), frame.y(y)
                )
                for x, y in kept
            ]
    return Markup("").join(parts)


def area_chart(
    xs: Sequence[float],
    layers: Sequence[tuple[str, Sequence[float], int]],
    format_y: Format,
    *,
    format_x: Format | None = None,
    names: Sequence[str] = (),
    levels: Sequence[Level] = (),
    lines: Sequence[Line] = (),
    marks: Sequence[Mark] = (),
) -> Markup:
    """Layers (name, a value for each x, colour) on top of each other; `names`: words for the xs, instead of a scale."""
    tops = [sum(values[i] for _, values, _ in layers) for i in range(len(xs))]
    high = max([*tops, *(level.value for level in levels), *(y for line in lines for _, y in line.points)])
    frame = Frame((xs[0], xs[-1]), (0.0, high * 1.06 or 1.0), *((94, PHASES_HEIGHT) if names else ()))
    parts = [frame.grid(format_y)]
    base = [0.0] * len(xs)
    for _, values, colour in layers:
        top = [below + value for below, value in zip(base, values, strict=True)]
        edge = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, top, strict=True)]
        back = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, base, strict=True)]
        if len(xs) == 1:  # a single moment is a bar
            x, width = frame.x(xs[0]) - 60, 120
            parts.append(
                Markup('<rect class="area c{}" x="{:.1f}" width="{}" y="{:.1f}" height="{:.1f}"/>').format(
                    colour, x, width, frame.y(top[0]), frame.y(base[0]) - frame.y(top[0])
                )
            )
        elif any(values):
            parts.append(Markup('<polygon class="area c{}" points="{}"/>').format(colour, " ".join(edge + back[::-1])))
        base = top
    for line in lines:
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points)
        parts.append(Markup('<polyline class="line c{} {}" points="{}"/>').format(line.colour, line.style, path))
    parts += [_marks(frame, marks), _levels(frame, levels)]
    for x, name in zip(xs, names, strict=False):
        parts.append(
            Markup(
                '<text class="tick phase" text-anchor="end" transform="translate({:.1f} {}) rotate(-35)">{}</text>'
            ).format(frame.x(x) + 4, frame.floor + 16, name)
        )
    if format_x is not None:
        parts.append(frame.steps(format_x))
    return Markup("").join(parts)


def bars(
    rows: Sequence[tuple[str, Sequence[tuple[float, int]]]], format_x: Format, levels: Sequence[Level] = ()
) -> Markup:
    """A horizontal bar a row, of (value, colour) pieces, with its name above and its sum behind it."""
    longest = max([sum(value for value, _ in pieces) for _, pieces in rows] + [level.value for level in levels]) or 1.0
    scale = (WIDTH - 110) / longest
    height = bars_height(len(rows))
    parts = []
    for i, (name, pieces) in enumerate(rows):
        y = 22 + i * _ROW
        parts.append(_label(2, y - 5, name, "start", "name"))
        x = 2.0
        for value, colour in pieces:
            if value > 0:
                parts.append(
                    Markup('<rect class="area c{}" x="{:.1f}" y="{}" width="{:.1f}" height="22"/>').format(
                        colour, x, y, max(1.0, value * scale)
                    )
                )
            x += value * scale
        parts.append(_label(x + 8, y + 16, format_x(sum(value for value, _ in pieces)), "start"))
    for level in levels:
        x = 2 + level.value * scale
        parts.append(
            Markup('<line class="level {0}" x1="{1:.1f}" x2="{1:.1f}" y1="6" y2="{2}"/>').format(
                level.style, x, height - 4
            )
        )
        parts.append(_label(x - 5, 12, level.name, "end", "note"))
    return Markup("").join(parts)


def bars_height(rows: int) -> int:
    return 6 + rows * _ROW


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2, 5 x 10^n apart) inside [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def thinned(points: Points, most: int) -> list[tuple[float, float]]:
    """At most `most` of the points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    kept = []
    stretches = most // 2
    for i in range(stretches):
        stretch = points[len(points) * i // stretches : len(points) * (i + 1) // stretches]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


def _room(low: float, high: float, from_zero: bool) -> tuple[float, float]:
    """The range of an axis, with some air."""
    span = (high - low) or abs(high) or 1.0
    return (0.0 if from_zero else low - 0.06 * span), high + 0.06 * span


def _levels(frame: Frame, levels: Sequence[Level]) -> Markup:
    parts = []
    for level in levels:
        y = frame.y(level.value)
        parts.append(
            Markup('<line class="level {}" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                level.style, _LEFT, WIDTH - _RIGHT, y, y
            )
        )
        parts.append(_label(WIDTH - _RIGHT - 4, y - 5, level.name, "end", "note"))
    return Markup("").join(parts)


def _marks(frame: Frame, marks: Sequence[Mark]) -> Markup:
    parts = []
    for mark in marks:
        x = frame.x(mark.x)
        if not _LEFT <= x <= WIDTH - _RIGHT:
            continue
        anchor = "end" if x > WIDTH / 2 else "start"
        parts.append(
            Markup('<line class="mark" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>').format(x, 20, frame.floor)
        )
        parts.append(_label(x + (-8 if anchor == "end" else -3), 15, mark.text, anchor, "note"))
    return Markup("").join(parts)


def _label(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, text)
