"""The file system that the run directory is on: whether a checkpoint can be written, made durable and published."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

from aliquot.doctor.finding import Finding, Subject
from aliquot.machine.mounts import mount_of

_WRITE_BYTES = 8 << 20
_SLOW_FSYNC_S = 1.0
_SKEW_S = 2.0
_LEAST_BYTES, _GOOD_BYTES = 1 << 30, 20 << 30


def check_storage(subject: Subject) -> Finding:
    """Writes, forces and renames a file as a checkpoint does; leaves nothing behind."""
    place = _existing(subject.run_directory)
    mount = mount_of(place.resolve(), subject.root)
    kind = mount.kind
    try:
        with tempfile.TemporaryDirectory(prefix=".aliquot-doctor-", dir=place) as folder:
            fsync_s = _write(Path(folder) / "a")
            began = time.perf_counter()
            (Path(folder) / "a").rename(Path(folder) / "b")
            rename_s = time.perf_counter() - began
            lacks = "no locks" if not _locks(Path(folder) / "b") else ""
    except OSError as error:
        meaning, fix = "no run can be written here", "choose another run.directory, or mount it writable"
        return Finding("storage", "run directory", "problem", f"{place} ({kind}): {error.strerror}", meaning, fix)
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    found = (
        f"{place} ({kind}): {free / 2**30:.1f} GiB free, {_WRITE_BYTES >> 20} MiB durable in {fsync_s * 1e3:.0f} ms,"
        f" rename {rename_s * 1e3:.1f} ms"
    )
    needs = (
        "a checkpoint takes 12 bytes a parameter, and checkpoint.keep of them are kept, and one that is being written"
    )
    if free < _LEAST_BYTES:
        fix = "free space, or choose another run.directory"
        return Finding("storage", "run directory", "problem", found, needs, fix)
    if free < _GOOD_BYTES:
        return Finding("storage", "run directory", "warning", found, needs, "more space for models above some 500 M")
    if fsync_s > _SLOW_FSYNC_S:
        meaning, fix = "checkpoints take long to become durable", "a faster volume; checkpoint.async hides part of it"
        return Finding("storage", "run directory", "warning", found, meaning, fix)
    if lacks := lacks or ("locks of this machine alone" if mount.locks_are_local else ""):
        meaning = "a file that is touched for as long as a run lives keeps a second one out, which is slower to see"
        fix = "mount with locks (Lustre: -o flock; NFS without nolock or local_lock)"
        return Finding("storage", "run directory", "warning", f"{found}, {lacks}", meaning, fix)
    meaning = "checkpoints are forced to the disk, then renamed into place"
    return Finding("storage", "run directory", "ok", found, meaning)


def check_storage_clock(subject: Subject) -> Finding:
    """Whether the file system's clock is this machine's."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".aliquot-doctor-", dir=_existing(subject.run_directory)) as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            skew = os.fstat(file.fileno()).st_mtime - before
    except OSError as error:
        meaning, fix = "it cannot be written", "see `storage`"
        return Finding("storage-clock", "clock of the run directory", "warning", str(error.strerror), meaning, fix)
    found = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
    if abs(skew) > _SKEW_S:
        meaning = "times of logs and checkpoints cannot be compared between nodes; caches may seem older than they are"
        fix = "run chrony or ntpd on this machine and on the file server"
        return Finding("storage-clock", "clock of the run directory", "warning", found, meaning, fix)
    meaning = "times of files agree with those of logs"
    return Finding("storage-clock", "clock of the run directory", "ok", found, meaning)


def _existing(directory: Path) -> Path:
    """`directory`, or the nearest one above it that exists."""
    directory = directory.absolute()
    return next(place for place in (directory, *directory.parents) if place.is_dir())


def _write(file: Path) -> float:
    """Seconds that some MiB take to be written and durable."""
    began = time.perf_counter()
    with file.open("wb") as out:
        out.write(os.urandom(_WRITE_BYTES))
        out.flush()
        os.fsync(out.fileno())
    return time.perf_counter() - began


def _locks(file: Path) -> bool:
    with file.open("r+b") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
