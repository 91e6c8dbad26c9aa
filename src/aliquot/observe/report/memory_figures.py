"""The pictures of a run's memory: by rank over the phases, and over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aliquot.observe.ledger import PHASES
from aliquot.observe.number_format import compact, gib, significant
from aliquot.observe.report.figure import Figure, Key, Table
from aliquot.observe.report.read_run import Object, Points, Run, number
from aliquot.observe.report.series import hints_of, hints_of_layers, resumes, without_steps
from aliquot.observe.report.svg import PHASES_HEIGHT, Level, Line, area_chart, line_chart

GIB = 2**30
REST = "process, libraries, allocator"
_MOST_RANKS = 4
_ON_GPU = "gpu"  # the key of a row under which a GPU's memory is told
_LAYERS = ("weights", "gradients", "moments", "gathered", "activations", "shared")


@dataclass(frozen=True)
class _Kind:
    """Of memory: a GPU's, or the machine's."""

    suffix: str  # of the figure's name
    of: str  # for titles
    rest: str
    ends: Mapping[str, str]  # more columns of the table, and their keys
    phases: str  # of the plan
    limit: float | None

    def top(self, row: Object) -> float:
        return number(row.get("peak_bytes")) or 0.0

    def planned(self, run: Run, row: Object) -> float | None:
        """What the plan foresaw for the row's phase, shared pages divided as in `top`; None: it foresaw nothing."""
        ranks = number(run.plan.get("ranks_per_node")) or 1.0
        phases = run.plan.get(self.phases)
        for phase in phases if isinstance(phases, list) else ():
            if isinstance(phase, dict) and phase.get("name") == row.get("phase"):
                return _sum(phase.get("private_bytes")) + _sum(phase.get("shared_bytes")) / ranks
        return number(row.get("planned_bytes"))

    def levels(self, highest: float) -> list[Level]:
        """A line for the limit of a rank, unless it lies far above everything that is drawn."""
        limit = self.limit
        return [Level(f"limit {gib(limit)}", limit / GIB)] if limit is not None and limit <= 2.5 * highest else []


def _of_machine(run: Run) -> _Kind:
    phases = "host_phases" if _on_gpus(run) else "phases"
    ends = {"RSS at its end": "rss_bytes", "PSS at its end": "pss_bytes"}
    return _Kind("", "Memory", REST, ends, phases, _host_limit(run))


def _of_gpus(run: Run) -> _Kind:
    ends = {"tensors": "allocated_bytes", "of the allocator": "reserved_bytes", "beside": "beside_bytes"}
    return _Kind("-gpu", "GPU memory", "context, NCCL, allocator", ends, "phases", limit_bytes(run))


def memory(run: Run) -> list[Figure]:
    """A picture a rank, of the ranks that held most; where ranks compute on GPUs, one of those first."""
    if not run.rows:
        why = "ledger.json is not there: it is written after the first step, and this run has not come so far"
        return [Figure("memory", "Memory over the phases", "", missing=why)]
    ranks = sorted({int(number(row.get("rank")) or 0) for row in run.rows})
    by_rank = {rank: [row for row in run.rows if int(number(row.get("rank")) or 0) == rank] for rank in ranks}
    largest = sorted(ranks, key=lambda rank: -max(top_bytes(row) for row in by_rank[rank]))[:_MOST_RANKS]
    figures = []
    for rank in sorted(largest):
        if _on_gpus(run):
            figures.append(_memory_of(run, rank, [_gpu_of(row) for row in by_rank[rank]], _of_gpus(run)))
        figures.append(_memory_of(run, rank, by_rank[rank], _of_machine(run)))
    return figures


