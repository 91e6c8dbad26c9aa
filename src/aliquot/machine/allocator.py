"""Which memory allocator this process has."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

VARIABLE = "ALIQUOT_ALLOCATOR"  # "none": leave it alone; else what was chosen, so that nobody chooses twice
_STEPS_KEPT, _SECONDS_KEPT = 50, 120.0  # a thousandth of the time at most
BY_RESTART = " (restarted)"  # ends the variable's value where the process replaced itself by one with an allocator


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
