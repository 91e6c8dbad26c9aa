"""aliquot generate: look at what was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aliquot.cli.one_line_errors import one_line_errors


def command(
    model_dir: Annotated[Path, typer.Argument(help="A Hugging Face model directory: an export or a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time.")] = 0.8,
    seed: Annotated[int, typer.Option()] = 42,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Continue a prompt with a trained model."""
    with one_line_errors(debug):
        from aliquot.models.generate import generate

        print(generate(model_dir, prompt, max_new_tokens, temperature, seed))
