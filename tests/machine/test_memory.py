"""Memory of this process: private and shared bytes, PSS, peaks."""

from __future__ import annotations

import mmap

import pytest

from aliquot.machine import memory
from aliquot.machine.memory import MemoryUse, PssSampler, memory_use, peak_rss, reset_peak_rss

MIB = 1 << 20


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


def test_peak_rss_restarts_after_reset() -> None:
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private:
        private.write(b"x" * len(private))
    high = peak_rss()
    if not reset_peak_rss():
        pytest.skip("this kernel does not permit resetting the peak")
    assert peak_rss() < high - 32 * MIB
