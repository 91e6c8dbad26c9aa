"""The watchdog of training steps: end a rank whose steps make no progress, after it has written its stack traces.

The error line names the ranks for which the other ranks wait. Outside of training steps, where work may take any time,
idle_watchdog.py watches the run.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from aliquot.core.small_files import open_unlinked
from aliquot.distributed.flight_recorder import describe_pending
from aliquot.distributed.rank_errors import RankError, end_rank
from aliquot.distributed.stuck_ranks import all_stack_files, describe_stuck_ranks

# After a stop signal, other ranks may have ended. A step that takes longer than these limits will then never end.
_LATE_STEPS = 3  # times the longest step so far
_LEAST_LATE_S = 30.0


class Watchdog:
    """A context manager that ends a rank whose training steps make no progress.

    Every rank enters it before the first step, calls `beat` whenever a step ends, and calls `stop` at the end. Without
    a beat for `timeout_s`, faulthandler writes the stack traces of all Python threads to `stack_file`. faulthandler
    uses a C thread that needs no GIL, because a native call may hold the GIL. The process ends with code 1 `grace_s`
    later. The first exit of a rank ends all ranks, and every rank needs this time to write its stack traces.

    From a stop signal until all ranks know of it, the timeout is three times the longest step (`hurry`, `relax`).
    """

    def __init__(
        self,
        timeout_s: float,
        stack_file: Path,
        rank: int,
        world_size: int,
        activity: Callable[[], str],
        explain_hang: Callable[[], None] = lambda: None,
        grace_s: float = 3.0,
    ) -> None:
        """Start timing.

        Args:
            activity: returns what this rank is doing, for the error line.
            explain_hang: called first when the rank hangs; may end the process itself (`Heartbeat.explain_hang`).
        """
        self._timeout_s = self._limit_s = timeout_s
        self._longest_s = 0.0  # between two beats
        self._last_beat = time.monotonic()
        self._grace_s = grace_s
        self._stack_file = stack_file
        self._rank, self._world_size = rank, world_size
        self._activity = activity
        self._explain_hang = explain_hang
        stack_file.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = open_unlinked(stack_file, "w", encoding="utf-8")
        self._stopped = threading.Event()
        self._limit_changed = threading.Event()
        self._start_timer()
        threading.Thread(target=self._wait, name="aliquot-watchdog", daemon=True).start()

    def beat(self) -> None:
        if self._stopped.is_set():
            return
        now = time.monotonic()
        self._longest_s, self._last_beat = max(self._longest_s, now - self._last_beat), now
        self._start_timer()

    def hurry(self) -> None:
        """Shorten the timeout after a stop signal; any thread may call this method."""
        self._set_limit(min(self._timeout_s, max(_LEAST_LATE_S, _LATE_STEPS * self._longest_s)))

    def relax(self) -> None:
        """Restore the timeout, because all ranks know of the stop signal and save."""
        if self._limit_s != self._timeout_s:
            self._set_limit(self._timeout_s)

    def _set_limit(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._limit_changed.set()
        self._start_timer()

    def _start_timer(self) -> None:
        if not self._stopped.is_set():
            left_s = max(0.1, self._last_beat + self._limit_s - time.monotonic())
            faulthandler.dump_traceback_later(left_s, file=self._stacks)  # replaces the former timer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop timing. Further calls have no effect."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._limit_changed.set()
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
        with suppress(OSError):  # the user may have removed the file
            if self._stack_file.stat().st_size == 0:
                self._stack_file.unlink()

    def _wait(self) -> None:
        while (left_s := self._last_beat + self._limit_s + self._grace_s - time.monotonic()) > 0:
            if self._limit_changed.wait(left_s):
                self._limit_changed.clear()
            if self._stopped.is_set():
                return
        self._explain_hang()
        message = f"no progress for {self._timeout_s:g} s (launch.step_timeout_s)"
        if self._limit_s != self._timeout_s:
            message = f"no progress for {self._limit_s:g} s since a stop signal arrived,"
        message += (
            f" while {self._activity()}{describe_pending()}"
            f"{describe_stuck_ranks(self._stack_file, self._world_size)}; where every rank was:"
            f" {all_stack_files(self._stack_file)} [hung]"
        )
        end_rank(RankError(self._rank, "training", message, f"{message}\n", time.time()))
