"""Prepare the process of a rank: end it with its launcher, redirect its output to a log, and set its environment.

`python -m aliquot.distributed.rank_process LAUNCHER_PID LOG_DIRECTORY ARGUMENT...` prepares its process and then
replaces itself by `python ARGUMENT...`, which keeps the death signal, the redirected streams and the process id.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from aliquot.core.python_command import become_python
from aliquot.core.small_files import open_unlinked
from aliquot.distributed.rank_errors import LOG_DIRECTORY, error_file, log_file
from aliquot.machine.allocator import allocator_environment

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, its parent, ends. If it has ended already, end now."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def redirect_output(directory: Path, rank: int) -> None:
    """Redirect the output of this process into its log; only rank 0 prints to the console."""
    error_file(directory, rank).unlink(missing_ok=True)
    if rank != 0:
        with open_unlinked(log_file(directory, rank), "ab", permissions=0o644) as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())


def rank_environment(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return `environ` for the interpreter that becomes a rank or forks ranks.

    Ranks reach their logs through a descriptor of this process, because the path may later lead to another run.
    """
    environment = allocator_environment(environ)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    os.set_inheritable(descriptor, True)  # survives exec, by which this process becomes a rank
    environment[LOG_DIRECTORY] = f"/proc/{os.getpid()}/fd/{descriptor}"
    environment.setdefault("PYTHONUNBUFFERED", "1")  # so that the log has all output of a killed rank
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    return environment


def main() -> None:
    launcher, directory, arguments = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    die_with_parent(launcher)
    redirect_output(directory, int(os.environ["RANK"]))
    become_python(arguments, rank_environment(os.environ, directory))


if __name__ == "__main__":
    main()
