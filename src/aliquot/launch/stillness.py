"""A run in which nobody does anything outside of steps: a file that cannot be read, a wait for what does not come.

Between steps there is no beat to wait for: to tokenise a corpus or to load weights takes as long as it takes. But
somebody computes meanwhile, or reads or writes a disk.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

import psutil

# Public, but not re-exported for type checkers.
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from aliquot.launch.rank_errors import RankError, record_error
from aliquot.launch.stacks import of_all_ranks, told_standing_still

_LOOKS = 30  # so many in a row at which nobody had done anything; a process that was stopped meanwhile has not looked
_AHEAD = 2  # ranks look at different moments: before the first of them ends the run all have written their stacks
_LONGEST_S = 60.0  # from look to look
_BUSY = 0.005  # of a core; to wait costs a thousandth, for the words that say that this node is there


class Stillness:
    """A context, of every rank. When no rank has done anything for `timeout_s`, all write their stacks to `stack_file`
    (None: to stderr), and the run ends with code 1 and a line that says who stands where.

    `store`: in which the ranks have met; None: there is one. `doing`: in words, what goes on.
    """

    def __init__(
        self, rank: int, store: Store | None, timeout_s: float, stack_file: Path | None, doing: Callable[[], str]
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._every_s = min(_LONGEST_S, timeout_s / _LOOKS)
        self._looks = round(timeout_s / self._every_s)
        self._stack_file = stack_file
        self._doing = doing
        # A connection of its own, because others wait in the store's; type checkers are not told that there is one.
        self._store: Store = HashStore() if store is None else cast(Any, store).clone()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="aliquot-stillness", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        work, told, still = _Work(), 0, 0
        while not self._over.wait(self._every_s):
            busy = work.since_last_look() > _BUSY * self._every_s
            try:
                count = self._store.add("stillness", int(busy))  # looks of all ranks that found something done
            except Exception:
                return  # node 0 has ended or is out of reach, of which presence.py tells
            still = still + 1 if count == told else 0
            told = count
            if still == self._looks - _AHEAD:
                self._write_stacks()
                work.since_last_look()  # which was to write them
            elif still == 0 and self._stack_file is not None:
                self._stack_file.unlink(missing_ok=True)
            elif still >= self._looks and not self._over.is_set():
                self._end()

    def _write_stacks(self) -> None:
        if self._stack_file is None:
            faulthandler.dump_traceback(sys.stderr)
            return
        self._stack_file.parent.mkdir(parents=True, exist_ok=True)
        with self._stack_file.open("w") as file:
            faulthandler.dump_traceback(file)

    def _end(self) -> None:
        told, where = "", "above"
        if self._stack_file is not None:
            told = told_standing_still(self._stack_file)
            where = str(self._stack_file.with_name(of_all_ranks(self._stack_file)))
        message = (
            f"no rank has computed, read or written anything for {self._timeout_s:g} s (launch.step_timeout_s) while"
            f" {self._doing()}{told}; where every rank was: {where} [hung]"
        )
        if not record_error(RankError(self._rank, "training", message, f"{message}\n", time.time())):
            print(f"aliquot: rank {self._rank}: {message}", file=sys.stderr, flush=True)
        os._exit(1)  # the main thread waits for what does not come


class _Work:
    """Of this process and those that it has started, which tokenise."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, float], tuple[float, int]] = {}  # process -> seconds of processors, bytes of disks
        self.since_last_look()

    def since_last_look(self) -> float:
        """Seconds of processors, without those that it takes to look; endless if bytes came from a disk or went there.

        To be called by one thread.
        """
        own = psutil.Process()
        found = {(own.pid, 0.0): (time.process_time() - time.thread_time(), _disk_bytes(own))}
        for process in own.children(recursive=True):
            with suppress(psutil.Error):  # it has ended, or is not ours to look at
                used = process.cpu_times()
                found[process.pid, process.create_time()] = (used.user + used.system, _disk_bytes(process))
        before = self._seen
        nothing = (0.0, 0)
        self._seen = found
        if any(moved > before.get(process, nothing)[1] for process, (_, moved) in found.items()):
            return math.inf
        return sum(max(0.0, used - before.get(process, nothing)[0]) for process, (used, _) in found.items())


def _disk_bytes(process: psutil.Process) -> int:
    try:
        moved = process.io_counters()
    except (psutil.Error, OSError, NotImplementedError):  # not told in every container
        return 0
    return int(moved.read_bytes + moved.write_bytes)
