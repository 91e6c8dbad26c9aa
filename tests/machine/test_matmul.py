"""The ceiling of MFU is measured with products that this machine can do several of in a third of a second."""

from __future__ import annotations

import time

import pytest
import torch

from aliquot.machine.matmul import _AT_ONCE, matmul_rate


@pytest.mark.parametrize("at_once", [1, 16])  # the CPU's, and a GPU's
@pytest.mark.parametrize(("flops_per_s", "largest"), [(5e9, 384), (1e15, 1536)])
def test_sizes_are_those_that_the_machine_can_do(
    monkeypatch: pytest.MonkeyPatch, flops_per_s: float, largest: int, at_once: int
) -> None:
    monkeypatch.setitem(_AT_ONCE, "cpu", at_once)
    sizes, barriers, now = [], [], [0.0]

    def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        sizes.append(len(left))
        now[0] += 2 * len(left) ** 3 / flops_per_s

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    if flops_per_s == 1e15:  # a clock that moves at all: 0.3 s would be thousands of products
        monkeypatch.setattr("aliquot.machine.matmul._SECONDS", 1e-4)
    assert matmul_rate("cpu", "bf16", lambda: barriers.append(len(sizes))) == pytest.approx(flops_per_s)
    assert max(sizes) == sizes[-1] == largest
    assert len(barriers) == 1 and len(sizes) - barriers[0] >= 3
