"""Compare several runs: a table, the settings that differ, and figures with a line for each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aliquot.observe.number_format import compact, gib, percent, rate, seconds, significant
from aliquot.observe.report.figure import Axis, Figure, Key, Table, labelled_lines
from aliquot.observe.report.memory_figures import limit_bytes, top_bytes
from aliquot.observe.report.read_run import Points, Run, number
from aliquot.observe.report.run_facts import NOT_RECORDED, steps_done
from aliquot.observe.report.series import average, mean_parts, per_step, steady
from aliquot.observe.report.svg import Level, bars, bars_height
from aliquot.observe.step_clock import PARTS

_NONE = "none"


def table(runs: Sequence[Run]) -> Table:
    """Build a table with a column for each run."""
    head = ("state", "engine", "ranks", "steps", "loss", "perplexity", "bits per byte", "real tokens/s", "MFU",
            "a step", "peak memory", "network a step, all ranks")  # fmt: skip
    columns = []
    for run in runs:
        losses = run.points("loss")
        evaluated, bits = (run.points(f"eval_{name}", run.evaluations) for name in ("perplexity", "bits_per_byte"))
        speed, mfu = average(run, "tokens_per_s"), average(run, "mfu")
        step_s, wire = sum(mean_parts(run).values()), per_step(run, "wire_bytes")
        ranks = number(run.about.get("world_size"))
        columns.append([
            run.status.word, str(run.about.get("engine") or NOT_RECORDED), f"{ranks:.0f}" if ranks else NOT_RECORDED,
            f"{steps_done(run):,.0f}", f"{losses[-1][1]:.4f}" if losses else _NONE,
            significant(evaluated[-1][1]) if evaluated else _NONE, f"{bits[-1][1]:.3f}" if bits else _NONE,
            compact(speed[0]) if speed is not None else _NONE,
            percent(mfu[0]) if mfu is not None else _NONE, seconds(step_s) if step_s else _NONE,
            gib(max(top_bytes(row) for row in run.rows)) if run.rows else NOT_RECORDED,
            rate((ranks or 1) * wire[-1][1], "B") if wire else NOT_RECORDED,
        ])  # fmt: skip
    return Table(("", *labels(runs)), [[name, *values] for name, *values in zip(head, *columns, strict=True)])


def differences(runs: Sequence[Run]) -> Table:
    """Build a table of the settings in which the runs differ, without names and directories."""
    flat = [_flat(run.config) for run in runs]
    keys = sorted({key for values in flat for key in values} - {"run.name", "run.directory"})
    differing = [key for key in keys if len({repr(values.get(key)) for values in flat}) > 1]
    return Table(("key", *labels(runs)), [[key, *(_text(values.get(key)) for values in flat)] for key in differing])


def labels(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs, or their directories if two names are equal."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def figures(runs: Sequence[Run]) -> list[Figure]:
    return [
        _lines(
            runs, "loss", "Training loss over tokens", Axis("nats per token", lambda v: f"{v:.3g}"),
            lambda run: run.points("loss", x="tokens"),
        ),
        _lines(
            runs, "perplexity", "Perplexity on held-out text", Axis("perplexity, by step", significant),
            lambda run: run.points("eval_perplexity", run.evaluations),
        ),
        _lines(runs, "speed", "Real tokens per second", Axis("real tokens/s, by step", compact, from_zero=True),
               lambda run: steady(run, "tokens_per_s")),
        _lines(runs, "mfu", "MFU", Axis("share of a plain matmul, by step", percent, from_zero=True),
               lambda run: steady(run, "mfu")),
        _parts(runs),
        _memory(runs),
    ]  # fmt: skip


def _lines(runs: Sequence[Run], name: str, title: str, axis: Axis, points_of: Callable[[Run], Points]) -> Figure:
    drawn = [(label, points_of(run)) for run, label in zip(runs, labels(runs), strict=True)]
    smooth = name == "loss" and all(len(points) > 60 for _, points in drawn if points)
    return labelled_lines(name, title, axis, drawn, "run", smooth)


def _parts(runs: Sequence[Run]) -> Figure:
    name, title = "parts", "Where the time of a step goes"
    spent = [(label, mean_parts(run)) for run, label in zip(runs, labels(runs), strict=True)]
    drawn = [(label, parts) for label, parts in spent if sum(parts.values())]
    if not drawn:
        return Figure(name, title, "", missing="no run has logged the time of its parts")
    svg = bars([(label, [(parts[part], i) for i, part in enumerate(PARTS)]) for label, parts in drawn], seconds)
    says = "A step takes " + ", ".join(f"{seconds(sum(parts.values()))} in {label}" for label, parts in drawn) + "."
    rows = [[label, *(seconds(parts[part]) for part in PARTS)] for label, parts in drawn]
    return Figure(
        name, title, says, svg, unit="seconds a step, mean over ranks and steps", height=bars_height(len(drawn)),
        keys=[Key(part, i, "area") for i, part in enumerate(PARTS)], table=Table(("run", *PARTS), rows),
    )  # fmt: skip


def _memory(runs: Sequence[Run]) -> Figure:
    name, title = "memory", "Peak memory of the largest rank"
    drawn = [
        (label, max(top_bytes(row) for row in run.rows), limit_bytes(run))
        for run, label in zip(runs, labels(runs), strict=True)
        if run.rows
    ]
    if not drawn:
        return Figure(name, title, "", missing="no run has a ledger.json, which is written after the first step")
    limits = {limit for _, _, limit in drawn if limit is not None}
    highest = max(peak for _, peak, _ in drawn)
    levels = [Level(f"limit {gib(limit)}", limit) for limit in limits if limit <= 2.5 * highest]
    says = ", ".join(f"{label} {gib(peak)}" for label, peak, _ in drawn) + "."
    rows = [[label, gib(peak), gib(limit) if limit is not None else NOT_RECORDED] for label, peak, limit in drawn]
    return Figure(
        name, title, says, bars([(label, [(peak, 0)]) for label, peak, _ in drawn], gib, levels), unit="GiB",
        height=bars_height(len(drawn)),
        table=Table(("run", "peak of the largest rank", "a rank may have"), rows),
    )  # fmt: skip


def _flat(values: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {name: values}
    return {
        key: value
        for inner, item in values.items()
        for key, value in _flat(item, f"{name}.{inner}" if name else str(inner)).items()
    }


def _text(value: Any) -> str:
    return "" if value is None else str(value)
