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

from aliquot.config.deepspeed_json import leaves
from aliquot.core.errors import RunDirectoryError
from aliquot.core.number_format import compact, gib, percent, rate, seconds, short
from aliquot.core.small_files import open_regular, publish_text
from aliquot.observe.report import figures, run_facts
from aliquot.observe.report.charts import Figure, Layer, Table, labelled_lines
from aliquot.observe.report.memory_figures import GIB, limit_bytes, memory, top_bytes
from aliquot.observe.report.read_run import Run, number, read_run
from aliquot.observe.report.run_facts import NOT_RECORDED, if_recorded, tiles
from aliquot.observe.step_clock import PARTS

MARKER = "<!-- aliquot report -->"


def write_report(directories: Sequence[Path], out: Path) -> None:
    """Write the report of run directories to `out`, atomically. Raises UserError for a directory that is not a run."""
    if out.exists() and not _is_report(out):
        raise RunDirectoryError("exists and is not a report of aliquot; choose another --out", out)
    publish_text(out, render([read_run(directory) for directory in directories]))


def render(runs: Sequence[Run]) -> str:
    """Render the HTML page of one run, or of several runs side by side."""
    style, script = _source("style.css"), _source("hints.js")
    page = {
        "marker": Markup(MARKER),
        "style": Markup(style),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": version("aliquot"),
    }
    templates = PackageLoader("aliquot.observe.report", "templates")
    environment = Environment(loader=templates, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    if len(runs) > 1:
        return environment.get_template("compare.html").render(
            page=page, runs=[(run, run_facts.summary(run)) for run in runs], table=_comparison(runs),
            differences=_differences(runs), figures=_compared_figures(runs),
        )  # fmt: skip
    (run,) = runs
    return environment.get_template("run.html").render(
        page=page, run=run, summary=run_facts.summary(run), when=run_facts.when(run), tiles=run_facts.tiles(run),
        evaluations=run_facts.evaluations(run), summary_of_data=run_facts.data_lines(run, "summary"),
        samples=run_facts.data_lines(run, "samples"), foresight=run_facts.foresight(run),
        slower=run_facts.speed_beside_plan(run.plan, (run.average("tokens_per_s") or (0.0,))[0]),
        sections=_sections(run), checkpoints=run_facts.checkpoints(run),
        history=run_facts.history(run), machine=run_facts.machine(run), doctor=run_facts.doctor(run),
        commands=run_facts.commands(run),
    )  # fmt: skip


def _sections(run: Run) -> list[tuple[str, str, list[Figure]]]:
    learning = [
        figures.loss(run), *(figures.rewards(run) or [figures.perplexity(run)]), *figures.source_figures(run),
        figures.learning_rate(run),
        figures.gradient_norm(run), *figures.expert_figures(run),
    ]  # fmt: skip
    return [
        ("learning", "Learning", learning),
        ("speed", "Speed", [figures.speed(run), figures.utilisation(run)]),
        ("time", "Time of a step", [figures.parts(run)]),
        ("memory", "Memory", memory(run)),
        ("traffic", "Traffic", [figures.traffic(run)]),
    ]


def _source(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _is_report(path: Path) -> bool:
    try:
        with open_regular(path, "anywhere") as file:
            return MARKER.encode() in file.read(1000)
    except OSError:
        return False


def _comparison(runs: Sequence[Run]) -> Table:
    """Build a table of key figures with a column for each run."""
    columns = []
    for run in runs:
        ranks, wire = number(run.about.get("world_size")), run.per_step("wire_bytes")
        columns.append({
            "state": run.status.word,
            "engine": str(run.about.get("engine") or NOT_RECORDED),
            "ranks": if_recorded(ranks, "{:.0f}".format),
            **{label: value for label, value, _ in tiles(run)},
            "network a step, all ranks": rate((ranks or 1) * wire[-1][1], "B") if wire else NOT_RECORDED,
        })  # fmt: skip
    heads = dict.fromkeys(head for column in columns for head in column)
    return Table(("", *_labels(runs)), [[head, *(column.get(head, "none") for column in columns)] for head in heads])


def _differences(runs: Sequence[Run]) -> Table:
    """Build a table of the settings in which the runs differ, without names and directories."""
    flat = [dict(leaves(run.config)) for run in runs]
    keys = sorted({key for values in flat for key in values} - {"run.name", "run.directory"})
    differing = [key for key in keys if len({repr(values.get(key)) for values in flat}) > 1]
    cells = {key: [values.get(key) for values in flat] for key in differing}
    rows = [[key, *("" if value is None else str(value) for value in values)] for key, values in cells.items()]
    return Table(("key", *_labels(runs)), rows)


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs, or their directories if two names are equal."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _compared_figures(runs: Sequence[Run]) -> list[Figure]:
    share = "share of a plain matmul, by step"
    curves = [
        (Figure("loss", "Training loss over tokens", "", "", "nats per token", "{:.3g}".format, "{:.3g}".format),
         [run.points("loss", x="tokens") for run in runs]),
        (Figure("perplexity", "Perplexity on held-out text", "", "", "perplexity (logarithmic), by step", short,
                short, log=True),
         [run.evaluated("perplexity") for run in runs]),
        (Figure("speed", "Real tokens per second", "", "", "real tokens/s, by step", compact, compact, from_zero=True),
         [run.steady("tokens_per_s") for run in runs]),
        (Figure("mfu", "MFU", "", "", share, percent, percent, from_zero=True), [run.steady("mfu") for run in runs]),
    ]  # fmt: skip
    drawn = [
        labelled_lines(figure, list(zip(_labels(runs), points, strict=True)), "run", figure.name == "loss")
        for figure, points in curves
    ]
    return [*drawn, _compared_parts(runs), _compared_memory(runs)]


def _compared_parts(runs: Sequence[Run]) -> Figure:
    means = {label: run.mean_parts() for run, label in zip(runs, _labels(runs), strict=True)}
    drawn = {label: parts for label, parts in means.items() if sum(parts.values())}
    says = "A step takes " + ", ".join(f"{seconds(sum(parts.values()))} in {run}" for run, parts in drawn.items()) + "."
    return Figure(
        "parts", "Where the time of a step goes", says, "no run has logged the time of its parts",
        "seconds a step, mean over ranks and steps", seconds, seconds, bars=list(drawn),
        layers=[Layer(part, [parts[part] for parts in drawn.values()], i) for i, part in enumerate(PARTS)], x="run",
    )  # fmt: skip


def _compared_memory(runs: Sequence[Run]) -> Figure:
    drawn = {label: run for run, label in zip(runs, _labels(runs), strict=True) if run.rows}
    peaks = {label: top_bytes(run) or 0.0 for label, run in drawn.items()}
    limits = {label: limit_bytes(run) for label, run in drawn.items()}
    near = [size for size in limits.values() if size is not None and size <= 2.5 * max(peaks.values(), default=0.0)]
    says = ", ".join(f"{label} {gib(peak)}" for label, peak in peaks.items()) + "."
    rows = [[label, gib(peak), if_recorded(limits[label], gib)] for label, peak in peaks.items()]
    return Figure(
        "memory", "Peak memory of the largest rank", says,
        "no run has a ledger.json, which is written after the first step", "GiB", short, short,
        bars=list(peaks), layers=[Layer("peak", [peak / GIB for peak in peaks.values()], 0)], x="run",
        levels={f"limit {gib(size)}": size / GIB for size in near},
        other_table=Table(("run", "peak of the largest rank", "a rank may have"), rows),
    )  # fmt: skip
