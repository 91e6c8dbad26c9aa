"""What runs first in a rank that our launcher started: tie its life to the launcher, give it its log, become the rank.

`python -m aliquot.launch.rank_start LAUNCHER_PID LOG_DIRECTORY ARGUMENT...` replaces itself by `python ARGUMENT...`:
the death signal, the redirected streams and the process id stay.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from aliquot.launch.preload import with_allocator
from aliquot.launch.rank_errors import LOG_DIRECTORY, error_file, log_file

_PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, directory, arguments = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        sys.exit(1)

    rank = int(os.environ["RANK"])
    error_file(directory, rank).unlink(missing_ok=True)
    if rank != 0:  # rank 0 alone talks on the console
        log = os.open(log_file(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())

    environ = with_allocator(os.environ)
    environ[LOG_DIRECTORY] = str(directory)
    environ.setdefault("PYTHONUNBUFFERED", "1")  # what a killed rank wrote is in its log
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    os.execve(sys.executable, [sys.executable, *arguments], environ)


if __name__ == "__main__":
    main()
