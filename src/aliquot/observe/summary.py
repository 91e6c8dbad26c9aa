"""The last words of a run: what memory it took, how fast it was, what it learned to say, and where everything lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aliquot.config.schema import RunConfig
from aliquot.observe import ledger
from aliquot.observe.console import Display
from aliquot.observe.meter import Speed
from aliquot.observe.run_directory import RunDirectory
from aliquot.observe.text import rate


def begin(display: Display, model: str, numel: int, config: RunConfig, engine: str, machine: Mapping[str, Any]) -> None:
    """What is trained, with what, and where."""
    display.header(
        f"{model}, {numel:,} parameters, {config.train.precision}, engine {engine}",
        f"{machine['placement']}; {machine['matmul_kernels'][config.train.precision]}, {machine['allocator']}",
    )


def finish(
    display: Display,
    directory: RunDirectory,
    rows: Sequence[ledger.Row],
    machine: Mapping[str, Any],
    speed: Speed,
    sample: str | None,
    exported: Path | None,
    plan: Mapping[str, Any],
) -> None:
    """Write ledger.json from the rows of all ranks and show the summary. Rank 0 alone calls it."""
    ledger.write(directory.ledger, rows, machine, plan)
    display.finish()
    display.show(ledger.table(rows))
    if sample is not None:
        display.line(f"sample:\n{sample}\n")
    if speed.mfu:
        ceiling = rate(speed.flops_per_s / speed.mfu, "FLOP/s")
        display.line(
            f"{speed.tokens_per_s:,.0f} real tokens/s: {rate(speed.flops_per_s, 'FLOP/s')} of the model,"
            f" {100 * speed.mfu:.0f} % of the {ceiling} that a plain matmul reached here at the start"
        )
    if plan and speed.tokens_per_s > 0:
        wrong = 100 * (plan["tokens_per_s"] / speed.tokens_per_s - 1)
        display.line(f"planned were {plan['tokens_per_s']:,.0f} tokens/s ({wrong:+.0f} %; {plan['rates']})")
    display.line(f"run directory  {directory.path}")
    display.line(f"metrics        {directory.metrics}")
    if exported is not None:
        display.line(f"model          {exported}   (aliquot generate {exported} --prompt ...)")
