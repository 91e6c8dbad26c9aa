"""The `aliquot` command.

This module imports neither torch nor transformers, because imports take seconds. Each command imports its own code.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, cast

import typer

from aliquot import __version__
from aliquot.cli import (
    cluster_command,
    data_command,
    doctor_command,
    evaluate_command,
    export_command,
    generate_command,
    init_command,
    instances_command,
    plan_command,
    report_command,
    train_command,
)
from aliquot.cli.options import Command, ConfigCommand
from aliquot.cli.terminal import one_line_errors
from aliquot.core.errors import UsageError
from aliquot.machine.torch_compile import set_compile_cache

# Commands that run without a supported torch. `doctor` reports an unsupported version as a finding.
_WITHOUT_TORCH = {"cluster", "doctor", "init", "instances", "report", "schema"}

app = typer.Typer(
    name="aliquot",
    help="Train Hugging Face causal language models with all state sharded 1/N over N ranks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_COMMANDS: dict[str, tuple[type[Command], Callable[..., None]]] = {
    "init": (Command, init_command.init_command),
    "train": (ConfigCommand, train_command.command),
    "plan": (ConfigCommand, plan_command.command),
    "doctor": (Command, doctor_command.command),
    "export": (Command, export_command.command),
    "generate": (Command, generate_command.generate_command),
    "evaluate": (ConfigCommand, evaluate_command.command),
    "chat": (Command, generate_command.chat_command),
    "report": (Command, report_command.command),
    "instances": (Command, instances_command.command),
    "schema": (Command, init_command.schema_command),
}
for _name, (_kind, _function) in _COMMANDS.items():
    app.command(_name, cls=_kind)(_function)
app.add_typer(data_command.app, name="data")
app.add_typer(cluster_command.app, name="cluster")


def _version(show: bool) -> None:
    if show:
        print(f"aliquot {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = (
        False
    ),
) -> None:
    """Train Hugging Face causal language models with all state sharded 1/N over N ranks."""
    if context.invoked_subcommand not in _WITHOUT_TORCH:
        from aliquot.machine.facts import check_requirements

        with one_line_errors(debug=False):
            check_requirements()


def run() -> None:
    if sys.flags.optimize > 1:
        message = "PYTHONOPTIMIZE=2 or python -OO removes docstrings, which transformers reads: unset it or set it to 1"
        print(f"aliquot: {UsageError(message).line}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    # torch would log lost peers, which aliquot reports. torch reads this variable at import, here and in ranks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    set_compile_cache()
    for stream in (sys.stdout, sys.stderr):
        # A terminal may lack characters that a model prints. Streams of a test or notebook may not be reconfigured.
        with suppress(OSError, AttributeError):
            cast(io.TextIOWrapper, stream).reconfigure(errors="replace")
    # Skip the garbage collection at exit, because the operating system frees the memory anyway. A search for cycles
    # among a million objects of torch and transformers would take half a second on a Xeon at 2.6 GHz.
    atexit.register(gc.freeze)
    app()
