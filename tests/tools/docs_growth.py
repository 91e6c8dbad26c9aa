"""The table of docs/explanation/scale.md: what a rank needs, from the newest result of scale.py.

python -m tests.tools.docs_growth
"""

from __future__ import annotations

from typing import Any

from benchmarks.page import RESULTS, newest

from tests.tools.docs_pages import ROOT, write_table

PAGE = ROOT / "docs" / "explanation" / "scale.md"
# Columns of scale.py, and their words on the page.
COLUMNS = (
    ("connections", "connections"),
    ("of a pair", "connections between two ranks of different hosts, at most"),
    ("idle", "connections that have carried no message"),
    ("descriptors, rank 0", "descriptors of rank 0"),
    ("threads", "threads"),
    ("private MiB", "private memory, MiB"),
    ("copied MiB", "of it pages copied from the process that forks the ranks, MiB"),
    ("messages of a step and host", "messages to another host in a step"),
    ("KB sent in a step", "KB sent in a step"),
    ("join s", "CPU seconds to join"),
    ("join s, rank 0", "CPU seconds to join, rank 0"),
    ("step s", "CPU seconds of a step"),
    ("save s, rank 0", "CPU seconds of a save, rank 0"),
    ("resume s, rank 0", "CPU seconds of a resume, rank 0"),
)


def main() -> None:
    results = (result for result in newest(RESULTS) if result.benchmark == "scale" and not result.part)
    result = max(results, key=lambda result: result.date)
    *worlds, exponents = result.values["rows"]
    write_table(PAGE, "docs_growth", table(worlds, exponents))


def table(worlds: list[dict[str, Any]], exponents: dict[str, Any]) -> str:
    counts = " | ".join(f"{row['ranks']} ranks" for row in worlds)
    lines = [
        f"| of a rank (median) | {counts} | exponent |",
        f"|{'--|' * (len(worlds) + 2)}",
    ]
    for name, words in COLUMNS:
        values = " | ".join(number(row[name]) for row in worlds)
        lines.append(f"| {words} | {values} | {exponent(exponents, name)} |")
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 or value == int(value) else f"{value:.2f}" if value < 2 else f"{value:.1f}"


def exponent(exponents: dict[str, Any], name: str) -> str:
    return f"{exponents[name]:.2f}".replace("-0.00", "0.00") if name in exponents else ""


if __name__ == "__main__":
    main()
