"""The table and the curves of docs/explanation/scale.md: what a rank needs, from the newest result of scale.py.

python -m tests.tools.docs_growth
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

from benchmarks.page import RESULTS, newest

from tests.tools.docs_pages import ROOT, write_table

PAGE = ROOT / "docs" / "explanation" / "scale.md"
PICTURE = ROOT / "docs" / "pictures" / "scale.svg"
# Columns of scale.py, their words on the page, and the colours of those that have a curve.
COLUMNS = (
    ("connections", "connections", "#1a73e8"),
    ("of a pair", "connections between two ranks of different hosts, at most", None),
    ("idle", "connections that have carried no message", None),
    ("descriptors, rank 0", "descriptors of rank 0", "#e8710a"),
    ("threads", "threads", "#9aa0a6"),
    ("private MiB", "private memory, MiB", "#1e8e3e"),
    ("copied MiB", "of it pages copied from the process that forks the ranks, MiB", None),
    ("messages of a step and host", "messages to another host in a step", "#12b5cb"),
    ("KB sent in a step", "KB sent in a step", None),
    ("join s", "CPU seconds to join", "#9334e6"),
    ("join s, rank 0", "CPU seconds to join, rank 0", "#d93025"),
    ("step s", "CPU seconds of a step", None),
    ("save s, rank 0", "CPU seconds of a save, rank 0", "#f9ab00"),
    ("resume s, rank 0", "CPU seconds of a resume, rank 0", "#e52592"),
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 800, 420, 50, 560, 50, 370
LABEL = 17  # height of a label


def main() -> None:
    results = (result for result in newest(RESULTS) if result.benchmark == "scale" and not result.part)
    result = max(results, key=lambda result: result.date)
    *worlds, exponents = result.values["rows"]
    write_table(PAGE, "docs_growth", table(worlds, exponents))
    PICTURE.write_text(curves(worlds))


def table(worlds: list[dict[str, Any]], exponents: dict[str, Any]) -> str:
    counts = " | ".join(f"{row['ranks']} ranks" for row in worlds)
    lines = [
        f"| of a rank (median) | {counts} | exponent |",
        f"|{'--|' * (len(worlds) + 2)}",
    ]
    for name, words, _ in COLUMNS:
        values = " | ".join(number(row[name]) for row in worlds)
        lines.append(f"| {words} | {values} | {exponent(exponents, name)} |")
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 or value == int(value) else f"{value:.2f}" if value < 2 else f"{value:.1f}"


def exponent(exponents: dict[str, Any], name: str) -> str:
    return f"{exponents[name]:.2f}".replace("-0.00", "0.00") if name in exponents else ""


def curves(worlds: list[dict[str, Any]]) -> str:
    """Draw how many times each column grows over the smallest world, on logarithmic axes."""
    counts = [row["ranks"] for row in worlds]
    growth = {name: [row[name] / worlds[0][name] for row in worlds] for name, _, colour in COLUMNS if colour}
    top = counts[-1] / counts[0]  # linear growth
    low = min(0.8, *(min(of) for of in growth.values()))

    def x(count: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(count / counts[0]) / math.log(top)

    def y(times: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * math.log(times / low) / math.log(top / low)

    parts = []
    for count in counts:
        parts += [line([(x(count), TOP), (x(count), BOTTOM)], "#eee"), text(x(count), BOTTOM + 18, count, "middle")]
    for times in (1, 2, 4, 8, 16):
        if times <= top:
            parts.append(line([(LEFT, y(times)), (RIGHT, y(times))], "#eee"))
            parts.append(text(LEFT - 8, y(times) + 4, f"{times} x", "end"))
    parts.append(line([(x(count), y(count / counts[0])) for count in counts], "#bbb", 'stroke-dasharray="6"'))
    labels = [(y(top), "linear growth", "#777")]
    for name, words, colour in COLUMNS:
        if colour:
            points = [(x(count), y(times)) for count, times in zip(counts, growth[name], strict=True)]
            parts.append(line(points, colour, 'stroke-width="2"'))
            labels.append((points[-1][1], words, colour))
    below = float(TOP - LABEL)
    for at, words, colour in sorted(labels):
        below = max(at, below + LABEL)
        parts.append(text(RIGHT + 8, below + 4, words, colour=colour))
    parts.append(text((LEFT + RIGHT) / 2, HEIGHT - 12, "ranks", "middle"))
    title = f"What a rank needs, relative to {counts[0]} ranks"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif"'
        f' font-size="12">\n<title>{title}</title>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n'
    )
    return head + "\n".join([text(20, 24, title), *parts, "</svg>"]) + "\n"


def line(points: list[tuple[float, float]], colour: str, style: str = "") -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" {style}/>'


def text(x: float, y: float, words: object, anchor: str = "start", colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(str(words))}</text>'


if __name__ == "__main__":
    main()
