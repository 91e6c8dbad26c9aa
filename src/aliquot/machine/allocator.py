"""The memory allocator of a process: which one it has, starting with one that keeps freed memory, giving memory back.

Every micro-batch frees tensors of megabytes and asks for the same again; glibc hands them back to the kernel each time.
tcmalloc and jemalloc do not, but can only be loaded when a process starts: our ranks are started with one where it is
installed, and a process that was started by others replaces itself once. Else glibc is told to keep more.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aliquot.core.interpreter import become_python
from aliquot.machine.memory import private_bytes

VARIABLE = "ALIQUOT_ALLOCATOR"  # "none": leave it alone; else what was chosen, so that nobody chooses twice
_STEPS_KEPT, _SECONDS_KEPT = 50, 120.0  # a thousandth of the time at most
BY_RESTART = " (restarted)"  # ends the variable's value where the process replaced itself by one with an allocator
_NAMES = ("libtcmalloc.so.4", "libtcmalloc_minimal.so.4", "libjemalloc.so.2")
_FOLDERS = ("usr/lib64", "usr/lib", "usr/local/lib", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 512 << 20
# Of small blocks, which are not given back. It keeps four times as many by itself, once thousands of steps have passed.
_OF_TCMALLOC = {"TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES": str(8 << 20)}


def allocator_in(text: str) -> str | None:
    """The allocator that is named in the value of LD_PRELOAD or in a process's list of mappings."""
    return next((name for name in ("tcmalloc", "jemalloc", "mimalloc") if f"lib{name}" in text), None)


def allocator_name() -> str:
    """The allocator of this process."""
    return allocator_in(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")) or "glibc"


def give_back() -> None:
    """Return what is free to the kernel: glibc keeps it, tcmalloc returns it slowly; jemalloc does by itself."""
    loaded = ctypes.CDLL(None)
    if hasattr(loaded, "MallocExtension_ReleaseFreeMemory"):
        loaded.MallocExtension_ReleaseFreeMemory()
    elif allocator_name() == "glibc" and hasattr(loaded, "malloc_trim"):
        loaded.malloc_trim(0)


class FreedMemory:
    """What a step has freed, which the allocator keeps for the next one.

    No two steps need the same, so in time it is what the worst of thousands left. It is given back now and then: the
    next step faults in what it needs itself, in some hundredths of a second.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._at = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether it has not been given back for long: all ranks wait for one that does."""
        return step - self._step >= _STEPS_KEPT and time.monotonic() - self._at >= _SECONDS_KEPT

    def give_back(self, step: int) -> None:
        give_back()
        self._step, self._at = step, time.monotonic()


def described() -> str:
    """Its name, and how it came to be loaded if this process had to replace itself for it."""
    restarted = os.environ.get(VARIABLE, "").endswith(BY_RESTART)
    return f"{allocator_name()}, preloaded by one restart" if restarted else allocator_name()


def with_allocator(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """`environ` for a training process: with a preloaded allocator, if one is installed and none chosen yet."""
    if VARIABLE in environ or allocator_in(environ.get("LD_PRELOAD", "")):
        return dict(environ)
    places = (root / folder / name for name in _NAMES for folder in _FOLDERS)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        return {**environ, VARIABLE: "glibc"}
    preload = ":".join(filter(None, (str(found), environ.get("LD_PRELOAD"))))
    return {**_OF_TCMALLOC, **environ, "LD_PRELOAD": preload, VARIABLE: found.name}


def restart_with_allocator() -> None:
    """Replace this process by itself with an allocator preloaded; returns if there is nothing to gain."""
    environ = with_allocator(os.environ)
    if environ.get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        environ[VARIABLE] += BY_RESTART
        sys.stdout.flush()
        sys.stderr.flush()
        become_python(sys.orig_argv[1:], environ)


def tune() -> None:
    """Let glibc keep freed memory, if it is the allocator of this process and nobody said to leave it alone."""
    libc = ctypes.CDLL(None)
    if allocator_name() == "glibc" and os.environ.get(VARIABLE) != "none" and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class _Mallinfo2(ctypes.Structure):
    """glibc's, from 2.33 on."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class KeptMemory:
    """Bounds, by `check`, by how many bytes what this process holds without using it grows. Allocators other than
    glibc's, and one that is to be left alone (ALIQUOT_ALLOCATOR=none), do as they do."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._libc = ctypes.CDLL(None)
        self._bounded = allocator_name() == "glibc" and os.environ.get(VARIABLE) != "none"
        self._counts = hasattr(self._libc, "mallinfo2")
        if self._counts:
            self._libc.mallinfo2.restype = _Mallinfo2
        self._least = self._unused()

    def check(self, *_: Any) -> None:
        """Give back what is free if that has become too much. Microseconds if not. May be called as a hook."""
        if not self._bounded:
            return
        unused = self._unused()
        if unused - self._least > self._most:
            give_back()
            self._least = self._unused()  # buffers that were mapped meanwhile count, but cannot be given back
        self._least = min(self._least, unused)

    def _unused(self) -> int:
        """Private memory that is not in use by what was allocated; where glibc does not tell (before 2.33), all."""
        return private_bytes() - (self._used() if self._counts else 0)

    def _used(self) -> int:
        told = self._libc.mallinfo2()
        return int(told.uordblks + told.hblkhd)
