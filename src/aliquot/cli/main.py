"""The `aliquot` command. Importing this imports neither torch nor transformers: each command imports what it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from aliquot import __version__
from aliquot.cli import cluster, doctor, export, generate, instances, plan, report, train

app = typer.Typer(
    name="aliquot",
    help="Train Hugging Face causal language models with all state sharded 1/N over N ranks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train.command)
app.command("plan")(plan.command)
app.command("doctor")(doctor.command)
app.command("export")(export.command)
app.command("generate")(generate.command)
app.command("report")(report.command)
app.command("instances")(instances.command)
app.add_typer(cluster.app, name="cluster")


def _version(show: bool) -> None:
    if show:
        print(f"aliquot {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = (
        False
    ),
) -> None:
    """Train Hugging Face causal language models with all state sharded 1/N over N ranks."""


def run() -> None:
    app()
