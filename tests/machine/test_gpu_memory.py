"""What a GPU's memory is told as, from numbers as torch and the driver tell them; no GPU is needed."""

from __future__ import annotations

import pytest
import torch

from aliquot.machine.gpu_memory import Gpu, GpuMemory, current_gpu

GIB = 1 << 30


def test_gpu_memory_inside_and_outside_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "allocated_bytes.all.current": 3 * GIB, "reserved_bytes.all.current": 5 * GIB,
        "allocated_bytes.all.peak": 6 * GIB, "reserved_bytes.all.peak": 7 * GIB,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (74 * GIB, 80 * GIB))
    found = Gpu().memory()
    assert found == GpuMemory(3 * GIB, 5 * GIB, beside_bytes=1 * GIB, peak_bytes=8 * GIB)
    assert found.used_bytes == 6 * GIB
    stats.clear()  # before the first allocation
    assert Gpu().memory() == GpuMemory(0, 0, beside_bytes=6 * GIB, peak_bytes=6 * GIB)


def test_current_gpu_is_none_on_cpu() -> None:
    assert current_gpu("cpu") is None and isinstance(current_gpu("cuda"), Gpu)
