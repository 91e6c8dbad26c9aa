"""Arguments and options that several commands share."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand

from aliquot.cli.terminal import one_line_errors
from aliquot.core.errors import UsageError

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML run configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.key=value ...]", help="Replace keys of the config, for example train.max_steps=10."
    ),
]
ModelDirectory = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face model directory: an export or a checkpoint.")
]
BaseModel = Annotated[
    str | None, typer.Option(help="The directory of an adapter's base model, if the base model has moved.")
]
Temperature = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="0: take the likeliest token. Above 0: sample with the settings of the model's generation_config.json"
        " (top_k, top_p, repetition_penalty, ...), from the 50 likeliest tokens if the file sets no top_k.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of random draws.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class Command(TyperCommand):
    """A command whose usage line names the arguments as the documentation does; typer would print `{CONFIG}`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, TyperArgument)]
        return ["[OPTIONS]", *(argument.metavar or str(argument.name).upper() for argument in arguments)]


class ConfigCommand(Command):
    """A command with overrides. For an option that is a key of a config, the error names the override to write."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        for argument, following in zip_longest(args, args[1:], fillvalue=""):
            name, equals, value = argument.partition("=")
            if not name.startswith("--") or name == "--" or name in options:
                continue
            from aliquot.config.key_hints import argument_for  # slow to import

            separate = following if following and not following.startswith("-") else None
            with one_line_errors(debug=False):
                if advice := argument_for(name, value if equals else separate):
                    raise UsageError(f"{name} is no option; {advice}")
        return super().parse_args(ctx, args)
