"""Run chat templates in a process of their own, whose CPU time and memory are limited.

A chat template is a program from a stranger. Python cannot interrupt one long operation in C, such as `7**(10**7)`, and
handles signals in the main thread only. The kernel ends a process in any case, so each aliquot process that renders
chats keeps one template process. A request takes about 40 us, as long as rendering one short chat, so that callers with
many records send them in batches.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aliquot.core.errors import TokenizerError, UserError
from aliquot.core.python_command import Worker, limit_memory, requests

_ADVICE = "Set data.chat_template, or the tokenizer's chat template, to another one"


@dataclass
class Limits:
    """The limits of a template process."""

    cpu_s: float = 1.0  # for rendering one chat; a chat of several megabytes takes a fifth of it
    memory_bytes: int = 1 << 30  # in addition to the memory of the interpreter
    are_in_force: bool = False  # whether this is a template process


limits = Limits()
_lock = threading.Lock()
_processes: dict[int, _TemplateProcess] = {}  # by the id of this process: a fork must not share the pipe of its parent


class TemplateFailure(Exception):
    """Raised for an error that a chat template raises; other messages may suit the template."""


def in_template_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, called in the template process.

    Raises TokenizerError if rendering a chat exceeds a limit. Otherwise raises the exception of `function`.
    """
    if limits.are_in_force:
        return function(*arguments)
    with _lock:
        process = _processes.get(os.getpid()) or _TemplateProcess()
        _processes[os.getpid()] = process
        try:
            process.send((function, arguments))
            return process.receive()
        except BaseException as error:
            # The process has ended, or an interrupt has separated a request from its answer.
            if not isinstance(error, UserError | TemplateFailure) or process.process.poll() is not None:
                del _processes[os.getpid()]
                process.close()
            raise


def render_chat(
    source: str,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    variables: Mapping[str, Any],
    options: Mapping[str, bool],
) -> tuple[str, list[tuple[int, int]]]:
    """Render a chat with the template `source` as transformers does; call this function in the template process.

    Returns the text, and the spans inside {% generation %} blocks if `options` has `return_assistant_tokens_mask`.
    Raises TemplateFailure, and TokenizerError if the memory does not suffice.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    assert limits.are_in_force
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    try:
        texts, marks = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=source, **{**variables, **options}
        )
    except MemoryError:
        raise TokenizerError(
            f"the chat template fails: it needs more than {limits.memory_bytes >> 20} MiB for a chat. {_ADVICE}"
        ) from None
    except Exception as error:  # a template is a program of the model's author
        raise TemplateFailure(str(error)) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return texts[0], marks[0] if marks else []


class _TemplateProcess(Worker):
    def __init__(self) -> None:
        super().__init__(f"{__name__}:serve", OPENBLAS_NUM_THREADS="1")
        self.send(limits)

    def ended(self, exit_code: int) -> TokenizerError:
        reason = f"its process ended (exit code {exit_code}); perhaps for lack of memory"
        if exit_code == -signal.SIGPROF:
            reason = f"it has run for {limits.cpu_s:g} s, as one that loops for ever does"
        return TokenizerError(f"the chat template fails: {reason}. {_ADVICE}")


def serve(connection: Connection) -> None:
    """Run the template process: call functions until the parent closes the pipe or dies."""
    vars(limits).update(vars(connection.recv()), are_in_force=True)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process, even inside one operation
    _import_light()
    limit_memory(limits.memory_bytes)
    for function, arguments in requests(connection):
        try:
            answer = function(*arguments)
        except (UserError, TemplateFailure) as error:
            answer = error
        connection.send(answer)


def _import_light() -> None:
    """Import transformers' renderer without the `__init__` files of its packages, which take half a second."""
    root = Path(*importlib.util.find_spec("transformers").submodule_search_locations)  # type: ignore[union-attr, misc]
    for name, path in (("transformers", root), ("transformers.utils", root / "utils")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    importlib.import_module("transformers.utils.chat_template_utils")
