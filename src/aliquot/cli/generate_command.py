"""aliquot generate: continue prompts with a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from aliquot.cli.terminal import one_line_errors
from aliquot.core.errors import UsageError, printable, reading


def command(
    model_dir: Annotated[Path, typer.Argument(help="A Hugging Face model directory: an export or a checkpoint.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt per line.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="0: always the likeliest token. Above: draw with the settings of the model's generation_config.json"
            " (top_k, top_p, repetition_penalty, ...), from the 50 likeliest tokens if it sets no top_k.",
        ),
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 42,
    base: Annotated[str | None, typer.Option(help="The base model of an adapter, if it has moved.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Continue prompts with a model, which is loaded once; an empty line separates several continuations."""
    with one_line_errors(debug):
        all_prompts = [*(prompt or []), *(_lines(prompts) if prompts is not None else [])]
        if not all_prompts:
            raise UsageError("nothing to continue: give --prompt TEXT or --prompts FILE")
        from aliquot.models.generate import generate

        for number, text in enumerate(generate(model_dir, all_prompts, max_new_tokens, temperature, seed, base)):
            print("\n" * (number > 0) + (printable(text) if sys.stdout.isatty() else text), flush=True)


def _lines(file: Path) -> list[str]:
    """Return the lines of a file. Only newlines end a line: U+2028 and form feeds are text."""
    with reading(file):
        try:
            lines = file.read_bytes().decode("utf-8-sig").split("\n")
        except UnicodeDecodeError:
            raise UsageError("not a text file", file) from None
    return [line.removesuffix("\r") for line in lines if line.strip()]
