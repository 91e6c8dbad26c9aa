"""The figures of a run's memory: of each rank over the phases, and over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aliquot.observe.ledger import PHASES
from aliquot.observe.number_format import compact, gib, significant
from aliquot.observe.report.figure import Figure, Key, Table
from aliquot.observe.report.read_run import Object, Points, Run, number
from aliquot.observe.report.series import hints_of, hints_of_layers, resumes, without_steps
from aliquot.observe.report.svg import PHASES_HEIGHT, Level, Line, Overlay, area_chart, line_chart

GIB = 2**30
REST = "process, libraries, allocator"
_MAX_RANKS = 4
_GPU_KEY = "gpu"  # key of a ledger row's GPU memory
_LAYERS = ("weights", "gradients", "moments", "gathered", "activations", "shared")


@dataclass(frozen=True)
class _MemoryKind:
    """GPU memory or host memory."""

    suffix: str  # of the figure's name
    title: str
    rest: str  # name of the memory outside the known categories
    ends: Mapping[str, str]  # further columns of the table, and their keys
    phases: str  # key of the plan
    limit: float | None

    def top(self, row: Object) -> float:
        return number(row.get("peak_bytes")) or 0.0

    def planned(self, run: Run, row: Object) -> float | None:
        """Return the planned bytes of the row's phase, with shared pages divided as in `top`; None without a plan."""
        ranks = number(run.plan.get("ranks_per_node")) or 1.0
        phases = run.plan.get(self.phases)
        for phase in phases if isinstance(phases, list) else ():
            if isinstance(phase, dict) and phase.get("name") == row.get("phase"):
                return _sum(phase.get("private_bytes")) + _sum(phase.get("shared_bytes")) / ranks
        return number(row.get("planned_bytes"))

    def levels(self, highest: float) -> list[Level]:
        """Return a line at the limit of a rank, unless the limit is far above the drawing."""
        limit = self.limit
        return [Level(f"limit {gib(limit)}", limit / GIB)] if limit is not None and limit <= 2.5 * highest else []


def _host_memory(run: Run) -> _MemoryKind:
    phases = "host_phases" if _uses_gpus(run) else "phases"
    ends = {"RSS at its end": "rss_bytes", "PSS at its end": "pss_bytes"}
    return _MemoryKind("", "Memory", REST, ends, phases, _host_limit(run))


def _gpu_memory(run: Run) -> _MemoryKind:
    ends = {"tensors": "allocated_bytes", "of the allocator": "reserved_bytes", "beside": "beside_bytes"}
    return _MemoryKind("-gpu", "GPU memory", "context, NCCL, allocator", ends, "phases", limit_bytes(run))


def memory(run: Run) -> list[Figure]:
    """Draw the ranks with the most memory; for a rank on a GPU first its GPU memory."""
    if not run.rows:
        why = "ledger.json is not there: it is written after the first step, and this run has not come so far"
        return [Figure("memory", "Memory over the phases", "", missing=why)]
    ranks = sorted({int(number(row.get("rank")) or 0) for row in run.rows})
    rank_rows = {rank: [row for row in run.rows if int(number(row.get("rank")) or 0) == rank] for rank in ranks}
    largest = sorted(ranks, key=lambda rank: -max(top_bytes(row) for row in rank_rows[rank]))[:_MAX_RANKS]
    figures = []
    for rank in sorted(largest):
        if _uses_gpus(run):
            figures.append(_memory_of(run, rank, [_compute_row(row) for row in rank_rows[rank]], _gpu_memory(run)))
        figures.append(_memory_of(run, rank, rank_rows[rank], _host_memory(run)))
    return figures


def _memory_of(run: Run, rank: int, rows: Sequence[Object], kind: _MemoryKind) -> Figure:
    rows = sorted(rows, key=lambda row: PHASES.index(str(row["phase"])))
    names = [str(row["phase"]) for row in rows]
    tops = [kind.top(row) for row in rows]
    layers = []
    for i, category in enumerate(_LAYERS):
        values = [_accounted(row, category) for row in rows]
        if any(values):
            layers.append((category, values, i))
    rest = [max(0.0, top - sum(values[i] for _, values, _ in layers)) for i, top in enumerate(tops)]
    layers.insert(0, (kind.rest, rest, 7))
    planned_bytes = [kind.planned(run, row) for row in rows]
    planned = [(float(i), value) for i, value in enumerate(planned_bytes) if value is not None]
    lines = [Line("plan", scaled(planned), 6, "dashed plan")] if planned else []
    limit, levels = kind.limit, kind.levels(max([*tops, *(y for _, y in planned)]))
    at = tops.index(max(tops))
    says = f"Rank {rank} held at most {gib(tops[at])}, in the phase “{names[at]}”, of which the legend tells the parts"
    says += f"; a rank may have {gib(limit)}" if limit is not None else ""
    says += ", far above this picture." if limit is not None and not levels else "."
    says += "" if planned else " No plan was recorded, so its line is missing."
    drawn = [(layer, [value / GIB for value in values], colour) for layer, values, colour in layers]
    xs = [float(i) for i in range(len(rows))]
    svg = area_chart(xs, drawn, significant, names=names, overlay=Overlay(lines, levels))
    head = ("phase", *(layer for layer, _, _ in layers), "most", "plan", *kind.ends)
    body = [
        [
            names[i], *(gib(values[i]) for _, values, _ in layers), gib(tops[i]),
            "none" if (value := planned_bytes[i]) is None else gib(value),
            *(gib(number(row.get(key)) or 0.0) for key in kind.ends.values()),
        ]
        for i, row in enumerate(rows)
    ]  # fmt: skip
    keys = [Key(layer, colour, "area", gib(values[at])) for layer, values, colour in layers]
    keys += [Key("plan", 6, "dashed")] if planned else []
    return Figure(
        f"memory{kind.suffix}-{rank}", f"{kind.title} of rank {rank}", says, svg, keys=keys,
        unit="GiB, the most during each phase", height=PHASES_HEIGHT, table=Table(head, body),
        hints=hints_of_layers(xs, layers, names, gib),
    )  # fmt: skip


