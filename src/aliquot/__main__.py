"""The `aliquot` command, also as `python -m aliquot`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from aliquot.core.python_command import become_python
from aliquot.core.standard_streams import guard_output, open_closed_streams

_IMPORT_MACHINERY = "<frozen importlib"  # file name of the frames of an import in progress


def main() -> None:
    """Run the command. Ctrl-C ends in one line from the first import on; process 1 of a container obeys SIGTERM."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # the kernel ignores it for process 1
        signal.signal(signal.SIGTERM, _exit)
    # A new interpreter, because this one has no `sys.stdout` for a descriptor that was closed at its start, and because
    # interpreters of multiprocessing would import from the working directory without the flag safe_path.
    if open_closed_streams() or not sys.flags.safe_path:
        become_python(sys.orig_argv[1:], os.environ)
    guard_output()
    try:
        from aliquot.cli.main import run

        run()
    except KeyboardInterrupt:
        _exit(signal.SIGINT, None)
    finally:
        sys.stdout.flush()  # here, because an error at the end of the interpreter would be a traceback


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; exit at once during an import, because modules catch exceptions of optional imports."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_MACHINERY):
            _exit(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    # One rank of a node prints the line; the launcher prints it instead if it has started the ranks.
    launcher_reports = {"RANK", "ALIQUOT_LAST_WORDS"} <= os.environ.keys()
    if os.environ.get("LOCAL_RANK", "0") == "0" and not launcher_reports:
        with suppress(OSError):  # the console is lost
            os.write(2, f"aliquot: stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    main()
