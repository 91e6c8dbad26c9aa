"""Fork the ranks of an elastic run from a server process that has already imported torch and transformers.

Every round of an elastic run starts new ranks, and the imports would take most of the start-up time. The server is the
fork server of multiprocessing, one per node. The server computes nothing, so it has no threads that a fork would lose.
Forked ranks share the memory of the imported modules.
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
from aliquot.machine.memory import has_gpus

_BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_IMPORTED = (
    "torch.distributed.elastic.multiprocessing.api", "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "aliquot.cli.main",
)  # fmt: skip


def start_server(log_directory: Path, modules: Sequence[str]) -> None:
    """Start the fork server, which imports `modules` and the modules that most models need. Return at once.

    On machines with GPUs the server imports nothing: a module such as torchao may use CUDA when it is imported, and
    then no forked rank can use CUDA. Does nothing if the server is running. All ranks inherit the environment that this
    process has now.
    """
    os.environ.update(rank_environment(os.environ, log_directory))
    os.environ["ALIQUOT_FORK_SERVER_IMPORTS"] = "" if has_gpus() else " ".join([*_IMPORTED, *modules])
    multiprocessing.set_forkserver_preload(["aliquot.distributed.fork_server"])
    resource_tracker.ensure_running()  # first, because starting it would unblock the signals that are blocked below
    # A signal to the process group, such as Ctrl-C, must reach only the launcher, because ranks save before they end.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)  # the server inherits the mask
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_server() -> None:
    """Wait until the server has imported all modules. Raises TrainingError if the server has ended."""
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    with fork_server_errors():
        process.start()
    process.join()


@contextmanager
def fork_server_errors() -> Iterator[None]:
    """Raise TrainingError if multiprocessing finds that the server has ended."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise TrainingError("the process that ranks are forked from has ended (out of memory?)") from error


def live_forked_ranks() -> list[psutil.Process]:
    """Return the living ranks of this launcher."""
    ranks: list[psutil.Process] = []
    for server in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # the server has just ended
            ranks += server.children()
    return ranks


def end_forked_ranks() -> None:
    """Kill and reap the remaining ranks, because multiprocessing would wait for them when this process ends.

    Ranks remain if a signal arrives while they start: the elastic agent knows its ranks only when all have started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        for rank in live_forked_ranks():
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        for process in multiprocessing.active_children():
            process.join()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_forked_rank(environ: Mapping[str, str], log_directory: Path, argv: Sequence[str]) -> None:
    """Run `python ARGV` (`-m MODULE ARGUMENT...`) in this forked process, with `environ` added to the environment.

    Raises SystemExit if the exit code is not 0, because the agent would write any other exception to a file that nobody
    reads.
    """
    from aliquot.distributed import fork_server  # already imported by the server

    gc.freeze()  # otherwise a garbage collection would write to, and so copy, all pages shared with the server
    os.setsid()
    die_with_parent(fork_server.PID)
    threading.Thread(target=_end_with_launcher, name="aliquot-launcher", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
    os.environ.update(environ)
    try:
        redirect_output(log_directory, int(os.environ["RANK"]))
        _, module, *arguments = argv
        sys.argv = [module, *arguments]
        sys.modules.pop(f"{module}.__main__", None)  # the server imports the `aliquot` script; runpy would warn
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
    except Exception as error:
        sys.exit(report_error(error))


def _end_with_launcher() -> None:
    """Kill this rank when its launcher ends: the kernel signals only the end of the server, which ends later."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)
