"""How a command shows what went wrong: one line on stderr; a traceback only with --debug or for a bug of ours."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from aliquot.core.errors import StorageError, UserError, resource_error, storage_error
from aliquot.distributed.rank_errors import ERROR_LOG


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turns a UserError, what a file system refuses, and Ctrl-C into one line and its exit code."""
    try:
        with one_line_interrupt():
            yield
    except Exception as error:
        told = error if isinstance(error, UserError) else resource_error(error) or _of_storage(error)
        if debug or told is None:
            raise
        _say(told.line)
        raise typer.Exit(told.exit_code) from None


@contextmanager
def one_line_interrupt() -> Iterator[None]:
    """Of Ctrl-C typer would make an empty line."""
    try:
        yield
    except KeyboardInterrupt:
        if not {"RANK", ERROR_LOG} <= os.environ.keys():  # else the launcher that has started this rank says so
            _say("stopped by SIGINT")
        raise typer.Exit(128 + signal.SIGINT) from None


def _say(line: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # under torchrun one rank a node speaks
        print(f"aliquot: {line}", file=sys.stderr)


def _of_storage(error: Exception) -> StorageError | None:
    """None for what is about no file: a closed pipe, which typer knows to end, a connection, a library's own error."""
    if not isinstance(error, OSError) or error.errno is None or error.filename is None:
        return None
    return storage_error(error.strerror or str(error), error, error.filename)
