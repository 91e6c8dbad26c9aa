"""How much freed memory an allocator may keep while a model trains that is larger than memory.

Giving nothing back is fastest, but the blocks of a layer find no place between those that the layers before have saved:
with glibc a forward pass would take several times what it holds, with tcmalloc a good part more. Giving every large
block back at once costs a page fault for each 4 KiB, a third of the time of a step. So it is looked at between layers,
and given back where it has become much.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from aliquot.machine.allocator import VARIABLE, allocator_name, give_back
from aliquot.machine.memory import private_bytes


class _Mallinfo2(ctypes.Structure):
    """glibc's, from 2.33 on."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class KeptMemory:
    """Bounds, by `check`, by how many bytes what this process holds without using it grows: of glibc and tcmalloc.
    Other allocators, and one that is to be left alone (ALIQUOT_ALLOCATOR=none), do as they do."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._loaded = ctypes.CDLL(None)
        name = allocator_name()
        self._bounded = name in ("glibc", "tcmalloc") and os.environ.get(VARIABLE) != "none"
        self._used: Callable[[], int] = lambda: 0  # where the allocator does not tell, all counts as unused
        if name == "tcmalloc" and hasattr(self._loaded, "MallocExtension_GetNumericProperty"):
            self._used = self._used_of_tcmalloc
        elif name == "glibc" and hasattr(self._loaded, "mallinfo2"):
            self._loaded.mallinfo2.restype = _Mallinfo2
            self._used = self._used_of_glibc
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
        """Private memory that is not in use by what was allocated."""
        return private_bytes() - self._used()

    def _used_of_glibc(self) -> int:
        told = self._loaded.mallinfo2()
        return int(told.uordblks + told.hblkhd)

    def _used_of_tcmalloc(self) -> int:
        told = ctypes.c_size_t()
        self._loaded.MallocExtension_GetNumericProperty(b"generic.current_allocated_bytes", ctypes.byref(told))
        return told.value
