"""aliquot init and aliquot schema: a first config with data, and the JSON schema of all configs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from aliquot.cli.options import Debug
from aliquot.cli.terminal import one_line_errors


def init_command(
    kind: Annotated[
        Literal["quickstart", "text", "chat", "pairs"],
        typer.Argument(
            metavar="[KIND]",
            help="What to train.",
        ),
    ] = "quickstart",
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIRECTORY]", help="Where to write. Default: KIND.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a first config, with data that train at once.

    KIND is quickstart (a tiny model of Python code), text (a tiny model of a text), chat (a small chat model and chats)
    or pairs (the same with pairs of answers). The first two need no download.
    A JSON schema beside the config lets editors complete keys. The command overwrites no file.
    """
    with one_line_errors(debug):
        from aliquot.config.starters import write_starter

        config, *others = write_starter(kind, directory or Path(kind))
        print(f"wrote {config}; beside it {', '.join(path.name for path in others)}")
        print(f"next  aliquot train {shlex.quote(str(config))}")


def schema_command() -> None:
    """Print the JSON schema of a config, for editors."""
    from aliquot.config.starters import schema_json

    print(schema_json(), end="")
