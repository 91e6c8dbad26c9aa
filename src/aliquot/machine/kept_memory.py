"""How much freed memory glibc may keep while a model trains that is larger than memory.

Giving nothing back is fastest, but the blocks of a layer find no place between those that the layers before have saved:
a forward pass would take several times what it holds. (tcmalloc's find one: bounded in the same way it held as much at
most, and steps were 4 % slower.) Giving every large block back at once costs a page fault for
each 4 KiB, a third of the time of a step. So it is looked at between layers, and given back where it has become much.
"""

from __future__ import annotations

import ctypes
import os
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
