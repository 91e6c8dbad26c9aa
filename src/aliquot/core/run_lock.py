"""The lock of a run directory: one process trains into it, whatever locks its file system has.

The lock is `flock` on a file. The kernel releases it when the process dies. Some file systems have no locks, or locks
that only one machine sees. There a second file stands for the lock, and its holder touches that file while it lives.
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

from aliquot.core.errors import RunDirectoryError, one_line, storage_error
from aliquot.core.small_files import open_unlinked

LOCK, BEATING_LOCK = ".lock", ".lock.held"
BEAT_S = 5.0
WATCH_S = 4 * BEAT_S  # a holder on another machine that does not touch its file for so long is taken for dead
_ROUND_MARK = "round"  # the content of a lock file that a round of an elastic run holds
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


class RunLock:
    """The lock of the run directory `directory`. `is_round`: the holder is a rank of a round of an elastic run."""

    def __init__(self, directory: Path, is_round: bool, locks_are_local: Callable[[], bool]) -> None:
        """`locks_are_local`: whether only this machine sees a `flock` in the directory; asked once it exists."""
        self._directory = directory
        self._is_round = is_round
        self._locks_are_local = locks_are_local
        self._files: list[tuple[Path, int]] = []  # the locks that this process holds, with their open descriptors

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Create the directory and hold its lock. Raises StorageError, or RunDirectoryError if another process has it.

        A round of an elastic run does not wait until a file server releases the lock of a node of an earlier round: a
        node that is cut off publishes nothing (distributed/leader_lease.py).
        """
        directory = self._directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = open_unlinked(directory / LOCK, "a")
        except OSError as error:  # no permission, read-only, a file where a directory should be
            message = f"cannot write the run directory: {error.strerror}; choose another run.directory"
            raise storage_error(message, error, directory) from None
        with lock, ExitStack() as beating:
            if not (self._flock(lock.fileno()) or self._is_round):
                descriptor = beating.enter_context(beating_lock(directory / BEATING_LOCK))
                self._files.append((directory / BEATING_LOCK, descriptor))
            self._files.append((directory / LOCK, lock.fileno()))
            try:
                with suppress(OSError):  # the first file that the run needs reports a full disk
                    lock.truncate(0)
                    lock.write(_ROUND_MARK * self._is_round)
                    lock.flush()
                    os.fsync(lock.fileno())  # the file stays open: a network file system need not write it earlier
                yield
            finally:
                is_lost = self.why_lost() is not None
                self._files.clear()
                with suppress(OSError):  # an error of the body must reach the person
                    beating.close()
                    # Only the lock is left in the directory of a run that was refused at its start.
                    if not is_lost and [entry.name for entry in directory.iterdir()] == [LOCK]:
                        (directory / LOCK).unlink()
                        directory.rmdir()

    def _flock(self, descriptor: int) -> bool:
        """Lock the open file. False if the file system has no lock that every machine sees."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not self._locks_are_local()
        except BlockingIOError:
            if self._is_round and (self._directory / LOCK).read_text().startswith(_ROUND_MARK):
                return True
            raise RunDirectoryError("another process is training into this run directory", self._directory) from None
        except OSError:  # Lustre may be mounted without locks
            return False

    def why_lost(self) -> str | None:
        """Say that a lock of this process is no longer the file under its path; None if all are, or none is held.

        Then the directory was removed, renamed or replaced, and whatever lies under the path belongs to somebody else.
        """
        for path, descriptor in self._files:
            try:
                is_same = os.path.samestat(os.fstat(descriptor), path.stat())
            except OSError as error:  # a file server in trouble says nothing about the directory
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
    """Hold a lock that is a file, and touch the file until the end. Yields its open descriptor.

    Raises RunDirectoryError while another process holds the lock. The state of a process on the same machine is known
    at once; a process on another machine is watched for WATCH_S seconds.
    """
    content = {"machine": machine_id(), "pid": os.getpid(), "started": _start_ticks(os.getpid())}
    content["mark"] = secrets.token_hex(8)
    while (descriptor := _create(file, content)) is None:
        holder = _read(file)
        if _is_alive(file, holder):
            raise RunDirectoryError("another process is training into this run directory", file.parent)
        _remove(file, holder)
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT_S):
            with suppress(OSError):
                os.utime(descriptor)  # by descriptor: the path may name the lock of another process by now

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
    """Remove the lock of `holder`, but not the lock of a process that has replaced it meanwhile.

    The file first gets a random name, which no other process takes, and is read again under that name.
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
    """Look the process up if it ran on this machine; otherwise watch its beats, because its clock may be wrong."""
    if isinstance(holder, dict) and holder.get("machine") == machine_id():
        # A restarted container has the process ids that it had, and often the number of their namespace.
        return (ticks := _start_ticks(holder.get("pid"))) is not None and holder.get("started", ticks) == ticks
    before, until = _beat_time(file), time.monotonic() + WATCH_S
    while time.monotonic() < until:
        if _beat_time(file) != before:
            return True
        time.sleep(WATCH_S / 100)
    return False


def _start_ticks(pid: object) -> int | None:
    """When the process started, in ticks since the kernel did; None if there is no such process."""
    with suppress(OSError, ValueError, IndexError):
        # The process name stands in parentheses before the numbers and may hold any character.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    return None


def _beat_time(file: Path) -> int | None:
    with suppress(OSError), file.open() as opened:  # opening makes an NFS client ask its server
        return os.fstat(opened.fileno()).st_mtime_ns
    return None


def _read(file: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))
    return None


def machine_id() -> str:
    """Name the scope of process ids: one start of the kernel and one namespace of process ids."""
    return namespace_id("pid")


def namespace_id(kind: str) -> str:
    """Name one start of the kernel and this process's namespace of `kind`, "pid" or "net"."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}:{Path('/proc/self/ns', kind).stat().st_ino}"
