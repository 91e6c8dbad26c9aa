"""Memory of this process: private and shared bytes, PSS, peaks; of a GPU from recorded numbers.

Which GPU the threads of a rank use, by recorded calls.
"""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest
import torch

from aliquot.checkpoint.background_task import BackgroundTask
from aliquot.machine import memory
from aliquot.machine.device_copies import on_this_gpu
from aliquot.machine.memory import (
    Gpu,
    GpuMemory,
    MemoryUse,
    PssSampler,
    current_gpu,
    has_gpus,
    memory_use,
)

MIB, GIB = 1 << 20, 1 << 30


def test_memory_use_separates_private_and_shared() -> None:
    before = memory_use()
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private:
        private.write(b"x" * len(private))
        after = memory_use()
    assert 60 * MIB < after.private_bytes - before.private_bytes < 140 * MIB
    assert after.rss_bytes == pytest.approx(after.private_bytes + after.shared_bytes, abs=MIB)
    assert after.private_bytes <= after.pss_bytes <= after.rss_bytes


def test_pss_sampler_takes_at_most_1_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    now, readings = 1000.0, 0

    def slow() -> MemoryUse:
        nonlocal now, readings
        now, readings = now + 0.25, readings + 1
        return MemoryUse(0, 0, 0, readings)

    monkeypatch.setattr(memory, "memory_use", slow)
    monkeypatch.setattr(memory.time, "monotonic", lambda: now)
    sampler, samples = PssSampler(), []
    for _ in range(50):
        samples.append(sampler.bytes())
        now += 1
    assert samples == [1] * 25 + [2] * 25


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


@pytest.mark.parametrize("device", [None, "null", "nvidia0", "dxg"])
def test_gpus_are_seen_under_wsl_too(tmp_path: Path, device: str | None) -> None:
    (tmp_path / "dev").mkdir()
    if device is not None:
        (tmp_path / "dev" / device).touch()
    assert has_gpus(tmp_path) == (device in ("nvidia0", "dxg"))


def test_current_gpu_is_none_on_cpu() -> None:
    assert current_gpu("cpu") is None and isinstance(current_gpu("cuda"), Gpu)


def test_saving_thread_uses_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: chosen.append((gpu, threading.current_thread().name)))
    task = BackgroundTask("aliquot-save", lambda: list(chosen))
    assert task.join(30) and task.result == [(3, "aliquot-save")]


def test_work_on_cpus_stays_as_it_is() -> None:
    work = threading.Event().set
    assert on_this_gpu(work) is work
