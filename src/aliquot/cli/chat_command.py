"""aliquot chat: talk to a model."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from aliquot.cli.terminal import one_line_errors
from aliquot.core.errors import UserError, printable

if TYPE_CHECKING:
    from aliquot.models.generate import Chat


def command(
    model_dir: Annotated[Path, typer.Argument(help="A Hugging Face model directory: an export or a checkpoint.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 256,
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
    """Talk to a model in its chat template. Each line is a message; /reset forgets the conversation.

    Ctrl-C ends a reply; end of input ends the chat. With lines from a pipe, each reply is a paragraph.
    """
    with one_line_errors(debug):
        from aliquot.models.generate import Chat, load

        chat = Chat(load(model_dir, base), max_new_tokens, temperature, seed)
        for line in _lines():
            if line == "/reset":
                chat.reset()
            elif line:
                _answer(chat, line)


def _lines() -> Iterator[str]:
    """Yield the lines that a person types, or that come from a pipe, until the end of input."""
    is_person = sys.stdin.isatty()
    cast(io.TextIOWrapper, sys.stdin).reconfigure(errors="surrogateescape")  # bytes that are not UTF-8
    if is_person:
        import readline  # noqa: F401  (lets a person edit and repeat lines)
    while True:
        try:
            yield input("> " if is_person else "").strip()
        except (EOFError, KeyboardInterrupt):
            if is_person:
                print()
            return


def _answer(chat: Chat, line: str) -> None:
    error_line = None
    try:
        with closing(chat.reply(line)) as pieces:
            for piece in pieces:
                print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except UserError as error:  # about this message: the conversation continues
        error_line = error.line
    print(flush=True)
    if error_line is not None:
        print(f"aliquot: {error_line}", file=sys.stderr)
