"""aliquot generate: look at what was learned."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from aliquot.cli.one_line_errors import one_line_errors
from aliquot.core.errors import UsageError, printable, reading


def command(
    model_dir: Annotated[Path, typer.Argument(help="A Hugging Face model directory: an export or a checkpoint.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt a line.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="0: the likeliest token each time. Above: drawn as the model's generation_config.json says (top_k,"
            " top_p, repetition_penalty, ...), of the 50 likeliest where it has no top_k.",
        ),
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 42,
    base: Annotated[str | None, typer.Option(help="Of an adapter: where its model lies now, if it has moved.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Continue prompts with a trained model, which is loaded once; of several, an empty line is between them."""
    with one_line_errors(debug):
        asked = [*(prompt or []), *(_lines(prompts) if prompts is not None else [])]
        if not asked:
            raise UsageError("nothing to continue: give --prompt TEXT or --prompts FILE")
        from aliquot.models.generate import generate

        for number, text in enumerate(generate(model_dir, asked, max_new_tokens, temperature, seed, base)):
            print("\n" * (number > 0) + (printable(text) if sys.stdout.isatty() else text), flush=True)


def _lines(file: Path) -> list[str]:
    """Only a newline ends one: U+2028 and a form feed are text."""
    with reading(file):
        try:
            lines = file.read_bytes().decode("utf-8-sig").split("\n")
        except UnicodeDecodeError:
            raise UsageError("not a text file", file) from None
    return [line.removesuffix("\r") for line in lines if line.strip()]
