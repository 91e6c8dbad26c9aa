"""Checks of the run directory's file system: whether checkpoints can be written, made durable and published."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

from aliquot.core.small_files import flush_to_disk
from aliquot.doctor.finding import Case, Finding, Subject, check, conclude
from aliquot.machine.facts import mount_of
from aliquot.machine.storage import nearest_directory

_WRITE_BYTES = 8 << 20
_SLOW_FSYNC_S = 1.0
_SKEW_S = 2.0
_LEAST_BYTES, _GOOD_BYTES = 1 << 30, 20 << 30


@check("storage", "run directory")
def check_storage(subject: Subject) -> Finding:
    """Write, sync and rename a file like a checkpoint, then remove the file."""
    directory = nearest_directory(subject.run_directory)
    mount = mount_of(directory.resolve(), subject.root)
    try:
        with tempfile.TemporaryDirectory(prefix=".aliquot-doctor-", dir=directory) as folder:
            start = time.perf_counter()
            with (Path(folder) / "a").open("wb") as file:
                file.write(os.urandom(_WRITE_BYTES))
                flush_to_disk(file)
            durable = time.perf_counter()
            (Path(folder) / "a").rename(Path(folder) / "b")
            renamed = time.perf_counter()
            has_locks = _has_locks(Path(folder) / "b")
    except OSError as error:
        return Finding(
            "problem",
            f"{directory} ({mount.kind}): {error.strerror}",
            meaning="no run can be written here",
            fix="choose another run.directory, or mount it writable",
        )
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    observed = (
        f"{directory} ({mount.kind}): {free / 2**30:.1f} GiB free, {_WRITE_BYTES >> 20} MiB durable in"
        f" {1e3 * (durable - start):.0f} ms, rename {1e3 * (renamed - durable):.1f} ms"
    )
    demand = (
        "a checkpoint takes 12 bytes a parameter, and checkpoint.keep of them are kept, and one that is being written"
    )
    return conclude(
        observed,
        Case(free < _LEAST_BYTES, "problem", demand, fix="free space, or choose another run.directory"),
        Case(free < _GOOD_BYTES, "warning", demand, fix="more space for models above some 500 M"),
        Case(
            durable - start > _SLOW_FSYNC_S,
            "warning",
            meaning="checkpoints take long to become durable",
            fix="a faster volume; checkpoint.async hides part of it",
        ),
        Case(
            mount.locks_are_local or not has_locks,
            "warning",
            state=f"{observed}, {'locks of this machine alone' if has_locks else 'no locks'}",
            meaning="a file that aliquot touches regularly locks the run directory, which a second run notices later",
            fix="mount with locks (Lustre: -o flock; NFS without nolock or local_lock)",
        ),
        ok="checkpoints are synced to disk, then renamed",
    )


@check("storage-clock", "clock of the run directory")
def check_storage_clock(subject: Subject) -> Finding:
    """Check that the clock of the file system agrees with the clock of this machine."""
    try:
        with tempfile.NamedTemporaryFile(
            prefix=".aliquot-doctor-", dir=nearest_directory(subject.run_directory)
        ) as file:
            before = time.time()
            file.write(b"x")
            flush_to_disk(file)
            skew = os.fstat(file.fileno()).st_mtime - before
    except OSError as error:
        return Finding("warning", str(error.strerror), meaning="it cannot be written", fix="see `storage`")
    return conclude(
        f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's",
        Case(
            abs(skew) > _SKEW_S,
            "warning",
            meaning="times of logs and checkpoints cannot be compared between nodes; caches may seem older than they"
            " are",
            fix="run chrony or ntpd on this machine and on the file server",
        ),
        ok="times of files agree with those of logs",
    )


def _has_locks(file: Path) -> bool:
    with file.open("r+b") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
