"""The `aliquot` command, also as `python -m aliquot`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from aliquot.core.interpreter import become_python

_IMPORTING = "<frozen importlib"  # files of the frames of an import that is going on


def main() -> None:
    """Ctrl-C is one line from the first import on, and SIGTERM to the first process of a container is obeyed."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # which does not get it so
        signal.signal(signal.SIGTERM, _ended)
    if not sys.flags.safe_path:  # else what multiprocessing starts would import from the working directory
        become_python(sys.orig_argv[1:], os.environ)
    try:
        from aliquot.cli.main import run

        run()
    except KeyboardInterrupt:
        _ended(signal.SIGINT, None)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Modules that try an import catch a KeyboardInterrupt in it, or abort: there the process ends, having done
    nothing yet."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            _ended(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def _ended(number: int, _frame: FrameType | None) -> NoReturn:
    # Of several ranks one a node speaks; where a launcher of ours has started them, it does.
    told = {"RANK", "ALIQUOT_LAST_WORDS"} <= os.environ.keys()
    if os.environ.get("LOCAL_RANK", "0") == "0" and not told:
        os.write(2, f"aliquot: stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    main()