def memory_over_steps(run: Run) -> list[Figure]:
    host = _over_steps(run, "memory_bytes", _host_memory(run))
    return [_over_steps(run, "gpu_memory_bytes", _gpu_memory(run)), host] if _uses_gpus(run) else [host]


def _over_steps(run: Run, key: str, kind: _MemoryKind) -> Figure:
    name, title = f"memory{kind.suffix}-steps", f"{kind.title} while training"
    rows = [
        (step, [float(value) for value in line[key]])
        for line in run.steps
        if (step := number(line.get("step"))) is not None
        and isinstance(line.get(key), list)
        and line[key]
        and all(number(value) is not None for value in line[key])
    ]
    if not rows:
        return Figure(name, title, "", missing=without_steps(run))
    highest = [(step, max(values)) for step, values in rows]
    lowest = [(step, min(values)) for step, values in rows]
    lines = [Line("largest rank", scaled(highest), 0)]
    keys = [Key("largest rank", 0)]
    if any(len(values) > 1 for _, values in rows):
        lines.append(Line("smallest rank", scaled(lowest), 4, "dashed"))
        keys.append(Key("smallest rank", 4, "dashed"))
    svg = line_chart(
        lines, significant, format_x=compact, from_zero=True, marks=resumes(run),
        levels=kind.levels(max(y for _, y in highest)),
    )  # fmt: skip
    grown = highest[-1][1] - highest[len(highest) // 2][1]
    says = f"The largest rank had {gib(highest[-1][1])} at step {highest[-1][0]:,.0f}"
    says += f"; {gib(grown)} more than half way." if grown > 0.02 * highest[-1][1] else ", no more than half way."
    return Figure(
        name, title, says, svg, unit="GiB of a rank: its own and its share of what is shared", keys=keys,
        table=Table(("step", "smallest", "largest"),
                    [[f"{step:,.0f}", gib(min(values)), gib(max(values))] for step, values in rows]),
        hints=hints_of(highest, lambda step, value: f"step {step:,.0f}\nlargest rank {gib(value)}"),
    )  # fmt: skip


def top_bytes(row: Object) -> float:
    """Return the rank's peak in the phase, of its GPU or of host memory with shared pages divided among their users."""
    return number(_compute_row(row).get("peak_bytes")) or 0.0


def host_top_bytes(run: Run) -> float | None:
    """Return the peak host memory of a rank on a GPU; None if ranks compute on CPUs."""
    return max(number(row.get("peak_bytes")) or 0.0 for row in run.rows) if _uses_gpus(run) else None


def _uses_gpus(run: Run) -> bool:
    return any(isinstance(row.get(_GPU_KEY), dict) for row in run.rows)


def _compute_row(row: Object) -> Object:
    """Return the row of the memory that the rank computes in."""
    gpu_row = row.get(_GPU_KEY)
    return {"phase": row.get("phase"), **gpu_row} if isinstance(gpu_row, dict) else row


def limit_bytes(run: Run) -> float | None:
    """Return the limit of the memory that a rank computes in: of its GPU, or its part of the node's limit."""
    return number(run.machine.get("gpu_memory_bytes")) if _uses_gpus(run) else _host_limit(run)


def _host_limit(run: Run) -> float | None:
    if not _uses_gpus(run) and (planned := number(run.plan.get("limit_bytes"))) is not None:
        return planned  # excludes other processes and respects shard.memory
    limit = number(run.machine.get("memory_limit_bytes"))
    world, nodes = number(run.about.get("world_size")), number(run.about.get("nodes"))
    if limit is None or not world or not nodes:
        return None
    return limit / (world / nodes)


def scaled(points: Points) -> Points:
    """Convert bytes to GiB."""
    return [(x, value / GIB) for x, value in points]


def _accounted(row: Object, category: str) -> float:
    accounted = row.get("accounted_bytes")
    return (number(accounted.get(category)) or 0.0) if isinstance(accounted, dict) else 0.0


def _sum(sizes: object) -> float:
    return sum(number(size) or 0.0 for size in sizes.values()) if isinstance(sizes, dict) else 0.0
