"""Print a summary of a run: model, data and plan at the start; speed, memory and files at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aliquot.catalogue.instances import dollars
from aliquot.config.schema import RunConfig
from aliquot.core.number_format import duration, gib, rate, short
from aliquot.observe import ledger
from aliquot.observe.console import Display
from aliquot.observe.events import RunRecord
from aliquot.observe.run_directory import RunDirectory
from aliquot.observe.throughput import Speed


def begin(display: Display, config: RunConfig, record: RunRecord, *lines: str) -> None:
    """Print model, engine and machine, then `lines`, then the plan."""
    machine, precision = record.machine, config.train.precision
    learned = "" if record.learned == record.parameters else f", of which {record.learned:,} learn"
    texts = (
        f"{record.model}, {record.parameters:,} parameters{learned}, {precision}, engine {record.engine}",
        f"{record.placement}; {machine['matmul_kernels'][precision]}, {machine['allocator']}",
        *lines,
        *(foreseen(record.plan) if record.plan else ()),
    )
    for text in texts:
        display.line(text)


def foreseen(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """Format a plan, in the form of `aliquot plan --json`: memory, time, traffic, checkpoint and disk."""
    path = "between the GPUs of each" if plan["device"] == "cuda" else "through sockets on them"
    cost = f", {dollars(plan['cost_usd'])} USD" if plan["cost_usd"] is not None else ""
    memory = f"{gib(plan['peak_bytes_per_rank'])} of {gib(plan['limit_bytes'])} a rank at most ({plan['peak_phase']})"
    if plan.get("host_phases"):
        host = f"{gib(plan['host_peak_bytes_per_rank'])} of {gib(plan['host_limit_bytes'])}"
        memory += f" of GPU memory, {host} of the machine's"
    return (
        f"plan: {memory}",
        f"plan: {short(plan['step_s'])} s a step, {plan['speed']}, {plan['bottleneck']};"
        f" {duration(plan['total_s'])} in all{cost}; rates: {plan['rates']}",
        f"plan: {rate(plan['wire_bytes_per_step'], 'B')} a step between hosts,"
        f" {rate(plan['local_bytes_per_step'], 'B')} {path};"
        f" {rate(plan['checkpoint_bytes'], 'B')} a checkpoint",
        *([f"plan: on disk {plan['disk_words']}"] if plan["disk_words"] else []),
    )


def finish(
    display: Display,
    directory: RunDirectory,
    rows: Sequence[ledger.Row],
    speed: Speed,
    sample: str | None,
    exported: Path | None,
    plan: Mapping[str, Any],
) -> None:
    """Print the summary at the end of a run, on rank 0. `rows`: the memory ledger of all ranks."""
    display.finish()
    for table in ledger.tables(rows) if rows else ():
        display.show(table)
    if sample is not None:
        display.line(f"sample:\n{sample}\n")
    if speed.mfu:
        ceiling = rate(speed.flops_per_s / speed.mfu, "FLOP/s")
        display.line(
            f"{speed.tokens_per_s:,.0f} real tokens/s on average: {rate(speed.flops_per_s, 'FLOP/s')} of the model,"
            f" {100 * speed.mfu:.0f} % of the {ceiling} that a plain matmul reached here"
        )
    if plan and speed.tokens_per_s > 0:
        error = round(100 * (plan["tokens_per_s"] / speed.tokens_per_s - 1))
        text = f"{abs(error)} % too {'many' if error > 0 else 'few'}" if error else "as many as came"
        display.line(f"planned were {plan['speed']}: {text} ({plan['rates']})")
    display.line(f"run directory  {directory.path}")
    display.line(f"metrics        {directory.metrics}")
    display.line(f"report         {directory.report}")
    if exported is not None:
        display.line(f"model          {exported}   (aliquot generate {exported} --prompt ...)")
