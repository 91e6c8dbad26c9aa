"""aliquot chat: talk to what was trained."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from aliquot.cli.one_line_errors import one_line_errors
from aliquot.core.errors import UserError, printable

if TYPE_CHECKING:
    from aliquot.models.generate import Chat


def command(
    model_dir: Annotated[Path, typer.Argument(help="A Hugging Face model directory: an export or a checkpoint.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of a reply.")] = 256,
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
    """Talk to a model in its chat template. A line is what you say; /reset begins anew, end of input ends.

    Ctrl-C ends a reply. Lines may come from a pipe; then each reply is a paragraph on standard output.
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
    """What is typed, or comes from a pipe, until its end."""
    person = sys.stdin.isatty()
    cast(io.TextIOWrapper, sys.stdin).reconfigure(errors="surrogateescape")  # a line that is no text ends nothing
    if person:
        import readline  # noqa: F401  (lines that are typed can be edited, and found again)
    while True:
        try:
            yield input("> " if person else "").strip()
        except (EOFError, KeyboardInterrupt):
            if person:
                print()
            return


def _answer(chat: Chat, line: str) -> None:
    wrong = None
    try:
        with closing(chat.reply(line)) as pieces:
            for piece in pieces:
                print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except UserError as error:  # of this line: the conversation goes on
        wrong = error.line
    print(flush=True)
    if wrong is not None:
        print(f"aliquot: {wrong}", file=sys.stderr)
