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


def begin(display: Display, config: RunConfig, about: Mapping[str, Any], *lines: str) -> None:
    """What is trained, with what, and where; then `lines`."""
    machine, precision = about["machine"], config.train.precision
    display.header(
        f"{about['model']}, {about['parameters']:,} parameters, {precision}, engine {about['engine']}",
        f"{about['placement']}; {machine['matmul_kernels'][precision]}, {machine['allocator']}",
        *lines,
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
    """Show the summary, with the ledger's rows of all ranks. Rank 0 alone calls it."""
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
    display.line(f"report         {directory.report}")
    if exported is not None:
        display.line(f"model          {exported}   (aliquot generate {exported} --prompt ...)")
