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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

from aliquot.launch.rank_process import end_with_parent, open_log, rank_environment

_HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_IMPORTED = (
    "torch.distributed.elastic.multiprocessing.api", "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "aliquot.cli.main",
)  # fmt: skip


def start_server(log_directory: Path, modules: Sequence[str]) -> None:
    """Have it import `modules` beside what models need; returns at once. The environment is that of all ranks."""
    os.environ.update(rank_environment(os.environ, log_directory))
    multiprocessing.set_forkserver_preload([*_IMPORTED, *modules])
    resource_tracker.ensure_running()  # what the server starts with; it would unblock what is blocked below
    # What is sent to all processes of a group, as Ctrl-C is, is the launcher's: ranks save before they and this end.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)  # inherited
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_server() -> None:
    """Until it has imported all."""
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()


def forked_ranks() -> list[psutil.Process]:
    """Those of this launcher that live."""
    found: list[psutil.Process] = []
    for server in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found += server.children()
    return found


def forked_rank(environ: Mapping[str, str], log_directory: Path, argv: Sequence[str]) -> None:
    """Do what `python ARGV` does, which is `-m MODULE ARGUMENT...`, in a process that was forked for it.

    `environ`: what is new in it since the server was started. Ends by SystemExit where the exit code is not 0.
    """
    gc.freeze()  # else each collection would write to all that is shared
    os.setsid()
    end_with_parent()  # the server
    threading.Thread(target=_end_with_launcher, name="aliquot-launcher", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
    os.environ.update(environ)
    open_log(log_directory, int(os.environ["RANK"]))
    _, module, *arguments = argv
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise


def _end_with_launcher() -> None:
    """The server, whose death the kernel would tell, lives on as long as a rank does."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)
