"""A run in which nobody does anything outside of steps: a file that cannot be read, a wait for what does not come.

Between steps there is no beat to wait for: to tokenise a corpus or to load weights takes as long as it takes. But
somebody computes meanwhile, or reads or writes a disk.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import psutil

# Public, but not re-exported for type checkers.
from torch.distributed import DistError, HashStore, Store  # type: ignore[attr-defined]

from aliquot.core.small_files import open_unlinked
from aliquot.distributed.bounded_call import within_a_moment
from aliquot.distributed.rank_errors import RankError, end_rank
from aliquot.distributed.stacks import of_all_ranks, told_standing_still
from aliquot.distributed.topology import Topology
from aliquot.machine.memory import unwritten_bytes

_LOOKS = 30  # so many in a row at which nobody had done anything; a process that was stopped meanwhile has not looked
_AHEAD = 2  # ranks look at different moments: this much before the run may end they write their stacks
_LONGEST_S = 60.0  # from look to look
# To wait costs a thousandth of a core for the words that say that this node is there, a hundredth and 4 KiB/s for a
# console's bars. What a slow line brings or takes away costs little more, but is read or written.
_BUSY = 0.02  # of a core
_BUSY_BYTES_PER_S = 16384


class Stillness:
    """A context, of every rank. When no rank has done anything for `timeout_s`, all write their stacks to `stack_file`
    (None: to stderr), and the run ends with code 1 and a line that says who stands where.

    One that does not write them, because its host does not answer, is waited for as long again. `store`: in which the
    ranks have met; None: there is one. `doing`: in words, what goes on.
    """

    def __init__(
        self,
        topology: Topology,
        store: Store | None,
        timeout_s: float,
        stack_file: Path | None,
        doing: Callable[[], str],
    ) -> None:
        self._topology = topology
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

    def __exit__(self, kind: object, *_: object) -> None:
        self._over.set()
        # Somebody went on. After an error they stay: this rank may only have met the end of the one that tells of them.
        if kind is None and self._stack_file is not None:
            self._stack_file.unlink(missing_ok=True)

    def _watch(self) -> None:
        # Node 0 has ended or is out of reach, of which presence.py tells.
        with suppress(DistError):
            self._look()

    def _look(self) -> None:
        work, told, still = _Work(), 0, 0
        while not self._over.wait(self._every_s):
            count = self._store.add("stillness", int(work.since_last_look(self._every_s)))  # looks that found some
            still = still + 1 if count == told else 0
            told = count
            written = f"stillness-stacks-{told}"  # how many ranks have, since the last of them has done something
            if still == self._looks - _AHEAD:
                if within_a_moment(self._write_stacks):
                    self._store.add(written, 1)
                work.since_last_look(self._every_s)  # which was to write them
            all_written = still >= self._looks and self._store.add(written, 0) >= self._topology.world_size
            if (all_written or still >= 2 * self._looks) and not self._over.is_set():
                self._end()

    def _write_stacks(self) -> None:
        if self._stack_file is None:
            faulthandler.dump_traceback(sys.stderr)
            return
        self._stack_file.parent.mkdir(parents=True, exist_ok=True)
        with open_unlinked(self._stack_file, "w") as file:
            faulthandler.dump_traceback(file)

    def _end(self) -> None:
        told, where = "", "above"
        if self._stack_file is not None:
            told = told_standing_still(self._stack_file, self._topology.world_size)
            where = str(self._stack_file.with_name(of_all_ranks(self._stack_file)))
        message = (
            f"no rank has computed, read or written anything for {self._timeout_s:g} s (launch.step_timeout_s) while"
            f" {self._doing()}{told}; where every rank was: {where} [hung]"
        )
        end_rank(RankError(self._topology.rank, "training", message, f"{message}\n", time.time()))


@dataclass(frozen=True)
class _Done:
    """By a process since it began."""

    seconds: float = 0.0  # of processors
    disk_bytes: int = 0  # that came from a disk or went there
    all_bytes: int = 0  # that were read and written, pipes and most sockets included


class _Work:
    """Of this process and those that it has started, which tokenise. To be used by one thread."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._done: dict[tuple[int, float], _Done] = {}
        self._looking_bytes = 0
        self._unwritten_bytes = unwritten_bytes()  # least since somebody worked
        self.since_last_look(1.0)

    def since_last_look(self, seconds: float) -> bool:
        """Whether they have done more than wait, in about so many seconds, or the kernel has written for them."""
        before = _io(self._own)[1]
        found: dict[tuple[int, float], _Done] = {}
        for process in self._own.children(recursive=True):
            with suppress(psutil.Error):  # it has ended, or is not ours to look at
                used = process.cpu_times()
                found[process.pid, process.create_time()] = _Done(used.user + used.system, *_io(process))
        # Who waits for fsync does nothing himself. What others write meanwhile must not count for ever: the least does.
        unwritten = unwritten_bytes()
        written_for = unwritten < self._unwritten_bytes and _waits_for_a_disk()
        disk_bytes, after = _io(self._own)
        # Without what it takes to look.
        self._looking_bytes += after - before
        own_s = time.process_time() - time.thread_time()
        found[self._own.pid, 0.0] = _Done(own_s, disk_bytes, after - self._looking_bytes)
        worked = [
            (now.seconds - then.seconds, now.disk_bytes - then.disk_bytes, now.all_bytes - then.all_bytes)
            for now, then in ((done, self._done.get(process, _Done())) for process, done in found.items())
        ]
        self._done = found
        used_s, on_disk, moved = (sum(each) for each in zip(*worked, strict=True))
        working = used_s > _BUSY * seconds or on_disk > 0 or moved > _BUSY_BYTES_PER_S * seconds
        if working or written_for:
            self._unwritten_bytes = unwritten
        return bool(working or written_for)


def _waits_for_a_disk() -> bool:
    """Whether a thread of this process does: it is in state D."""
    for thread in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            if thread.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False


def _io(process: psutil.Process) -> tuple[int, int]:
    """Bytes of disks, and all bytes that were read and written."""
    try:
        io = process.io_counters()
    except (psutil.Error, OSError, NotImplementedError):  # not told in every container
        return 0, 0
    return io.read_bytes + io.write_bytes, io.read_chars + io.write_chars
