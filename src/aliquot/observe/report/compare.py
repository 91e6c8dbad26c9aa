"""Compare several runs: a table, the settings that differ, and figures with a line or a bar for each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aliquot.observe.number_format import compact, gib, percent, rate, seconds, significant
from aliquot.observe.report.charts import Axis, Figure, Layer, Table, labelled_lines, stack_figure
from aliquot.observe.report.memory_figures import GIB, limit_bytes, top_bytes
from aliquot.observe.report.read_run import Run, number
from aliquot.observe.report.run_facts import NOT_RECORDED, tiles
from aliquot.observe.step_clock import PARTS


def table(runs: Sequence[Run]) -> Table:
    """Build a table with a column for each run."""
    columns = []
    for run in runs:
        ranks, wire = number(run.about.get("world_size")), run.per_step("wire_bytes")
        columns.append({
            "state": run.status.word,
            "engine": str(run.about.get("engine") or NOT_RECORDED),
            "ranks": f"{ranks:.0f}" if ranks else NOT_RECORDED,
            **{label: value for label, value, _ in tiles(run)},
            "network a step, all ranks": rate((ranks or 1) * wire[-1][1], "B") if wire else NOT_RECORDED,
        })  # fmt: skip
    heads = dict.fromkeys(head for column in columns for head in column)
    return Table(("", *labels(runs)), [[head, *(column.get(head, "none") for column in columns)] for head in heads])


def differences(runs: Sequence[Run]) -> Table:
    """Build a table of the settings in which the runs differ, without names and directories."""
    flat = [_flat(run.config) for run in runs]
    keys = sorted({key for values in flat for key in values} - {"run.name", "run.directory"})
    differing = [key for key in keys if len({repr(values.get(key)) for values in flat}) > 1]
    cells = {key: [values.get(key) for values in flat] for key in differing}
    rows = [[key, *("" if value is None else str(value) for value in values)] for key, values in cells.items()]
    return Table(("key", *labels(runs)), rows)


def labels(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs, or their directories if two names are equal."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def figures(runs: Sequence[Run]) -> list[Figure]:
    share = "share of a plain matmul, by step"
    lines = [
        (Figure("loss", "Training loss over tokens", ""), Axis("nats per token", "{:.3g}".format, "{:.3g}".format),
         [run.points("loss", x="tokens") for run in runs]),
        (Figure("perplexity", "Perplexity on held-out text", ""), Axis("perplexity, by step", significant, significant),
         [run.points("eval_perplexity", run.evaluations) for run in runs]),
        (Figure("speed", "Real tokens per second", ""), Axis("real tokens/s, by step", compact, compact, True),
         [run.steady("tokens_per_s") for run in runs]),
        (Figure("mfu", "MFU", ""), Axis(share, percent, percent, True), [run.steady("mfu") for run in runs]),
    ]  # fmt: skip
    drawn = [
        labelled_lines(figure, axis, list(zip(labels(runs), points, strict=True)), "run", figure.name == "loss")
        for figure, axis, points in lines
    ]
    return [*drawn, _parts(runs), _memory(runs)]


def _parts(runs: Sequence[Run]) -> Figure:
    figure = Figure("parts", "Where the time of a step goes", "")
    means = {label: run.mean_parts() for run, label in zip(runs, labels(runs), strict=True)}
    drawn = {label: parts for label, parts in means.items() if sum(parts.values())}
    if not drawn:
        return replace(figure, missing="no run has logged the time of its parts")
    says = "A step takes " + ", ".join(f"{seconds(sum(parts.values()))} in {run}" for run, parts in drawn.items()) + "."
    layers = [Layer(part, [parts[part] for parts in drawn.values()], i) for i, part in enumerate(PARTS)]
    axis = Axis("seconds a step, mean over ranks and steps", seconds, seconds, x="run")
    return stack_figure(replace(figure, says=says), axis, list(drawn), layers)


def _memory(runs: Sequence[Run]) -> Figure:
    figure = Figure("memory", "Peak memory of the largest rank", "")
    drawn = [(label, run) for run, label in zip(runs, labels(runs), strict=True) if run.rows]
    if not drawn:
        return replace(figure, missing="no run has a ledger.json, which is written after the first step")
    peaks = [max(map(top_bytes, run.rows)) for _, run in drawn]
    limits = [limit_bytes(run) for _, run in drawn]
    levels = {f"limit {gib(size)}": size / GIB for size in limits if size is not None and size <= 2.5 * max(peaks)}
    says = ", ".join(f"{label} {gib(peak)}" for (label, _), peak in zip(drawn, peaks, strict=True)) + "."
    axis = Axis("GiB", significant, significant, levels=levels, x="run")
    stacked = stack_figure(
        replace(figure, says=says),
        axis,
        [label for label, _ in drawn],
        [Layer("peak", [peak / GIB for peak in peaks], 0)],
    )
    rows = [
        [label, gib(peak), gib(limit) if limit is not None else NOT_RECORDED]
        for (label, _), peak, limit in zip(drawn, peaks, limits, strict=True)
    ]
    return replace(stacked, table=Table(("run", "peak of the largest rank", "a rank may have"), rows))


def _flat(values: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {name: values}
    return {
        key: value
        for inner, item in values.items()
        for key, value in _flat(item, f"{name}.{inner}" if name else str(inner)).items()
    }
