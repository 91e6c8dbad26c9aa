"""Which memory allocator this process has."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

VARIABLE = "ALIQUOT_ALLOCATOR"  # "none": leave it alone; else what was chosen, so that nobody chooses twice
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


def described() -> str:
    """Its name, and how it came to be loaded if this process had to replace itself for it."""
    restarted = os.environ.get(VARIABLE, "").endswith(BY_RESTART)
    return f"{allocator_name()}, preloaded by one restart" if restarted else allocator_name()
