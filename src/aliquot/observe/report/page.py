"""Render the report: one self-contained HTML file about one run, or about several runs side by side."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from aliquot.core.errors import RunDirectoryError
from aliquot.core.small_files import publish_text
from aliquot.observe.report import compare, figures, memory_figures, run_facts
from aliquot.observe.report.charts import Figure
from aliquot.observe.report.read_run import Run, read_run

MARKER = "<!-- aliquot report -->"


def write_report(directories: Sequence[Path], out: Path) -> None:
    """Write the report of run directories to `out`, atomically. Raises UserError for a directory that is no run."""
    if out.exists() and not _is_report(out):
        raise RunDirectoryError("exists and is not a report of aliquot; choose another --out", out)
    publish_text(out, render([read_run(directory) for directory in directories]))


def render(runs: Sequence[Run]) -> str:
    """Render the page."""
    style, script = _source("style.css"), _source("hints.js")
    page = {
        "marker": Markup(MARKER),
        "style": Markup(style),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": version("aliquot"),
    }
    environment = Environment(
        loader=PackageLoader("aliquot.observe.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    if len(runs) > 1:
        return environment.get_template("compare.html").render(
            page=page, runs=[(run, run_facts.summary(run)) for run in runs], table=compare.table(runs),
            differences=compare.differences(runs), figures=compare.figures(runs),
        )  # fmt: skip
    (run,) = runs
    return environment.get_template("run.html").render(
        page=page, run=run, summary=run_facts.summary(run), when=run_facts.when(run), tiles=run_facts.tiles(run),
        foresight=run_facts.foresight(run), sections=_sections(run), checkpoints=run_facts.checkpoints(run),
        history=run_facts.history(run), machine=run_facts.machine(run), doctor=run_facts.doctor(run),
        commands=run_facts.commands(run),
    )  # fmt: skip


def _sections(run: Run) -> list[tuple[str, str, list[Figure]]]:
    learning = [figures.loss(run), figures.perplexity(run), *figures.source_figures(run), *figures.expert_figures(run)]
    return [
        ("learning", "Learning", learning),
        ("speed", "Speed", [figures.speed(run), figures.utilisation(run)]),
        ("time", "Time of a step", [figures.parts(run)]),
        ("memory", "Memory", [*memory_figures.memory(run), *memory_figures.memory_over_steps(run)]),
        ("traffic", "Traffic", [figures.traffic(run)]),
    ]


def _source(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _is_report(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return MARKER in file.read(1000)
    except OSError:
        return False
