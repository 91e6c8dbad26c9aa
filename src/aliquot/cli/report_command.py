"""aliquot report: an HTML page of one run, or of several runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aliquot.cli.options import Debug
from aliquot.cli.terminal import one_line_errors


def command(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories, runs/NAME.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write. Default: RUN_DIR/report.html; for several runs ./comparison.html."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write one self-contained HTML page about one or more runs.

    A run may be complete, running or killed. Several runs are compared side by side.
    """
    with one_line_errors(debug):
        from aliquot.core.errors import writing
        from aliquot.observe.report.page import write_report

        page = out or (run_dirs[0] / "report.html" if len(run_dirs) == 1 else Path("comparison.html"))
        with writing(page):
            write_report(run_dirs, page)
    print(page)