def _memory_of(run: Run, rank: int, rows: Sequence[Object], kind: _Kind) -> Figure:
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
    foreseen = [kind.planned(run, row) for row in rows]
    planned = [(float(i), value) for i, value in enumerate(foreseen) if value is not None]
    lines = [Line("plan", scaled(planned), 6, "dashed plan")] if planned else []
    limit, levels = kind.limit, kind.levels(max([*tops, *(y for _, y in planned)]))
    at = tops.index(max(tops))
    says = f"Rank {rank} held at most {gib(tops[at])}, in the phase “{names[at]}”, of which the legend tells the parts"
    says += f"; a rank may have {gib(limit)}" if limit is not None else ""
    says += ", far above this picture." if limit is not None and not levels else "."
    says += "" if planned else " No plan was recorded, so its line is missing."
    drawn = [(layer, [value / GIB for value in values], colour) for layer, values, colour in layers]
    xs = [float(i) for i in range(len(rows))]
    svg = area_chart(xs, drawn, significant, names=names, levels=levels, lines=lines)
    head = ("phase", *(layer for layer, _, _ in layers), "most", "plan", *kind.ends)
    body = [
        [
            names[i], *(gib(values[i]) for _, values, _ in layers), gib(tops[i]),
            "none" if (value := foreseen[i]) is None else gib(value),
            *(gib(number(row.get(key)) or 0.0) for key in kind.ends.values()),
        ]
        for i, row in enumerate(rows)
    ]  # fmt: skip
    keys = [Key(layer, colour, "area", gib(values[at])) for layer, values, colour in layers]
    keys += [Key("plan", 6, "dashed")] if planned else []
    return Figure(
        f"memory{kind.suffix}-{rank}", f"{kind.of} of rank {rank}", says, svg, keys=keys,
        unit="GiB, the most during each phase", height=PHASES_HEIGHT, table=Table(head, body),
        hints=hints_of_layers(xs, layers, names, gib),
    )  # fmt: skip


def memory_over_steps(run: Run) -> list[Figure]:
    of_host = _over_steps(run, "memory_bytes", _of_machine(run))
    return [_over_steps(run, "gpu_memory_bytes", _of_gpus(run)), of_host] if _on_gpus(run) else [of_host]


def _over_steps(run: Run, key: str, kind: _Kind) -> Figure:
    name, title = f"memory{kind.suffix}-steps", f"{kind.of} while training"
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
    """The most that the rank held in the phase: of its GPU, or of the machine's memory, shared pages divided among
    those who share them."""
    return number(_gpu_of(row).get("peak_bytes")) or 0.0


def host_top_bytes(run: Run) -> float | None:
    """The most that a rank on a GPU held of the machine's memory beside; None: ranks compute on CPUs."""
    return max(number(row.get("peak_bytes")) or 0.0 for row in run.rows) if _on_gpus(run) else None


def _on_gpus(run: Run) -> bool:
    return any(isinstance(row.get(_ON_GPU), dict) for row in run.rows)


def _gpu_of(row: Object) -> Object:
    """The row as that of the memory that the rank computes in."""
    told = row.get(_ON_GPU)
    return {"phase": row.get("phase"), **told} if isinstance(told, dict) else row


def limit_bytes(run: Run) -> float | None:
    """What one rank may have of the memory that it computes in: a GPU, or its part of the machine's limit."""
    return number(run.machine.get("gpu_memory_bytes")) if _on_gpus(run) else _host_limit(run)


def _host_limit(run: Run) -> float | None:
    if not _on_gpus(run) and (planned := number(run.plan.get("limit_bytes"))) is not None:
        return planned  # what shard.memory and the processes beside ranks leave
    limit = number(run.machine.get("memory_limit_bytes"))
    world, nodes = number(run.about.get("world_size")), number(run.about.get("nodes"))
    if limit is None or not world or not nodes:
        return None
    return limit / (world / nodes)


def scaled(points: Points) -> Points:
    """Bytes as GiB."""
    return [(x, value / GIB) for x, value in points]


def _accounted(row: Object, category: str) -> float:
    accounted = row.get("accounted_bytes")
    return (number(accounted.get(category)) or 0.0) if isinstance(accounted, dict) else 0.0


def _sum(sizes: object) -> float:
    return sum(number(size) or 0.0 for size in sizes.values()) if isinstance(sizes, dict) else 0.0
