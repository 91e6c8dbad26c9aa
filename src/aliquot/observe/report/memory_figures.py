"""The memory figures of a run: memory of the ranks over the phases, and over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aliquot.core.number_format import gib, short
from aliquot.observe.ledger import PHASES
from aliquot.observe.report.charts import Figure, Layer, Line, Table
from aliquot.observe.report.figures import resumes, without_steps
from aliquot.observe.report.read_run import Object, Run, as_object, last, number, objects

GIB = 2**30
_in_gib = "{:.2f} GiB".format
_GPU_KEY = "gpu"  # key of GPU memory in a row of the ledger
_NO_LEDGER = Figure(
    "memory-phases", "Memory over the phases", "", "there is no ledger.json: a run writes it after its first step",
    "GiB", short, short,
)  # fmt: skip
_CATEGORIES = ("weights", "gradients", "moments", "gathered", "activations", "shared")


@dataclass(frozen=True)
class _MemoryKind:
    """How to draw one kind of memory: GPU memory or host memory."""

    suffix: str  # suffix of the figure's name
    title: str
    metric: str  # key in the metrics of a logged step
    rest: str  # label of memory outside the known categories
    ends: Mapping[str, str]  # further columns of the table, and their keys
    phases: str  # key in the plan
    limit: float | None

    def planned(self, run: Run, row: Object) -> float | None:
        """Return the planned bytes of the phase of `row`, including a share of shared pages; None without a plan."""
        ranks = number(run.plan.get("ranks_per_node")) or 1.0
        for phase in objects(run.plan.get(self.phases)):
            if phase.get("name") == row.get("phase"):
                return _sum(phase.get("private_bytes")) + _sum(phase.get("shared_bytes")) / ranks
        return number(row.get("planned_bytes"))

    def levels(self, highest: float) -> dict[str, float]:
        """Return a line at the limit of a rank, unless the limit is far above the drawing."""
        limit = self.limit
        return {f"limit {gib(limit)}": limit / GIB} if limit is not None and limit <= 2.5 * highest else {}


def _kinds(run: Run) -> list[_MemoryKind]:
    """Return the kinds of memory to draw: GPU memory, if ranks compute on GPUs, then host memory."""
    ends = {"RSS at its end": "rss_bytes", "PSS at its end": "pss_bytes"}
    phases = "host_phases" if _uses_gpus(run) else "phases"
    rest = "process, libraries, allocator"
    host = _MemoryKind("", "Memory", "memory_bytes", rest, ends, phases, _host_limit(run))
    if not _uses_gpus(run):
        return [host]
    ends = {"tensors": "allocated_bytes", "of the allocator": "reserved_bytes", "beside": "beside_bytes"}
    rest = "context, NCCL, allocator"
    return [_MemoryKind("-gpu", "GPU memory", "gpu_memory_bytes", rest, ends, "phases", limit_bytes(run)), host]


def memory(run: Run) -> list[Figure]:
    """Draw memory by phase, each phase for the rank with the most, and by step. GPU memory comes before host memory."""
    phases = [_over_phases(run, kind) for kind in _kinds(run)] if run.rows else [_NO_LEDGER]
    return [*phases, *(_over_steps(run, kind) for kind in _kinds(run))]


def _over_phases(run: Run, kind: _MemoryKind) -> Figure:
    all_rows = [_compute_row(row) for row in run.rows] if kind.suffix else run.rows
    phase_rows = [rows for phase in PHASES if (rows := [row for row in all_rows if row["phase"] == phase])]
    rows = [max(ranks, key=_peak) for ranks in phase_rows]
    names, tops = [str(row["phase"]) for row in rows], [_peak(row) for row in rows]
    sizes = {
        category: [number(as_object(row.get("accounted_bytes")).get(category)) or 0.0 for row in rows]
        for category in _CATEGORIES
    }
    rest = [max(0.0, top - sum(values[i] for values in sizes.values())) for i, top in enumerate(tops)]
    at = tops.index(max(tops))
    layers = [
        Layer(category, [value / GIB for value in values], colour, gib(values[at]))
        for category, values, colour in [(kind.rest, rest, 7), *((*item, i) for i, item in enumerate(sizes.items()))]
        if any(values) or category == kind.rest
    ]
    planned = [kind.planned(run, row) for row in rows]
    plan = [(i + 0.5, value / GIB) for i, value in enumerate(planned) if value is not None]
    levels = kind.levels(max([*tops, *(value for value in planned if value is not None)]))
    limit = (
        ""
        if kind.limit is None
        else f"; a rank may have {gib(kind.limit)}{'' if levels else ', far above this picture'}"
    )
    says = (
        f"The largest rank held at most {gib(tops[at])}, in the phase “{names[at]}”; the legend shows its parts{limit}."
        f"{'' if plan else ' No plan was recorded, so its line is missing.'}"
    )
    body = [
        [
            names[i], *(_in_gib(layer.values[i]) for layer in layers),
            gib(tops[i]), gib(min(map(_peak, phase_rows[i]))),
            "none" if (value := planned[i]) is None else gib(value),
            *(gib(number(row.get(key)) or 0.0) for key in kind.ends.values()),
        ]
        for i, row in enumerate(rows)
    ]  # fmt: skip
    head = ("phase", *(layer.name for layer in layers), "largest rank", "smallest rank", "plan", *kind.ends)
    return Figure(
        f"memory{kind.suffix}-phases", f"{kind.title} over the phases", says, "",
        "GiB of the largest rank, the most during each phase", short, _in_gib,
        [Line("plan", plan, 6, "dashed plan")], names, layers, levels=levels, x="phase", other_table=Table(head, body),
    )  # fmt: skip


def _over_steps(run: Run, kind: _MemoryKind) -> Figure:
    lists = run.number_lists(kind.metric)
    smallest = [(step, min(sizes) / GIB) for step, sizes in lists]
    largest = [(step, max(sizes) / GIB) for step, sizes in lists]
    middle = largest[len(largest) // 2][1] if largest else 0.0
    grown = last(largest) - middle
    more = f"{_in_gib(grown)} more" if grown > 0.02 * last(largest) else "not more"
    says = (
        f"The largest rank had {_in_gib(last(largest))} at step {max(dict(largest), default=0.0):,.0f}, {more} than in"
        " the middle of the run."
    )
    return Figure(
        f"memory{kind.suffix}-steps", f"{kind.title} while training", says, without_steps(run),
        "GiB of a rank: private memory and its share of shared memory", short, _in_gib,
        [
            Line("largest rank", largest, 0),
            Line("smallest rank", smallest if smallest != largest else [], 4, "dashed"),
        ],
        from_zero=True, levels=kind.levels(GIB * max((size for _, size in largest), default=0.0)), marks=resumes(run),
    )  # fmt: skip


def top_bytes(run: Run) -> float | None:
    """Return the peak of the largest rank, of GPU memory or of host memory (PSS); None if nothing is recorded.

    The ledger of a run that was stopped ends with the first step; its logged steps may have more.
    """
    logged = run.number_lists("gpu_memory_bytes" if _uses_gpus(run) else "memory_bytes")
    return max([*(_peak(_compute_row(row)) for row in run.rows), *(max(sizes) for _, sizes in logged)], default=None)


def host_top_bytes(run: Run) -> float | None:
    """Return the largest peak of host memory of ranks that compute on GPUs; None if ranks compute on CPUs."""
    return max(map(_peak, run.rows)) if _uses_gpus(run) else None


def _peak(row: Object) -> float:
    return number(row.get("peak_bytes")) or 0.0


def _uses_gpus(run: Run) -> bool:
    return any(isinstance(row.get(_GPU_KEY), dict) for row in run.rows)


def _compute_row(row: Object) -> Object:
    """Return the GPU part of a ledger row if the rank computes on a GPU, otherwise the row itself."""
    gpu_row = row.get(_GPU_KEY)
    return {"phase": row.get("phase"), **gpu_row} if isinstance(gpu_row, dict) else row


def limit_bytes(run: Run) -> float | None:
    """Return the memory limit of a rank: the memory of its GPU or, on CPU, its share of the limit of the node."""
    return number(run.machine.get("gpu_memory_bytes")) if _uses_gpus(run) else _host_limit(run)


def _host_limit(run: Run) -> float | None:
    if not _uses_gpus(run) and (planned := number(run.plan.get("limit_bytes"))) is not None:
        return planned  # the planned limit excludes other processes and respects shard.memory
    limit = number(run.machine.get("memory_limit_bytes"))
    world, nodes = number(run.about.get("world_size")), number(run.about.get("nodes"))
    return limit / (world / nodes) if limit is not None and world and nodes else None


def _sum(sizes: object) -> float:
    return sum(number(size) or 0.0 for size in as_object(sizes).values())
