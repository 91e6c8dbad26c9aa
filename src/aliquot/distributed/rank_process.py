"""What the process of a rank has of its launcher: its life, its log, its environment.

`python -m aliquot.distributed.rank_process LAUNCHER_PID LOG_DIRECTORY ARGUMENT...` becomes `python ARGUMENT...`:
the death signal, the redirected streams and the process id stay.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from aliquot.core.interpreter import become_python
from aliquot.distributed.rank_errors import LOG_DIRECTORY, error_file, log_file
from aliquot.machine.allocator import allocator_environment

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From here on this process is killed when the one that started it ends; it must live yet."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def open_log(directory: Path, rank: int) -> None:
    """From here on what this process prints is in its log; rank 0 alone talks on the console."""
    error_file(directory, rank).unlink(missing_ok=True)
    if rank != 0:
        log = os.open(log_file(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())


def rank_environment(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """`environ` as an interpreter that is, or forks, a rank must find it when it starts.

    Its logs are reached through a descriptor of this process: the path may lead to another run's by then.
    """
    found = allocator_environment(environ)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    os.set_inheritable(descriptor, True)  # a rank replaces the process that calls this
    found[LOG_DIRECTORY] = f"/proc/{os.getpid()}/fd/{descriptor}"
    found.setdefault("PYTHONUNBUFFERED", "1")  # what a killed rank wrote is in its log
    found.setdefault("PYTHONFAULTHANDLER", "1")
    return found


def main() -> None:
    launcher, directory, arguments = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    end_with_parent()
    if os.getppid() != launcher:  # it died before the line above
        sys.exit(1)
    open_log(directory, int(os.environ["RANK"]))
    become_python(arguments, rank_environment(os.environ, directory))


if __name__ == "__main__":
    main()
