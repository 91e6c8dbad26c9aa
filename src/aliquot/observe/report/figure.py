"""One picture of the report with its words: what it shows, its legend, and the numbers as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from aliquot.observe.report.svg import HEIGHT, WIDTH

_MOST_ROWS = 120


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def shown(self) -> Sequence[Sequence[str]]:
        """All rows, or evenly spaced ones of very many, the last one among them."""
        if len(self.rows) <= _MOST_ROWS:
            return self.rows
        step = len(self.rows) / _MOST_ROWS
        return [*(self.rows[int(i * step)] for i in range(_MOST_ROWS)), self.rows[-1]]


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    name: str
    colour: int
    style: str = "line"  # line, area, dots, dashed, dotted
    note: str = ""  # a number beside it


@dataclass(frozen=True)
class Figure:
    """`svg` None: there is nothing to draw, and `missing` says why."""

    name: str  # the anchor; unique in a page
    title: str
    says: str  # the picture in a sentence or two: text for who cannot see it, too
    svg: Markup | None = None
    missing: str = ""
    unit: str = ""
    height: int = HEIGHT
    keys: Sequence[Key] = ()
    table: Table | None = None
    hints: Sequence[tuple[float, str]] = field(default=())  # x in user units, what to show there

    @property
    def hints_json(self) -> str:
        return json.dumps([[round(x / WIDTH, 4), text] for x, text in self.hints])
