"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML run configuration.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Replace single keys of the config.")
]
ModelDirectory = Annotated[Path, typer.Argument(help="A Hugging Face model directory: an export or a checkpoint.")]
BaseModel = Annotated[str | None, typer.Option(help="The base model of an adapter, if it has moved.")]
Temperature = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="0: always the likeliest token. Above: draw with the settings of the model's generation_config.json"
        " (top_k, top_p, repetition_penalty, ...), from the 50 likeliest tokens if it sets no top_k.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1)]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
