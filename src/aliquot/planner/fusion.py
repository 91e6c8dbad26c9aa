"""What torch.compile makes of the operations between matrix products: each run of them one pass over memory."""

from __future__ import annotations

from typing import Any

import torch

# Beside what torch tags as elementwise: what Inductor computes in the same loops.
_FUSED = ("aten::mean", "aten::sum", "aten::cat", "aten::_to_copy", "aten::copy_", "aten::slice_backward")


def fuses(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func._schema.name in _FUSED


class FusedRun:
    """Operations that follow each other. Each storage that comes from before is read once; of those that arise, only
    what is still there at the end was ever written."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}  # storage -> bytes
        self._made: dict[int, int] = {}
        self._largest = 0

    def add(self, inputs: dict[int, int], outputs: dict[int, int]) -> None:
        """Storages of one operation and their bytes; what it writes in place is among both."""
        self._read |= {key: size for key, size in inputs.items() if key not in self._made}
        self._made |= outputs
        self._largest = max(self._largest, *inputs.values(), *outputs.values(), 0)

    def moved(self, alive: set[int]) -> tuple[int, int]:
        """(bytes of the largest tensor, bytes that are moved), with `alive` the storages that are left."""
        return self._largest, sum(self._read.values()) + sum(self._made[key] for key in self._made if key in alive)
