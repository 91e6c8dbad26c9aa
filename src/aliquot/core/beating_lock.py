"""A lock for file systems that have none: a file that its holder touches, again and again, for as long as it lives."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aliquot.core.boot import boot_id
from aliquot.core.errors import RunDirectoryError

BEAT_S = 5.0
WATCHED_S = 4 * BEAT_S  # without a beat in it, its holder on another machine is taken for dead


@contextmanager
def beating_lock(file: Path) -> Iterator[int]:
    """The descriptor of the file, open while the lock is held. Raises UserError while another process holds the lock,
    which is seen at once on its own machine."""
    own = {"machine": machine(), "pid": os.getpid(), "started": _started(os.getpid()), "mark": secrets.token_hex(8)}
    while (descriptor := _take(file, own)) is None:
        holder = _read(file)
        if _lives(file, holder):
            raise RunDirectoryError("another process is training into this run directory", file.parent)
        _remove(file, holder)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with suppress(OSError):
                os.utime(descriptor)  # never the file of a process that has taken the lock meanwhile

    threading.Thread(target=beat, name="aliquot-lock", daemon=True).start()
    try:
        yield descriptor
    finally:
        over.set()
        _remove(file, own)
        os.close(descriptor)


def _take(file: Path, own: dict[str, Any]) -> int | None:
    """The descriptor of the lock file that this process has made; None if the file exists already."""
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return None
    os.write(descriptor, json.dumps(own).encode())
    return descriptor


def _remove(file: Path, holder: Any) -> None:
    """The lock of `holder`, not that of another who has taken it meanwhile: what has a name of its own nobody takes."""
    if _read(file) != holder:
        return
    aside = file.with_name(f"{file.name}-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        file.rename(aside)
        if _read(aside) == holder:
            aside.unlink()
        else:
            aside.rename(file)


def _lives(file: Path, holder: Any) -> bool:
    """Whether the process still runs, on this machine; whether it beats, on another one, whose clock may be wrong."""
    if isinstance(holder, dict) and holder.get("machine") == machine():
        # A container that starts again has the process ids that it had, and often the number of their namespace.
        return (started := _started(holder.get("pid"))) is not None and holder.get("started", started) == started
    before, until = _beat_of(file), time.monotonic() + WATCHED_S
    while time.monotonic() < until:
        if _beat_of(file) != before:
            return True
        time.sleep(WATCHED_S / 100)
    return False


def _started(pid: object) -> int | None:
    """When this process was started, in ticks since the kernel was; None: there is none."""
    with suppress(OSError, ValueError, IndexError):
        # The name before, in parentheses, may hold anything.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    return None


def _beat_of(file: Path) -> int | None:
    with suppress(OSError), file.open() as opened:  # an NFS client then asks its server, else it may not
        return os.fstat(opened.fileno()).st_mtime_ns
    return None


def _read(file: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))
    return None


def machine() -> str:
    """Within which process ids mean something: a start of this kernel, and a container's own numbering."""
    return f"{boot_id()}:{Path('/proc/self/ns/pid').stat().st_ino}"
