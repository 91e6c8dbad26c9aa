"""Ranks that begin without importing anything: forked from a process that has imported what they need, and waits.

In a run whose nodes come and go each round starts ranks, and importing torch and transformers takes longer than all the
rest of a round's beginning. The process is multiprocessing's fork server: one a node, which computes nothing, so that
it has no threads that a fork would lose. What it has imported its ranks share with it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

from aliquot.core.errors import TrainingError
from aliquot.distributed.rank_errors import report_error
from aliquot.distributed.rank_process import die_with_parent, rank_environment, redirect_output

_HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_IMPORTED = (
    "torch.distributed.elastic.multiprocessing.api", "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "aliquot.cli.main",
)  # fmt: skip


def start_server(log_directory: Path, modules: Sequence[str]) -> None:
    """Have it import `modules` beside what models need; returns at once, and does nothing while it lives.

    The environment is that of all ranks.
    """
    os.environ.update(rank_environment(os.environ, log_directory))
    os.environ["ALIQUOT_FORK_SERVER_IMPORTS"] = " ".join([*_IMPORTED, *modules])
    multiprocessing.set_forkserver_preload(["aliquot.distributed.fork_server"])
    resource_tracker.ensure_running()  # what the server starts with; it would unblock what is blocked below
    # What is sent to all processes of a group, as Ctrl-C is, is the launcher's: ranks save before they and this end.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)  # inherited
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_server() -> None:
    """Until it has imported all. Raises TrainingError where it has ended."""
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    with forking():
        process.start()
    process.join()


@contextmanager
def forking() -> Iterator[None]:
    """Raise what multiprocessing raises of a server that has ended as TrainingError."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise TrainingError("the process that ranks are forked from has ended (out of memory?)") from error


def forked_ranks() -> list[psutil.Process]:
    """Those of this launcher that live."""
    found: list[psutil.Process] = []
    for server in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found += server.children()
    return found


def end_forked_ranks() -> None:
    """Kill those that still live, and wait until multiprocessing knows: when this process ends it waits for them.

    The elastic launcher knows no ranks before all are started, so a signal that comes meanwhile leaves them to us.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        for rank in forked_ranks():
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        for process in multiprocessing.active_children():
            process.join()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def forked_rank(environ: Mapping[str, str], log_directory: Path, argv: Sequence[str]) -> None:
    """Do what `python ARGV` does, which is `-m MODULE ARGUMENT...`, in a process that was forked for it.

    `environ`: what is new in it since the server was started. Ends by SystemExit where the exit code is not 0: torch
    would put any other exception into a file that nobody reads.
    """
    from aliquot.distributed import fork_server  # as the server has imported it

    gc.freeze()  # else each collection would write to all that is shared
    os.setsid()
    die_with_parent()  # the server
    if os.getppid() != fork_server.PID:  # it died before the line above
        os._exit(1)
    threading.Thread(target=_end_with_launcher, name="aliquot-launcher", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
    os.environ.update(environ)
    try:
        redirect_output(log_directory, int(os.environ["RANK"]))
        _, module, *arguments = argv
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
    except Exception as error:
        sys.exit(report_error(error))


def _end_with_launcher() -> None:
    """The server, whose death the kernel would tell, lives on as long as a rank does."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)
