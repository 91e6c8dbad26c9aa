"""The lock of a run directory: only one process at a time trains into the directory.

The lock is a `flock` on a file, which the kernel releases when the process dies. Some file systems have no `flock`, or
a `flock` that only one machine sees. On such a file system, the existence of a second file is the lock, and the holder
touches this file regularly.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from aliquot.core.decode import decode_json
from aliquot.core.errors import RunDirectoryError, one_line, storage_error, writing
from aliquot.core.small_files import open_regular, open_unlinked, read_small_file

LOCK, BEATING_LOCK = ".lock", ".lock.held"
BEAT_S = 5.0
WATCH_S = 4 * BEAT_S  # a holder on another machine that does not touch its file for this long counts as dead
_ROUND_MARK = b"round"  # the content of a lock file whose holder is a round of an elastic run
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


class RunLock:
    """The lock of the run directory `directory`. `is_round`: the holder is a rank of a round of an elastic run."""

    def __init__(self, directory: Path, is_round: bool, locks_are_local: Callable[[], bool]) -> None:
        """`locks_are_local` returns whether only this machine sees a `flock` in the directory, which exists by then."""
        self._directory = directory
        self._is_round = is_round
        self._locks_are_local = locks_are_local
        self._files: list[tuple[Path, int]] = []  # the locks that this process holds, with their open descriptors

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Create the directory and hold its lock.

        Raises StorageError, or RunDirectoryError if another process holds the lock. A round of an elastic run does not
        wait for the lock of an earlier round, which a file server may release late. This is safe, because a node that
        was cut off publishes nothing (distributed/leader_lease.py).
        """
        directory = self._directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = open_unlinked(directory / LOCK, "ab")
        except OSError as error:  # no permission, read-only, a file where a directory should be
            message = f"cannot write the run directory: {error.strerror or error}; choose another run.directory"
            raise storage_error(message, error, error.filename or directory / LOCK) from None
        with lock, ExitStack() as beating:
            if not (self._flock(lock.fileno()) or self._is_round):
                with writing(file := directory / BEATING_LOCK):
                    self._files.append((file, beating.enter_context(beating_lock(file))))
            self._files.append((directory / LOCK, lock.fileno()))
            try:
                with suppress(OSError):  # ignore a full disk here: the first file that the run needs will report it
                    lock.truncate(0)
                    os.write(lock.fileno(), _ROUND_MARK * self._is_round)
                    os.fsync(lock.fileno())  # otherwise a network file system may write it only at close
                yield
            finally:
                is_lost = self.why_lost() is not None
                self._files.clear()
                with suppress(OSError):  # an error of the block must reach the user
                    beating.close()
                    # If the directory contains only the lock, the run was refused at its start: remove the directory.
                    if not is_lost and [entry.name for entry in directory.iterdir()] == [LOCK]:
                        (directory / LOCK).unlink()
                        directory.rmdir()

    def _flock(self, descriptor: int) -> bool:
        """Lock the open file. False if the file system has no lock that every machine sees."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not self._locks_are_local()
        except BlockingIOError:
            if self._is_round and read_small_file(self._directory / LOCK, links="none") == _ROUND_MARK:
                return True
            raise RunDirectoryError("another process is training into this run directory", self._directory) from None
        except OSError:  # Lustre may be mounted without locks
            return False

    def why_lost(self) -> str | None:
        """Return a message if the directory was removed, renamed or replaced while this process holds the lock.

        The path of a lock then leads to another file or to none, and the directory may belong to another run. None if
        every held lock is still the file under its path, or if no lock is held.
        """
        for path, descriptor in self._files:
            try:
                is_same = os.path.samestat(os.fstat(descriptor), path.stat())
            except OSError as error:  # an error of a file server says nothing about the directory
                is_same = error.errno not in _GONE
            if not is_same:
                return (
                    f"{one_line(self._directory)}: the run directory was removed, renamed or replaced while the run"
                    " went on: the run no longer holds its lock and writes nothing more. To continue, start again with"
                    " run.directory set to where the checkpoints are now"
                )
        return None


@contextmanager
def beating_lock(file: Path) -> Iterator[int]:
    """Hold a lock that consists of a file, and touch the file until the block ends. Yields the file's descriptor.

    Raises RunDirectoryError if another process holds the lock and lives. For a process on the same machine, this is
    known at once; the file of a process on another machine is watched for WATCH_S seconds.
    """
    content = {
        "machine": namespace_id("pid"),
        "pid": os.getpid(),
        "started": _start_ticks(os.getpid()),
        "mark": secrets.token_hex(8),
    }
    while (descriptor := _create(file, content)) is None:
        holder = _read(file)
        if _is_alive(file, holder):
            raise RunDirectoryError("another process is training into this run directory", file.parent)
        _remove(file, holder)
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT_S):
            with suppress(OSError):
                os.utime(descriptor)  # by descriptor, because the path may by now lead to the lock of another process

    threading.Thread(target=beat, name="aliquot-lock", daemon=True).start()
    try:
        yield descriptor
    finally:
        is_over.set()
        _remove(file, content)
        os.close(descriptor)


def _create(file: Path, content: dict[str, Any]) -> int | None:
    """Create the lock file and return its descriptor; None if the file exists already."""
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return None
    os.write(descriptor, json.dumps(content).encode())
    return descriptor


def _remove(file: Path, holder: Any) -> None:
    """Remove the lock file of `holder`, unless another process has replaced the file meanwhile.

    The file is first renamed to a random name, which no other process uses, and then read again under that name.
    """
    if _read(file) != holder:
        return
    renamed = file.with_name(f"{file.name}-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        file.rename(renamed)
        if _read(renamed) == holder:
            renamed.unlink()
        else:
            renamed.rename(file)


def _is_alive(file: Path, holder: Any) -> bool:
    """Return whether the holder of the lock lives.

    A process of this machine is looked up. For another machine, the file is watched for a new time stamp: its present
    time stamp says little, because the clocks may differ.
    """
    if isinstance(holder, dict) and holder.get("machine") == namespace_id("pid"):
        # Compare start times, because a restarted container has the same process ids and often the same PID namespace.
        return (ticks := _start_ticks(holder.get("pid"))) is not None and holder.get("started", ticks) == ticks
    before, until = _beat_time(file), time.monotonic() + WATCH_S
    while time.monotonic() < until:
        if _beat_time(file) != before:
            return True
        time.sleep(WATCH_S / 100)
    return False


def _start_ticks(pid: object) -> int | None:
    """Return the start time of a process, in clock ticks since boot; None if there is no such process."""
    with suppress(OSError, ValueError, IndexError):
        # The process name, in parentheses before the numbers, may contain any character.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    return None


def _beat_time(file: Path) -> int | None:
    with suppress(OSError), open_regular(file, "none") as opened:  # opening makes an NFS client ask its server
        return os.fstat(opened.fileno()).st_mtime_ns
    return None


def _read(file: Path) -> Any:
    with suppress(OSError, ValueError):
        return decode_json(read_small_file(file, links="none"))
    return None


def namespace_id(kind: str) -> str:
    """Return an id that only processes of the same boot in the same namespace share. `kind` is "pid" or "net"."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}:{Path('/proc/self/ns', kind).stat().st_ino}"
