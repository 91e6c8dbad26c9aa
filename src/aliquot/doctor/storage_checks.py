"""Checks of the run directory's file system: whether checkpoints can be written, made durable and published."""

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
    """Write, sync and rename a file as a checkpoint does; leave nothing behind."""
    directory = _existing(subject.run_directory)
    mount = mount_of(directory.resolve(), subject.root)
    kind = mount.kind
    try:
        with tempfile.TemporaryDirectory(prefix=".aliquot-doctor-", dir=directory) as folder:
            fsync_s = _write(Path(folder) / "a")
            start = time.perf_counter()
            (Path(folder) / "a").rename(Path(folder) / "b")
            rename_s = time.perf_counter() - start
            lacks = "no locks" if not _has_locks(Path(folder) / "b") else ""
    except OSError as error:
        meaning, fix = "no run can be written here", "choose another run.directory, or mount it writable"
        return Finding("storage", "run directory", "problem", f"{directory} ({kind}): {error.strerror}", meaning, fix)
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    observed = (
        f"{directory} ({kind}): {free / 2**30:.1f} GiB free, {_WRITE_BYTES >> 20} MiB durable in"
        f" {fsync_s * 1e3:.0f} ms, rename {rename_s * 1e3:.1f} ms"
    )
    demand = (
        "a checkpoint takes 12 bytes a parameter, and checkpoint.keep of them are kept, and one that is being written"
    )
    if free < _LEAST_BYTES:
        fix = "free space, or choose another run.directory"
        return Finding("storage", "run directory", "problem", observed, demand, fix)
    if free < _GOOD_BYTES:
        return Finding(
            "storage", "run directory", "warning", observed, demand, "more space for models above some 500 M"
        )
    if fsync_s > _SLOW_FSYNC_S:
        meaning, fix = "checkpoints take long to become durable", "a faster volume; checkpoint.async hides part of it"
        return Finding("storage", "run directory", "warning", observed, meaning, fix)
    if lacks := lacks or ("locks of this machine alone" if mount.locks_are_local else ""):
        meaning = "a file that aliquot touches regularly locks the run directory, which a second run notices later"
        fix = "mount with locks (Lustre: -o flock; NFS without nolock or local_lock)"
        return Finding("storage", "run directory", "warning", f"{observed}, {lacks}", meaning, fix)
    meaning = "checkpoints are synced to disk, then renamed"
    return Finding("storage", "run directory", "ok", observed, meaning)


def check_storage_clock(subject: Subject) -> Finding:
    """Check that the clock of the file system agrees with this machine's."""
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
    observed = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
    if abs(skew) > _SKEW_S:
        meaning = "times of logs and checkpoints cannot be compared between nodes; caches may seem older than they are"
        fix = "run chrony or ntpd on this machine and on the file server"
        return Finding("storage-clock", "clock of the run directory", "warning", observed, meaning, fix)
    meaning = "times of files agree with those of logs"
    return Finding("storage-clock", "clock of the run directory", "ok", observed, meaning)


def _existing(directory: Path) -> Path:
    """Return `directory`, or its nearest existing parent."""
    directory = directory.absolute()
    return next(place for place in (directory, *directory.parents) if place.is_dir())


def _write(file: Path) -> float:
    """Return the seconds until a few MiB are written and durable."""
    start = time.perf_counter()
    with file.open("wb") as out:
        out.write(os.urandom(_WRITE_BYTES))
        out.flush()
        os.fsync(out.fileno())
    return time.perf_counter() - start


def _has_locks(file: Path) -> bool:
    with file.open("r+b") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
