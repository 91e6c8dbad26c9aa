"""Print the results of a benchmark, and write them as the JSON that benchmarks/page.py reads."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.smoke import SMOKE

PEERS = ("deepspeed", "accelerate", "peft", "datasets", "trl")
Row = dict[str, Any]
Target = dict[str, Any]


def target(
    name: str, value: float | None, goal: float, better: Literal["higher", "lower"], why: str | None = None
) -> Target:
    """Describe a goal and its measured value. `value` is None if it could not be measured, because of `why`."""
    met = value is not None and (value >= goal if better == "higher" else value <= goal)
    found = {
        "name": name,
        "value": None if value is None else round(value, 4),
        "goal": goal,
        "better": better,
        "met": met if value is not None else None,
    }
    return found | {"why": why} if value is None and why else found


def show(title: str, rows: Sequence[Row]) -> None:
    table = Table(title=title)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*[_text(row.get(column, "")) for column in columns])
    Console(width=180).print(table)


def finish(title: str, rows: Sequence[Row], targets: Sequence[Target], file: Path | None) -> None:
    """Print rows and targets, and write them as JSON if a file is given."""
    from aliquot.core.small_files import publish_text
    from aliquot.machine.facts import machine_facts

    show(title, rows)
    show("targets", targets)
    if SMOKE and (broken := [row for row in rows if row.get("failed")]):
        raise SystemExit(f"a smoke run fails with its first row that failed: {broken[0]}")
    if file is not None:
        document = {
            "title": title,
            "command": shlex.join(["python", *sys.argv]),
            "peers": _versions(),
            "machine": machine_facts(),
            "rows": rows,
            "targets": targets,
        }
        publish_text(file, json.dumps(document, indent=1) + "\n")  # a run that is killed loses no earlier rows


def _versions() -> dict[str, str]:
    installed = {}
    for name in PEERS:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
