"""Print a summary of a run: model, data and plan at the start; loss, speed, memory and files at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from aliquot.checkpoint.directories import complete_directories
from aliquot.config.schema import RunConfig
from aliquot.core.number_format import dollars, duration, gib, rate, short
from aliquot.observe import ledger
from aliquot.observe.console import Display
from aliquot.observe.events import RunRecord
from aliquot.observe.report import run_facts
from aliquot.observe.report.memory_figures import top_bytes
from aliquot.observe.report.read_run import Run, last, number, read_run
from aliquot.observe.run_directory import RunDirectory

_MIN_TIMED_STEPS = 10  # shorter runs do not show whether the plan's speed is wrong


def begin(display: Display, config: RunConfig, record: RunRecord, *lines: str) -> None:
    """Print model, engine and machine, then `lines`, then the plan."""
    machine, precision, kind = record.machine, config.train.chosen_precision, config.train.chosen_checkpointing
    learned = "" if record.learned == record.parameters else f", of which {record.learned:,} learn"
    computed = f"{precision} and fp8" if config.train.fp8 else precision
    compiled = ", compiled layers" if config.train.compile == "layers" else ""
    recomputes = "" if kind == "none" else f", {kind} activation checkpointing"
    texts = (
        f"{record.model}, {record.parameters:,} parameters{learned}, {computed}, engine {record.engine}{compiled}"
        f"{recomputes}",
        record.placement,
        *lines,
        *(foreseen(record.plan) if record.plan else ()),
    )
    for text in texts:
        display.line(text)
    display.detail(f"matrix products by {machine['matmul_kernels'][precision]}, memory from {machine['allocator']}")


def foreseen(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """Format a plan, in the form of `aliquot plan --json`: memory, time, traffic, checkpoint and disk."""
    path = "between the GPUs of each" if plan["device"] == "cuda" else "through sockets on them"
    wire, local = plan["wire_bytes_per_step"], plan["local_bytes_per_step"]
    sent = f"{rate(wire, 'B')} a step between hosts, {rate(local, 'B')} {path}; " if wire or local else ""
    cost = f", {dollars(plan['cost_usd'])} USD" if plan["cost_usd"] is not None else ""
    memory = f"{gib(plan['peak_bytes_per_rank'])} of {gib(plan['limit_bytes'])} a rank at most ({plan['peak_phase']})"
    if plan.get("host_phases"):
        host = f"{gib(plan['host_peak_bytes_per_rank'])} of {gib(plan['host_limit_bytes'])}"
        memory += f" of GPU memory, {host} of the machine's"
    return (
        f"plan: {memory}",
        f"plan: {short(plan['step_s'])} s a step, {plan['speed']}, {plan['bottleneck']};"
        f" {duration(plan['total_s'])} in all{cost}; rates: {plan['rates']}",
        f"plan: {sent}{rate(plan['checkpoint_bytes'], 'B')} a checkpoint",
        *([f"plan: on disk {plan['disk_words']}"] if plan["disk_words"] else []),
    )


def finish(
    display: Display,
    directory: RunDirectory,
    rows: Sequence[ledger.Row],
    speed: float,
    sample: str | None,
    exported: Path | None,
    is_chat: bool,
) -> None:
    """Print the sample and the summary at the end of a run, on rank 0.

    Args:
        rows: the memory ledger of all ranks.
        speed: in tokens per second.
        is_chat: whether the model was trained on chats.
    """
    display.finish()
    for table in ledger.tables(rows) if rows else ():
        display.detail(table)
    if sample is not None:
        display.line(f"sample:\n{sample}\n")
    for label, text in summary(read_run(directory.path), directory, speed, exported, is_chat, time.time()):
        display.line(f"{label:17}{text}")


def summary(
    run: Run, directory: RunDirectory, speed: float, exported: Path | None, is_chat: bool, now: float
) -> list[tuple[str, str]]:
    """Return the summary of a run that has just finished, as (label, text); other arguments are those of `finish`."""
    epochs, tokens = run.points("epoch"), run.points("tokens")
    in_epochs = f", epoch {last(epochs):.3g}" if epochs else ""
    done, saved = run_facts.steps_done(run), complete_directories(directory.checkpoints)
    steps, training_s = f"step {done:,.0f} of {run_facts.total_steps(run) or 0:,.0f}", run.training_s(now)
    planned = number(run.plan.get("peak_bytes_per_rank"))
    peak = gib(top_bytes(run) or 0.0)
    use = f"aliquot {'chat' if is_chat else 'generate --prompt TEXT'} {quote(str(exported))}"
    export = f"aliquot export {quote(str(saved[-1]))} {quote(str(directory.export))}" if saved else ""
    lines = [
        ("finished", f"{steps}{in_epochs}, in {duration(training_s)}"),
        ("training loss", run_facts.change(run.points("loss"))),
        *(("evaluation loss", _evaluation(run, name)) for name in run.evaluation_sets),
        ("tokens", f"{last(tokens):,.0f} at {speed:,.0f} tokens/s" if tokens and speed > 0 else ""),
        ("speed", run_facts.speed_beside_plan(run.plan, speed) if done >= _MIN_TIMED_STEPS else None),
        ("peak memory", f"{peak} a rank{f', planned {gib(planned)}' if planned else ''}" if run.rows else ""),
        ("cost", run_facts.cost(run, training_s)),
        ("report", str(directory.report)),
        ("model", str(exported or "")),
        ("checkpoint", str(saved[-1]) if saved and exported is None else ""),
        ("next", export if exported is None else use),
    ]
    return [(label, text) for label, text in lines if text]


def _evaluation(run: Run, name: str) -> str:
    """Format the change of the loss on the evaluation set `name`, and its last perplexity."""
    loss, perplexity = (run.evaluated(metric, name) for metric in ("loss", "perplexity"))
    ending = f", perplexity {last(perplexity):,.2f}" if perplexity else ""
    return f"{f'{name}: ' if name else ''}{run_facts.change(loss)}{ending}"
