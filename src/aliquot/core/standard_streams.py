"""The standard streams of the program: open at the start, and lost without harm to a training run.

A shell, a service manager or a container may start the program with a closed stream. Later, the console may go away:
the reader of a pipe (`| head`) ends, or the disk of a log file is full.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from aliquot.core.errors import StorageError
from aliquot.core.small_files import open_unlinked

_STDOUT, _STDERR = 1, 2


def open_closed_streams() -> bool:
    """Open /dev/null as each closed descriptor among 0, 1 and 2. Return whether one of them was closed.

    Otherwise the next file that any library opens would get this descriptor, and the program and its children would
    print into the file.
    """
    was_closed = False
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:  # the system gives the lowest closed descriptor
        os.set_inheritable(descriptor, True)
        was_closed = True
    os.close(descriptor)
    return was_closed


class _Output(io.FileIO):
    """stdout or stderr as a file whose writes raise no OSError.

    After a failed write, the descriptor leads to the run's log, or to /dev/null. The loss of stdout ends a command
    whose result is its output.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.log: Path | None = None
        self.is_result = descriptor == _STDOUT

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            log, self.log = self.log, None
            with suppress(OSError):
                if log is not None:
                    self._continue_in(log, error)
                    return super().write(data)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.is_result:
                sys.exit(_report_lost_result(error))
            return len(data)

    def _continue_in(self, log: Path, error: OSError) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        name = "stdout" if self.fileno() == _STDOUT else "stderr"
        with open_unlinked(log, "ab") as file:
            notice = f"{time.ctime()}: {name} is lost ({error.strerror}): the run continues, and prints here\n"
            file.write(notice.encode())
            file.flush()
            os.dup2(file.fileno(), self.fileno())


def _report_lost_result(error: OSError) -> int:
    """Report that a command cannot write its result, unless its reader has read enough, and return the exit code."""
    if error.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    lost = StorageError(f"cannot write: {error.strerror}", "stdout")
    print(f"aliquot: {lost.line}", file=sys.stderr)
    return lost.exit_code


def guard_output() -> None:
    """Let no write to stdout or stderr raise an OSError from now on."""
    for name, descriptor in (("stdout", _STDOUT), ("stderr", _STDERR)):
        before = getattr(sys, name)
        raw = _Output(descriptor)
        guarded = io.TextIOWrapper(
            raw if before.write_through else io.BufferedWriter(raw),  # as the interpreter does
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        setattr(sys, name, guarded)


def continue_without_console(log: Path) -> None:
    """If the console is lost from now on, continue to print into `log`, because the console is not the run's result."""
    for stream in (sys.stdout, sys.stderr):
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)
        if isinstance(raw, _Output):
            raw.log, raw.is_result = log, False
