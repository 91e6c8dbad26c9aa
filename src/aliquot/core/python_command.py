"""Start Python interpreters that import nothing from the working directory, which may contain untrusted files."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter with `arguments`.

    `-P` keeps the working directory out of `sys.path`, where `-m` and `-c` would otherwise put it first. Interpreters
    that `multiprocessing` starts from this interpreter inherit the flag.
    """
    return [sys.executable, "-P", *arguments]


def become_python(arguments: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by `python_command(*arguments)` with the environment `environ`; the process id stays."""
    os.execve(sys.executable, python_command(*arguments), environ)


class Worker:
    """A fresh interpreter that calls `function` (`module:name`) with its end of a pipe; `connection` is the other end.

    A fork would inherit the threads of this process, and multiprocessing's spawn would import the user's script again.
    The worker ends when this process dies, because its end of the pipe then closes.
    """

    def __init__(self, function: str, **settings: str) -> None:
        """`settings`: environment variables of the worker, in addition to those of this process."""
        self.connection, theirs = Pipe()
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            python_command("-c", f"from {__name__} import serve; serve({theirs.fileno()}, {function!r})"),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **settings},
        )
        theirs.close()

    def send(self, request: Any) -> None:
        with suppress(ConnectionError):  # `receive` raises the error of a worker that has ended
            self.connection.send(request)

    def receive(self) -> Any:
        """Return the next answer. Raises it if it is an exception, and `ended` if the worker has ended."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            raise self.ended(self.process.wait()) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ended(self, exit_code: int) -> Exception:
        """Return the error for a worker that has ended without an answer."""
        return MemoryError(f"exit code {exit_code}")

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


def serve(descriptor: int, function: str) -> None:
    """Call `function` in a worker, with the end of the pipe that `descriptor` is, until the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    module, _, name = function.partition(":")
    with suppress(BrokenPipeError, ConnectionResetError):  # the parent has died
        getattr(importlib.import_module(module), name)(Connection(descriptor))


def limit_memory(size_bytes: int) -> None:
    """Let this process allocate at most `size_bytes` more than it has; mapped files do not count."""
    allocated = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    _, highest = resource.getrlimit(resource.RLIMIT_DATA)
    limit = allocated + size_bytes
    limit = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, highest))


def requests(connection: Connection) -> Iterator[Any]:
    """Yield the messages that a worker receives, until its parent closes the pipe or dies."""
    with suppress(EOFError, OSError):  # OSError: the parent has died within a message
        while True:
            yield connection.recv()
