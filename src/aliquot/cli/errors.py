"""How a command shows what went wrong: one line on stderr; a traceback only with --debug or for a bug of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from aliquot.errors import UserError


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turns a UserError into one line and its exit code."""
    try:
        yield
    except UserError as error:
        if debug:
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":  # under torchrun one rank a node speaks
            print(f"aliquot: {error.line}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
