"""Print a summary of a run: model, data and plan at the start; loss, speed, memory and files at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from aliquot.catalogue.instances import dollars
from aliquot.checkpoint.directories import complete_directories
from aliquot.config.schema import RunConfig
from aliquot.core.number_format import duration, gib, rate, short
from aliquot.observe import ledger
from aliquot.observe.console import Display
from aliquot.observe.events import RunRecord
from aliquot.observe.report import run_facts
from aliquot.observe.report.memory_figures import top_bytes
from aliquot.observe.report.read_run import Run, evaluation_sets, number, read_run
from aliquot.observe.run_directory import RunDirectory
from aliquot.observe.throughput import Speed

_MIN_TIMED_STEPS = 10  # shorter runs do not show whether the plan's speed is wrong


def begin(display: Display, config: RunConfig, record: RunRecord, *lines: str) -> None:
    """Print model, engine and machine, then `lines`, then the plan."""
    machine, precision = record.machine, config.train.precision
    learned = "" if record.learned == record.parameters else f", of which {record.learned:,} learn"
    computed = f"{precision} and fp8" if config.train.fp8 else precision
    compiled = ", compiled layers" if config.train.compile == "layers" else ""
    texts = (
        f"{record.model}, {record.parameters:,} parameters{learned}, {computed}, engine {record.engine}{compiled}",
        f"{record.placement}; {machine['matmul_kernels'][precision]}, {machine['allocator']}",
        *lines,
        *(foreseen(record.plan) if record.plan else ()),
    )
    for text in texts:
        display.line(text)


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


@dataclass(frozen=True)
class Outcome:
    """The results of a process that has finished a run."""

    rows: Sequence[ledger.Row]  # the memory ledger of all ranks
    speed: Speed
    sample: str | None
    exported: Path | None
    is_chat: bool  # whether the model was trained on chats


def finish(display: Display, directory: RunDirectory, outcome: Outcome) -> None:
    """Print the sample and the summary at the end of a run, on rank 0."""
    display.finish()
    for table in ledger.tables(outcome.rows) if outcome.rows else ():
        display.detail(table)
    if outcome.sample is not None:
        display.line(f"sample:\n{outcome.sample}\n")
    for label, text in summary(read_run(directory.path), directory, outcome, time.time()):
        display.line(f"{label:17}{text}")


def summary(run: Run, directory: RunDirectory, outcome: Outcome, now: float) -> Iterator[tuple[str, str]]:
    """Yield the summary of a run that has just finished, as (label, text)."""
    epochs, tokens, speed = run.points("epoch"), run.points("tokens"), outcome.speed.tokens_per_s
    in_epochs = f", epoch {epochs[-1][1]:.3g}" if epochs else ""
    steps = f"step {run_facts.steps_done(run):,.0f} of {run_facts.total_steps(run) or 0:,.0f}"
    yield "finished", f"{steps}{in_epochs}, in {duration(run.training_s(now))}"
    if losses := run.points("loss"):
        yield "training loss", run_facts.change(losses)
    for name in evaluation_sets(run.evaluated):
        prefix = f"eval_{name}_" if name else "eval_"
        loss, perplexity = (run.points(f"{prefix}{key}", run.evaluated) for key in ("loss", "perplexity"))
        ending = f", perplexity {perplexity[-1][1]:,.2f}" if perplexity else ""
        yield "evaluation loss", f"{f'{name}: ' if name else ''}{run_facts.change(loss)}{ending}"
    if tokens and speed > 0:
        yield "tokens", f"{tokens[-1][1]:,.0f} at {speed:,.0f} tokens/s"
    is_timed = run_facts.steps_done(run) >= _MIN_TIMED_STEPS
    if is_timed and (text := run_facts.speed_beside_plan(run.plan, speed)):
        yield "speed", text
    if run.rows:
        planned = number(run.plan.get("peak_bytes_per_rank"))
        peak = gib(max(map(top_bytes, run.rows)))
        yield "peak memory", f"{peak} a rank{f', planned {gib(planned)}' if planned else ''}"
    if text := run_facts.cost(run, run.training_s(now)):
        yield "cost", text
    yield "report", str(directory.report)
    if outcome.exported is not None:
        yield "model", str(outcome.exported)
        command = "chat" if outcome.is_chat else "generate --prompt TEXT"
        yield "next", f"aliquot {command} {quote(str(outcome.exported))}"
    elif saved := complete_directories(directory.checkpoints):
        yield "checkpoint", str(saved[-1])
        yield "next", f"aliquot export {quote(str(saved[-1]))} {quote(str(directory.export))}"
