"""aliquot generate and aliquot chat: continue prompts with a model, and talk to it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from aliquot.cli.options import BaseModel, Debug, ModelDirectory, Seed, Temperature
from aliquot.cli.terminal import one_line_errors
from aliquot.core.decode import decode_json
from aliquot.core.errors import UsageError, UserError, printable, reading
from aliquot.data.chat_messages import has_readable_calls

if TYPE_CHECKING:
    from aliquot.models.generate import Chat


def generate_command(
    model_dir: ModelDirectory,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt per line.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a continuation.")] = 100,
    temperature: Temperature = 0.8,
    seed: Seed = 42,
    base: BaseModel = None,
    debug: Debug = False,
) -> None:
    """Continue prompts with a model.

    The model is loaded once. An empty line separates several continuations.
    """
    with one_line_errors(debug):
        all_prompts = [*(prompt or []), *(_prompts(prompts) if prompts is not None else [])]
        if not all_prompts:
            raise UsageError("nothing to continue: give --prompt TEXT or --prompts FILE")
        from aliquot.models.generate import generate

        for number, text in enumerate(generate(model_dir, all_prompts, max_new_tokens, temperature, seed, base)):
            print("\n" * (number > 0) + (printable(text) if sys.stdout.isatty() else text), flush=True)


def _prompts(file: Path) -> list[str]:
    """Return the lines of a file. Only newlines end a line, because U+2028 and form feeds are text."""
    with reading(file):
        try:
            lines = file.read_bytes().decode("utf-8-sig").split("\n")
        except UnicodeDecodeError:
            raise UsageError("not a text file", file) from None
    return [line.removesuffix("\r") for line in lines if line.strip()]


def chat_command(
    model_dir: ModelDirectory,
    system: Annotated[str | None, typer.Option(help="The system message, with which the conversation begins.")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="A JSON file with a list of functions that the model may call, as OpenAI's.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 256,
    temperature: Temperature = 0.8,
    seed: Seed = 42,
    base: BaseModel = None,
    debug: Debug = False,
) -> None:
    """Chat with a model in its chat template. Each line is a message; /reset forgets the conversation.

    Ctrl-C ends a reply; end of input ends the chat. With lines from a pipe, each reply is a paragraph.
    """
    with one_line_errors(debug):
        functions = _tools(tools) if tools is not None else None
        from aliquot.models.generate import Chat, Sampling, load

        chat = Chat(load(model_dir, base), Sampling(max_new_tokens, temperature, seed), system, functions)
        for line in _messages():
            if line == "/reset":
                chat.reset()
            elif line:
                _answer(chat, line)


def _tools(file: Path) -> list[dict[str, Any]]:
    with reading(file):
        try:
            functions = decode_json(file.read_bytes())
        except ValueError as error:
            raise UsageError(f"not JSON: {error}", file) from None
    # A definition of a function has its name in the same place as a call.
    if not isinstance(functions, list) or not has_readable_calls({"tool_calls": functions}):
        raise UsageError('not a list of functions: [{"type": "function", "function": {"name": ...}}, ...]', file)
    return functions


def _messages() -> Iterator[str]:
    """Yield the lines that a person types, or that come from a pipe, until the end of input."""
    is_person = sys.stdin.isatty()
    cast(io.TextIOWrapper, sys.stdin).reconfigure(errors="surrogateescape")  # bytes that are not UTF-8
    if is_person:
        import readline  # noqa: F401  (lets a person edit and repeat lines)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> " if is_person else "").strip()
    if is_person:
        print()


def _answer(chat: Chat, line: str) -> None:
    try:
        with suppress(KeyboardInterrupt), closing(chat.reply(line)) as pieces:
            for piece in pieces:
                print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
        print(flush=True)
    except UserError as error:  # an error in this message; the conversation continues
        print(flush=True)
        print(f"aliquot: {error.line}", file=sys.stderr)
