"""The idle watch: end a run that hangs outside of training steps, where work may take any time.

Such work, for example tokenising a corpus or loading weights, uses the CPU or a disk; a run that hangs uses neither.
The error line names the ranks for which the other ranks wait.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import psutil

# Public, but not re-exported for type checkers.
from torch.distributed import DistError, HashStore, Store  # type: ignore[attr-defined]

from aliquot.core.small_files import open_unlinked
from aliquot.distributed.liveness.watchdog import Watchdog, WatchedRank
from aliquot.distributed.rank_errors import bounded_call
from aliquot.machine.memory import unwritten_bytes

_CHECKS = 30  # consecutive idle checks that end a run; a suspended process makes no checks, so its pause does not count
_STACKS_AHEAD = 2  # checks between writing stack traces and ending the run, because ranks check at different times
_LONGEST_INTERVAL_S = 60.0
# A rank that uses less than both limits is idle. Idle ranks use 0.001 cores for heartbeats, and 0.01 cores and 4 KiB/s
# for progress bars. A transfer over a slow network uses little CPU time, but its bytes count.
_BUSY_CORES = 0.02
_BUSY_BYTES_PER_S = 16384


class IdleWatchdog(Watchdog):
    """A context manager of every rank that ends the run when no rank has done any work within the timeout.

    All ranks write their stack traces to `still-rank-N.txt` in the directory of logs, and the run ends with code 1. If
    a rank has not written its stack traces, because its host does not answer, the other ranks wait one timeout longer.
    """

    def __init__(self, rank: WatchedRank, store: Store | None) -> None:
        """`store` is the rendezvous store; None for a single rank."""
        super().__init__(min(_LONGEST_INTERVAL_S, rank.timeout_s / _CHECKS))
        self._rank = rank
        self._checks = round(rank.timeout_s / self.interval_s)
        self._stack_file = rank.logs and rank.logs / f"still-rank-{rank.topology.rank}.txt"
        # The clone has a separate connection, because other threads block the store's connection while they wait. The
        # type stubs lack clone().
        self._store: Store = HashStore() if store is None else cast(Any, store).clone()
        self._last_count = self._idle_checks = 0

    @cached_property
    def _meter(self) -> _WorkMeter:  # created in the thread that measures
        return _WorkMeter()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.is_over.set()
        # Without an error the run has continued, so the stack traces are obsolete. After an error they stay, because
        # this rank may only have lost the connection to a rank that reports a hang.
        if kind is None and self._stack_file is not None:
            self._stack_file.unlink(missing_ok=True)

    def check(self) -> None:
        with suppress(DistError):  # node 0 has ended or is unreachable; the heartbeat reports that
            self._check_all_ranks()

    def _check_all_ranks(self) -> None:
        # The value of the key is the number of checks, over all ranks, at which a rank had worked.
        count = self._store.add("idle-watchdog", int(self._meter.has_worked(self.interval_s)))
        self._idle_checks = self._idle_checks + 1 if count == self._last_count else 0
        self._last_count = count
        stacks_key = f"idle-watchdog-stacks-{count}"  # counts the ranks that have written their stack traces
        if self._idle_checks == self._checks - _STACKS_AHEAD:
            if bounded_call(self._write_stacks):
                self._store.add(stacks_key, 1)
            self._meter.has_worked(self.interval_s)  # do not count the work of writing stacks
        world_size = self._rank.topology.world_size
        all_written = self._idle_checks >= self._checks and self._store.add(stacks_key, 0) >= world_size
        if (all_written or self._idle_checks >= 2 * self._checks) and not self.is_over.is_set():
            self._rank.end_by_hang(
                f"no rank has computed, read or written anything for {self._rank.timeout_s:g} s"
                " (launch.step_timeout_s)",
                self._stack_file,
            )

    def _write_stacks(self) -> None:
        if self._stack_file is None:
            faulthandler.dump_traceback(sys.stderr)
            return
        self._stack_file.parent.mkdir(parents=True, exist_ok=True)
        with open_unlinked(self._stack_file, "w") as file:
            faulthandler.dump_traceback(file)


class _WorkMeter:
    """Measures the work of this process and of its children (tokenising processes). Use it in one thread only."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        # By process, what it has used since its start: CPU seconds, bytes that it exchanged with disks, and all bytes
        # that it has read and written, including pipes and most sockets.
        self._last: dict[tuple[int, float], npt.NDArray[np.float64]] = {}
        self._measuring_bytes = 0
        self._unwritten_bytes = unwritten_bytes()  # their number when a process last worked
        self.has_worked(1.0)

    def has_worked(self, seconds: float) -> bool:
        """Whether the processes, or the kernel for them, have worked since the last call, about `seconds` ago."""
        bytes_before = _io_bytes(self._process)[1]
        work: dict[tuple[int, float], npt.NDArray[np.float64]] = {}
        for process in self._process.children(recursive=True):
            with suppress(psutil.Error):  # the child has ended, or may not be inspected
                cpu = process.cpu_times()
                work[process.pid, process.create_time()] = np.array([cpu.user + cpu.system, *_io_bytes(process)])
        # A thread in fsync uses no CPU while the kernel writes its data. Only a new minimum of unwritten bytes counts
        # as progress, because other processes may write without end.
        unwritten = unwritten_bytes()
        kernel_writes = unwritten < self._unwritten_bytes and _waits_for_disk()
        disk_bytes, bytes_after = _io_bytes(self._process)
        # The meter's own CPU time and bytes do not count.
        self._measuring_bytes += bytes_after - bytes_before
        cpu_s = time.process_time() - time.thread_time()
        work[self._process.pid, 0.0] = np.array([cpu_s, disk_bytes, bytes_after - self._measuring_bytes])
        changes = sum((now - self._last.get(process, 0) for process, now in work.items()), np.zeros(3))
        self._last = work
        has_worked = kernel_writes or bool((changes > (_BUSY_CORES * seconds, 0, _BUSY_BYTES_PER_S * seconds)).any())
        if has_worked:
            self._unwritten_bytes = unwritten
        return has_worked


def _waits_for_disk() -> bool:
    """Whether a thread of this process is in state D (uninterruptible sleep), usually because it waits for a disk."""
    for thread in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            if thread.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False


def _io_bytes(process: psutil.Process) -> tuple[int, int]:
    """Return the bytes that the process exchanged with disks, and all bytes that it has read and written."""
    try:
        io = process.io_counters()
    except (psutil.Error, OSError, NotImplementedError):  # some containers hide the counters
        return 0, 0
    return io.read_bytes + io.write_bytes, io.read_chars + io.write_chars
