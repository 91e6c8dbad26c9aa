"""Matrix products: which kernel runs, and their rate."""

from __future__ import annotations

import time

import pytest
import torch

from aliquot.machine import matmul
from aliquot.machine.matmul import _PRODUCTS, matmul_kernel, matmul_rate


@pytest.mark.parametrize("at_once", [1, 16])  # the CPU's, and a GPU's
@pytest.mark.parametrize(("flops_per_s", "largest"), [(5e9, 384), (1e15, 1536)])
def test_matmul_rate_chooses_sizes_that_fit_in_time(
    monkeypatch: pytest.MonkeyPatch, flops_per_s: float, largest: int, at_once: int
) -> None:
    monkeypatch.setitem(_PRODUCTS, "cpu", at_once)
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


@pytest.mark.parametrize(
    ("name", "caches"),
    [("brg_matmul:avx512_core_bf16", True), ("gemm:jit", True), ("MKL", False), ("not oneDNN", False)],
)
def test_only_onednn_caches_kernels(name: str, caches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "matmul_kernel", lambda _: name)
    assert matmul.caches_kernels("bf16") == caches


def test_the_kernel_is_what_onednn_reports(capfd: object) -> None:
    kernel = matmul_kernel("bf16")
    assert kernel and "onednn" not in kernel
    print("standard output is back")
    assert "standard output is back" in capfd.readouterr().out  # type: ignore[attr-defined]
