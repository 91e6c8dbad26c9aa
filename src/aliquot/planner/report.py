"""Format a plan for people: texts and tables on the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from aliquot.catalogue.instances import SPOT_FRACTION, catalogue, instance
from aliquot.core.number_format import byte_size, count_of, dollars, gib
from aliquot.planner.plan import PhaseMemory, Plan
from aliquot.planner.planned_machine import DISK_BYTES_PER_S
from aliquot.planner.settings_search import Candidate

_LABEL = 16  # characters that a label takes in a line

# Columns of the memory table, and the categories that each column adds up. --json shows all categories.
COLUMNS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "moments": ("moments",),
    "gathered": ("gathered",),
    "activations": ("activations", "loss"),
    "other": ("process", "data", "buffers", "streamed", "snapshot", "allocator"),
}


@dataclass(frozen=True)
class Lines:
    """Lines with a label of up to 15 characters and a text. On a terminal, the text wraps in a separate column."""

    lines: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not options.is_terminal:
            yield Text("\n".join(self.lines))
            return
        grid = Table.grid()
        grid.add_column(width=_LABEL, no_wrap=True)
        grid.add_column()
        for line in self.lines:
            grid.add_row(Text(line[:_LABEL]), Text(line[_LABEL:]))
        yield grid


def summary(plan: Plan, problems: Sequence[str], machine: str, assumed: str) -> RenderableType:
    """Format the run, whether it fits, its memory by phase, and lines for traffic, time and cost."""
    ranks, threads, kind = plan.ranks_per_node, plan.threads_per_rank, plan.gradient_checkpointing
    placement = f"{plan.nodes} x {count_of(ranks, 'rank')} x {count_of(threads, 'thread')}"
    compiled = ", compiled layers" if plan.compile == "layers" else ""
    recomputes = "" if kind == "none" else f", {kind} activation checkpointing"
    fp8 = " and fp8 (planned as bf16)" if plan.fp8 else ""
    trained = "" if plan.trained_parameters in (None, plan.parameters) else f" ({plan.trained_parameters:,} trained)"
    base = "" if plan.base == "bf16" else f" with frozen layers in {plan.base}"
    head = (
        f"{plan.model}, {plan.parameters:,} parameters{trained}, {plan.precision}{base}{fp8}, engine {plan.engine}"
        f"{compiled}{recomputes}, {placement} on {machine} ({plan.device})"
    )
    on_host = "between the GPUs of a host" if plan.device == "cuda" else "on a host through sockets"
    lines = [
        f"between hosts   {byte_size(plan.wire_bytes_per_step)} a step;"
        f" {on_host} {byte_size(plan.local_bytes_per_step)}",
        f"disk            {byte_size(plan.disk_read_bytes)} read at start, {_checkpoints(plan)}",
        *([f"micro-batches   of {plan.micro_batch} sequences"] if plan.micro_batch > 1 else []),
        *([f"on disk         {plan.disk_words}"] if plan.disk_words else []),
        *([f"copied layers   {plan.copied_words}"] if plan.copied_words else []),
        *([f"replicated      on {plan.nodes} nodes, which send gradients alone"] if plan.replicate == "nodes" else []),
        *([f"kept whole      {plan.unsharded.words} within a step, as they fit"] if plan.unsharded else []),
        f"step            {_seconds(plan.step_s)}, {plan.bottleneck}",
        f"speed           {plan.speed} ({assumed})",
        *([f"many nodes      {plan.losses.words}"] if plan.nodes > 1 else []),
        *_run_lines(plan),
        *(f"note            {line}" for line in plan.concerns),
        *(
            [f"estimates       of time and money may be off by a factor of {plan.off_by:.2g} either way"]
            if plan.off_by > 1
            else []
        ),
        f"rates           {plan.rates}",
        *(
            [f"oneDNN kernels  at most {plan.kernel_shapes} a rank, one per shape of a matrix product"]
            if plan.kernel_shapes
            else []
        ),
    ]
    if problems:  # `plan.fits` is about memory alone
        verdict = Text("does not fit: " + "; ".join(problems), style="red")
    else:
        where = " of GPU memory" if plan.host_phases else ""
        host_words = f", {gib(plan.host_peak_bytes_per_rank)} of {gib(plan.host_limit_bytes)} of the machine's"
        words = f"fits: {gib(plan.peak_bytes_per_rank)} of {gib(plan.limit_bytes)}{where} a rank"
        verdict = Text(words + (host_words if plan.host_phases else ""), style="green")
    tables = [phases(plan, plan.phases, "GPU memory" if plan.host_phases else "")]
    tables += [phases(plan, plan.host_phases, "the machine's memory")] if plan.host_phases else []
    return Group(Text(head), verdict, *(part for table in tables for part in (Text(), table)), Text(), Lines(lines))


def fewest(plan: Plan) -> str:
    """Return a line about the plan of an elastic run on its minimum number of nodes."""
    return (
        f"{f'with {plan.nodes} left':16}{gib(plan.peak_bytes_per_rank)} of {gib(plan.limit_bytes)} a rank,"
        f" {_seconds(plan.step_s)} a step"
    )


def phases(plan: Plan, shown: Sequence[PhaseMemory], memory: str) -> Table:
    """Tabulate the memory of a rank by category, with a row for each phase. `memory` names the kind of memory."""
    totals = {phase.name: phase.per_rank(plan.ranks_per_node) for phase in shown}
    peak = max(totals, key=lambda name: totals[name])
    large = totals[peak] >= 8 << 30
    unit, divisor, form = ("GiB", 2**30, ",.2f") if large else ("MiB", 2**20, ",.0f")
    subject = f"{unit} of {memory} of a rank" if memory else f"{unit} of a rank"
    title = f"{subject}, planned: private memory, and its share of shared memory"
    columns = {"total": [*totals.values()], **memory_columns(plan, shown)}
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("phase", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for phase, *sizes in zip(totals, *columns.values(), strict=True):
        row = [f"{size / divisor:{form}}" if size else "" for size in sizes]
        table.add_row(phase, *row, style="bold" if phase == peak else None)
    return table


def memory_columns(plan: Plan, shown: Sequence[PhaseMemory]) -> dict[str, Sequence[float]]:
    """Return the bytes of a rank in each phase, by the columns of the memory table; without empty columns."""
    columns: dict[str, Sequence[float]] = {
        column: [sum(phase.private_bytes.get(name, 0) for name in names) for phase in shown]
        for column, names in COLUMNS.items()
    }
    columns["shared"] = [sum(phase.shared_bytes.values()) / plan.ranks_per_node for phase in shown]
    return {column: sizes for column, sizes in columns.items() if any(sizes)}


def alternatives(candidates: Sequence[Candidate], now: Plan) -> Table:
    """Tabulate other settings, a row for each candidate."""
    table = Table(title="other settings", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("step", "time", "memory", "USD", "set"):
        table.add_column(column, no_wrap=column != "set")
    for candidate in candidates:
        plan = candidate.plan
        cost = "" if plan.cost_usd is None else dollars(plan.cost_usd)
        change = f"{100 * (plan.step_s / now.step_s - 1):+.0f} %"
        table.add_row(_seconds(plan.step_s), change, gib(plan.peak_bytes_per_rank), cost, candidate.arguments)
    return table


def _run_lines(plan: Plan) -> list[str]:
    """Describe the whole run: steps, evaluations, saves, export and cost."""
    if not plan.steps:
        return ["whole run       not known before the data are read: set train.max_steps", *_cost_lines(plan)]
    besides = [
        f"reference log-probabilities {_seconds(plan.reference_s)}" if plan.reference_s else "",
        f"{count_of(plan.evaluations, 'evaluation')} of {_seconds(plan.evaluation_s)}" if plan.evaluations else "",
        f"{count_of(plan.uncounted_evaluations, 'evaluation that is', 'evaluations that are')} not counted"
        if plan.uncounted_evaluations
        else "",
        f"{count_of(plan.saves_beside, 'save')} beside them, waiting {_seconds(plan.stall_s)}" if plan.stall_s else "",
        f"{count_of(plan.saves, 'save')} of {_seconds(plan.save_s)}",
        f"the export {_seconds(plan.export_s)}" if plan.export_s else "",
    ]
    rate = plan.storage_bytes_per_s
    if plan.storage_measured:
        storage = f"a disk of {rate / 1e9:.2g} GB/s, measured"
    elif rate < DISK_BYTES_PER_S * plan.nodes:
        storage = f"a file system of {rate / 1e9:.3g} GB/s, cluster.storage"
    else:
        storage = f"a disk of {DISK_BYTES_PER_S / 1e9:g} GB/s a node, assumed"
    tokens = plan.steps * plan.tokens_per_step
    lines = [
        f"whole run       {count_of(plan.steps, 'step')}, {tokens:,.0f} tokens, {_seconds(plan.total_s)}",
        f"beside steps    {', '.join(filter(None, besides))} ({storage})",
    ]
    return lines + _cost_lines(plan)


def _cost_lines(plan: Plan) -> list[str]:
    """Describe the cost of the whole run, or if its length is unknown the price of an hour and of a billion tokens."""
    if plan.instance is None or plan.usd_per_hour is None:
        return []
    ec2, fees = instance(plan.instance), plan.fees_usd_per_hour
    on_demand = _amount(plan, plan.usd_per_hour + fees)
    with_fees = f", with {fees:.2f} USD/h for the cluster and FSx" if fees else ""
    spot_usd = ec2.spot_price() if ec2.on_spot else None
    assumed = "" if ec2.spot_usd_per_hour is not None else f" (factor {SPOT_FRACTION}, assumed)"
    on_spot = "" if spot_usd is None else f", about {_amount(plan, plan.nodes * spot_usd + fees)} on spot{assumed}"
    return [f"cost            {on_demand} on demand ({catalogue().source}{with_fees}){on_spot}"]


def _amount(plan: Plan, usd_per_hour: float) -> str:
    if plan.steps:
        return f"{dollars(usd_per_hour * plan.total_s / 3600)} USD"
    a_billion = usd_per_hour / 3600 * 1e9 / plan.tokens_per_s
    return f"{dollars(usd_per_hour)} USD an hour, {dollars(a_billion)} USD per billion tokens"


def _checkpoints(plan: Plan) -> str:
    """Describe the interval of checkpoints, and their size on disk."""
    is_at_end = plan.save_steps == 0 or 0 < plan.steps <= plan.save_steps
    every = "" if is_at_end else " every step" if plan.save_steps == 1 else f" every {plan.save_steps:,} steps"
    most, size = plan.checkpoints, byte_size(plan.checkpoints * plan.checkpoint_bytes)
    together = f", at most {most} at once: {size}" if most > 1 else ""
    return f"{byte_size(plan.checkpoint_bytes)} a checkpoint{every}{together}"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"
