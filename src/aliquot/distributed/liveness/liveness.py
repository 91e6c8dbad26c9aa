"""Liveness of a rank: end a run that hangs or has lost a node, instead of waiting for ever.

| watchdog | observes | limit | ends |
|--|--|--|--|
| `Heartbeat` | heartbeats of other nodes | `SILENT_S`, or `launch.step_timeout_s` if less | each rank, as `peer-lost` |
| `IdleWatchdog` | CPU time and bytes of all ranks, in every stage | `launch.step_timeout_s` | all ranks, as `hung` |
| `StepWatchdog` | progress of training steps | the same; less after a stop signal | this rank, as `hung` |
| torch's own watchdog | NCCL's collectives: a waiting rank looks busy | a minute more | this rank, by SIGABRT |

The first exit of a rank ends all ranks. A watchdog that finds a hang asks the heartbeat first, because a lost node
explains the hang.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

# Public, but not re-exported for type checkers.
from torch.distributed import Store  # type: ignore[attr-defined]

from aliquot.core.small_files import open_unlinked
from aliquot.distributed.liveness.heartbeat import SILENT_S, Heartbeat
from aliquot.distributed.liveness.idle_watchdog import IdleWatchdog
from aliquot.distributed.liveness.watchdog import Watchdog, WatchedRank
from aliquot.distributed.topology import Topology

# After a stop signal, other ranks may have ended. A step that takes longer than these limits will then never end.
_LATE_STEPS = 3  # times the longest step so far
_LEAST_LATE_S = 30.0


class Liveness(ExitStack):
    """A context manager of every rank, which runs the heartbeat and the watchdogs."""

    def __init__(
        self, topology: Topology, store: Store | None, timeout_s: float, activity: Callable[[], str], logs: Path | None
    ) -> None:
        """Prepare the watchdogs.

        Args:
            store: the rendezvous store; None for a single rank.
            activity: returns what this rank is doing, for error lines.
            logs: the directory of stack traces; None: they go to stderr.
        """
        super().__init__()
        self.heartbeat = Heartbeat(topology, store, min(SILENT_S, timeout_s), activity)
        self.rank = WatchedRank(topology, timeout_s, activity, logs, self.heartbeat.explain_hang)
        self._store = store

    def __enter__(self) -> Self:
        self.enter_context(self.heartbeat)
        self.enter_context(IdleWatchdog(self.rank, self._store))
        return self


class StepWatchdog(Watchdog):
    """A context manager that ends a rank whose training steps make no progress.

    Every rank enters it before the first step, calls `beat` whenever a step ends, and calls `stop` at the end. Without
    a beat within the timeout, faulthandler writes the stack traces of all Python threads. faulthandler uses a C thread
    that needs no GIL, because a native call may hold the GIL. The process ends with code 1 `grace_s` later. The first
    exit of a rank ends all ranks, and every rank needs this time to write its stack traces.

    From a stop signal until all ranks know of it, the timeout is three times the longest step (`hurry`, `relax`).
    """

    def __init__(self, rank: WatchedRank, stack_file: Path, grace_s: float = 3.0) -> None:
        super().__init__(grace_s / 4)
        self._rank, self._stack_file, self._grace_s = rank, stack_file, grace_s
        self._limit_s = rank.timeout_s
        self._longest_s = 0.0  # between two beats
        self._last_beat = time.monotonic()
        stack_file.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = open_unlinked(stack_file, "w", encoding="utf-8")
        self._start_timer()

    def beat(self) -> None:
        now = time.monotonic()
        self._longest_s, self._last_beat = max(self._longest_s, now - self._last_beat), now
        self._start_timer()

    def hurry(self) -> None:
        """Shorten the timeout after a stop signal; any thread may call this method."""
        self._limit_s = min(self._rank.timeout_s, max(_LEAST_LATE_S, _LATE_STEPS * self._longest_s))
        self._start_timer()

    def relax(self) -> None:
        """Restore the timeout, because all ranks know of the stop signal and save."""
        if self._limit_s != self._rank.timeout_s:
            self._limit_s = self._rank.timeout_s
            self._start_timer()

    def _start_timer(self) -> None:
        if not self.is_over.is_set():
            left_s = max(0.1, self._last_beat + self._limit_s - time.monotonic())
            faulthandler.dump_traceback_later(left_s, file=self._stacks)  # replaces the former timer

    def stop(self) -> None:
        if self.is_over.is_set():
            return
        self.is_over.set()
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
        with suppress(OSError):  # the user may have removed the file
            if self._stack_file.stat().st_size == 0:
                self._stack_file.unlink()

    def check(self) -> None:
        if time.monotonic() < self._last_beat + self._limit_s + self._grace_s or self.is_over.is_set():
            return
        message = f"no progress for {self._rank.timeout_s:g} s (launch.step_timeout_s)"
        if self._limit_s != self._rank.timeout_s:
            message = f"no progress for {self._limit_s:g} s since a stop signal arrived,"
        self._rank.end_by_hang(message, self._stack_file)
