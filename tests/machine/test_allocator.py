"""When what was freed is given back to the kernel, and that it is."""

from __future__ import annotations

import pytest
import torch

from aliquot.machine import allocator
from aliquot.machine.memory import private_bytes

MIB = 1 << 20


def test_freed_memory_is_given_back_after_many_steps_and_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(allocator.time, "monotonic", lambda: now)
    freed = allocator.FreedMemory(7)
    now += 1e6
    assert not freed.is_due(56)  # steps of hours
    assert freed.is_due(57)
    freed.give_back(57)
    now += 119
    assert not freed.is_due(5000)  # steps of milliseconds
    now += 1
    assert freed.is_due(5000)


def test_it_goes_back_to_the_kernel() -> None:
    freed = allocator.FreedMemory(0)
    blocks = [torch.ones(MIB // 8) for _ in range(200)]  # half a MiB each
    held = private_bytes()
    del blocks
    freed.give_back(1)
    assert held - private_bytes() > 50 * MIB
