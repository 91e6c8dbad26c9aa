"""A run that hangs: when no step ends for too long, every rank writes down where it is, and the run ends."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from aliquot.core.small_files import open_unlinked
from aliquot.distributed.rank_errors import RankError, end_rank
from aliquot.distributed.stacks import of_all_ranks, told_standing_still


class Watchdog:
    """Started at once; call `beat` whenever there is progress and `stop` at the end.

    Without a beat for `timeout_s` the stacks of all Python threads go to `stack_file`, from a C thread that needs no
    GIL, so also when a native call holds it. `grace_s` later the process ends with code 1: the first rank to exit has
    all others ended, and they are to write their stacks too.
    """

    def __init__(
        self,
        timeout_s: float,
        stack_file: Path,
        rank: int,
        world_size: int,
        doing: Callable[[], str],
        grace_s: float = 3.0,
    ) -> None:
        """`doing`: in words, what goes on."""
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self.stack_file = stack_file
        self.rank, self.world_size = rank, world_size
        self._doing = doing
        stack_file.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = open_unlinked(stack_file, "w", encoding="utf-8")
        self._stopped = threading.Event()
        self.beat()
        threading.Thread(target=self._wait, name="aliquot-watchdog", daemon=True).start()

    def beat(self) -> None:
        if self._stopped.is_set():
            return
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
        message = (
            f"no progress for {self.timeout_s:g} s (launch.step_timeout_s) while {self._doing()}"
            f"{told_standing_still(self.stack_file, self.world_size)}; where every rank was: {stacks} [hung]"
        )
        end_rank(RankError(self.rank, "training", message, f"{message}\n", time.time()))
