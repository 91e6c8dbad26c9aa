"""A run that hangs: when no step ends for too long, every rank writes down where it is, and the run ends."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from aliquot.launch.rank_errors import RankError, record_error
from aliquot.launch.stacks import of_all_ranks, told_standing_still


class Watchdog:
    """Started at once; call `beat` whenever there is progress and `stop` at the end.

    Without a beat for `timeout_s` the stacks of all Python threads go to `stack_file`, from a C thread that needs no
    GIL, so also when a native call holds it. `grace_s` later the process ends with code 1: the first rank to exit has
    all others ended, and they are to write their stacks too.
    """

    def __init__(self, timeout_s: float, stack_file: Path, rank: int, grace_s: float = 3.0) -> None:
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self.stack_file = stack_file
        self.rank = rank
        stack_file.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = stack_file.open("w", encoding="utf-8")
        self._stopped = threading.Event()
        self.beat()
        threading.Thread(target=self._wait, name="aliquot-watchdog", daemon=True).start()

    def beat(self) -> None:
        self._last = time.monotonic()
        faulthandler.dump_traceback_later(self.timeout_s, file=self._stacks)  # replaces the one before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """From here on nothing is timed. May be called again."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
        with suppress(OSError):  # somebody may have removed it
            if self.stack_file.stat().st_size == 0:
                self.stack_file.unlink()

    def _wait(self) -> None:
        while (left := self._last + self.timeout_s + self.grace_s - time.monotonic()) > 0:
            if self._stopped.wait(left):
                return
        stacks = self.stack_file.with_name(of_all_ranks(self.stack_file))
        told = told_standing_still(self.stack_file)
        message = f"no progress for {self.timeout_s:g} s{told}; where every rank was: {stacks} [hung]"
        if not record_error(RankError(self.rank, "training", message, f"{message}\n", time.time())):
            print(f"aliquot: rank {self.rank}: {message}", file=sys.stderr, flush=True)
        os._exit(1)  # the main thread hangs: nothing that waits for it may run
