"""What runs first in a rank that our launcher started: tie its life to the launcher, give it its log, become the rank.

`python -m aliquot.launch.rank_start LAUNCHER_PID LOG_DIRECTORY ARGUMENT...` replaces itself by `python ARGUMENT...`:
the death signal, the redirected streams and the process id stay.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from aliquot.launch.preload import with_allocator
from aliquot.launch.rank_errors import LOG_DIRECTORY, error_file, log_file

PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, directory, arguments = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        sys.exit(1)
    open_log(directory, int(os.environ["RANK"]))
    os.execve(sys.executable, [sys.executable, *arguments], rank_environment(os.environ, directory))


def open_log(directory: Path, rank: int) -> None:
    """From here on what this process prints is in its log; rank 0 alone talks on the console."""
    error_file(directory, rank).unlink(missing_ok=True)
    if rank != 0:
        log = os.open(log_file(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())


def rank_environment(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """`environ` as an interpreter that is, or forks, a rank must find it when it starts."""
    found = with_allocator(environ)
    found[LOG_DIRECTORY] = str(directory)
    found.setdefault("PYTHONUNBUFFERED", "1")  # what a killed rank wrote is in its log
    found.setdefault("PYTHONFAULTHANDLER", "1")
    return found


if __name__ == "__main__":
    main()
