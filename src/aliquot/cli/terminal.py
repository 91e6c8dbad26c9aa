"""Output of commands to the terminal: errors in one line, progress of long work, tables that fit the width."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from aliquot.core.errors import StorageError, UserError, resource_error, storage_error
from aliquot.distributed.rank_errors import ERROR_LOG

if TYPE_CHECKING:
    from rich.console import Console

    from aliquot.config.schema import RunConfig

T = TypeVar("T")
_PATIENCE_S = 1.0  # without a terminal, longer work prints one line of progress
_PIPE_COLUMNS = 200  # wide enough for all columns of a table


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Show a UserError, an error of the file system and Ctrl-C as one line, and exit with the error's exit code.

    A configuration with several problems has one line for each problem.
    Other exceptions are bugs and show a traceback. With `debug`, all errors show a traceback.
    """
    try:
        with one_line_interrupt():
            yield
    except Exception as error:
        user_error = error if isinstance(error, UserError) else resource_error(error) or _file_error(error)
        if debug or user_error is None:
            raise
        for line in user_error.lines:
            _print_error(line)
        raise typer.Exit(user_error.exit_code) from None


@contextmanager
def one_line_interrupt() -> Iterator[None]:
    """Show Ctrl-C as one line, because typer would print an empty line."""
    try:
        yield
    except KeyboardInterrupt:
        if not {"RANK", ERROR_LOG} <= os.environ.keys():  # otherwise the launcher of this rank prints the line
            _print_error("stopped by SIGINT")
        raise typer.Exit(128 + signal.SIGINT) from None


def run_rank(rank: Callable[[], T], debug: bool) -> T:
    """Run `rank`, the work of this process, and report an error once, in the form that the parent process reads."""
    from aliquot.distributed.rank_errors import report_error

    with one_line_interrupt():
        try:
            return rank()
        except Exception as error:
            raise typer.Exit(report_error(error, debug=debug)) from None


def start_local_ranks(settings: RunConfig, shared: Path | None = None) -> None:
    """Run this command as local ranks and exit with their code; return if this process is itself a rank, or alone.

    The command writes no run directory, so the logs of the ranks are temporary. `shared`: a directory of all nodes.
    """
    from aliquot.distributed import launcher
    from aliquot.distributed.auto_ranks import crowding_warning, resolve_auto_ranks

    placed, reason = resolve_auto_ranks(launcher.apply_environment(settings.launch, os.environ), settings)
    if launcher.launch_mode(placed, os.environ) != "launcher":
        return
    if reason is None and (warning := crowding_warning(placed, settings)) is not None:
        print(f"aliquot: {warning}", file=sys.stderr, flush=True)
    arguments, grace_s = ["-m", "aliquot", *sys.argv[1:]], settings.checkpoint.grace_s
    with tempfile.TemporaryDirectory(prefix="aliquot-") as logs:
        code = launcher.start_ranks(placed, arguments, Path(logs), grace_s, reason is not None, shared)
    raise typer.Exit(code)


def _print_error(line: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # under torchrun, only one rank of a node prints
        print(f"aliquot: {line}", file=sys.stderr)


def _file_error(error: Exception) -> StorageError | None:
    """Convert an OSError about a file; return None for a closed pipe, which typer handles, and for connections."""
    if not isinstance(error, OSError) or error.errno is None or error.filename is None:
        return None
    return storage_error(error.strerror or str(error), error, error.filename)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that sets the description of the current work.

    A terminal shows the description. Without a terminal, stderr gets one line if the work takes longer than a second.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") as status:
        line = threading.Timer(_PATIENCE_S, lambda: print(f"aliquot: {status.status} ...", file=sys.stderr, flush=True))
        line.daemon = True
        if not console.is_terminal:
            line.start()
        try:
            yield status.update
        finally:
            line.cancel()


def print_notes(*notes: tuple[object, str]) -> None:
    """Print the text of each pair (whether there is reason to print it, text)."""
    for is_given, text in notes:
        if is_given:
            print(text)


def show_table(
    columns: Mapping[str, Sequence[str]],
    optional: Sequence[str],
    left_aligned: Collection[str],
    title: str | None = None,
    console: Console | None = None,
) -> None:
    """Print a table that is no wider than the terminal, because rich would truncate numbers.

    Args:
        columns: the cells of each column by its heading.
        optional: headings of columns to omit, in this order, until the table fits. A line below names these columns.
        left_aligned: headings of left-aligned columns; other columns are right-aligned.
    """
    from rich.console import Console
    from rich.table import Table

    console = console or Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_PIPE_COLUMNS, file=console.file)
    widths = {heading: max(len(heading), *map(len, cells), 0) + 1 for heading, cells in columns.items()}
    omitted: list[str] = []
    for heading in optional:
        if sum(widths.values()) - sum(widths[name] for name in omitted) <= console.width:
            break
        omitted.append(heading)
    shown = [heading for heading in columns if heading not in omitted]
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in shown:
        table.add_column(heading, no_wrap=True, justify="left" if heading in left_aligned else "right")
    for row in zip(*(columns[heading] for heading in shown), strict=True):
        table.add_row(*row)
    console.print(table)
    if omitted:
        console.print(f"left out, for a terminal of {console.width} columns: {', '.join(omitted)}", soft_wrap=True)
