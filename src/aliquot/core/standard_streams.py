"""The standard streams of the program: open at the start, and lost without harm to a training run.

A shell, a service manager or a container may start the program with a closed stream. Later, the console may go away:
the reader of a pipe (`| head`) ends, or the disk of a log file is full.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from aliquot.core.errors import StorageError
from aliquot.core.small_files import open_unlinked

_STDOUT, _STDERR = 1, 2
_NULL = Path(os.devnull)


def open_closed_streams() -> bool:
    """Open /dev/null as each closed descriptor among 0, 1 and 2. Return whether one of them was closed.

    Otherwise the next file that any library opens would get this descriptor, and the program and its children would
    print into the file.
    """
    was_closed = False
    while (descriptor := os.open(_NULL, os.O_RDWR)) <= _STDERR:  # the system gives the lowest closed descriptor
        os.set_inheritable(descriptor, True)
        was_closed = True
    os.close(descriptor)
    return was_closed


class _Output(io.FileIO):
    """stdout or stderr as a file whose writes raise no OSError.

    After a failed write, the descriptor leads to `log`, or to /dev/null. The loss of stdout ends a command whose result
    is its output.
    """

    log: ClassVar[Path] = _NULL
    prints_result: ClassVar[bool] = True
    is_diverted = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            target, self.is_diverted = _NULL if self.is_diverted else self.log, True
            with suppress(OSError):
                target.parent.mkdir(parents=True, exist_ok=True)
                with open_unlinked(target, "ab", buffering=0) as file:
                    name = "stdout" if self.fileno() == _STDOUT else "stderr"
                    words = f"{name} is lost ({error.strerror}): the run continues, and prints here"
                    file.write(f"{time.ctime()}: {words}\n".encode())
                    os.dup2(file.fileno(), self.fileno())
            if self.prints_result and self.fileno() == _STDOUT:
                if isinstance(error, BrokenPipeError):  # the reader has read enough
                    sys.exit(128 + signal.SIGPIPE)
                print(f"aliquot: {StorageError(f'cannot write: {error.strerror}', 'stdout').line}", file=sys.stderr)
                sys.exit(StorageError.exit_code)
            return len(data) if target == _NULL else self.write(data)


def guard_output() -> None:
    """Let no write to stdout or stderr raise an OSError from now on."""
    for name, descriptor in (("stdout", _STDOUT), ("stderr", _STDERR)):
        before, raw = getattr(sys, name), _Output(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if before.write_through else io.BufferedWriter(raw),  # as the interpreter does
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        setattr(sys, name, stream)


def continue_without_console(log: Path) -> None:
    """If the console is lost from now on, continue to print into `log`, because the console is not the run's result."""
    _Output.log, _Output.prints_result = log, False
