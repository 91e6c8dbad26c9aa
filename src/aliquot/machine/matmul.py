"""Matrix products on this machine: which kernel runs, and the rate that they reach, which is the ceiling of MFU."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Literal

import torch

_FEWEST_ROWS, _FEWEST_COLUMNS, _SMALLEST_RIGHT_SIDE = 64, 512, 1 << 19
_MKL, _NATIVE = "MKL", "not oneDNN"
_EXECUTED = re.compile(r"onednn_verbose,.*exec,cpu,(?:matmul|inner_product),([^,]+),")
_SECONDS = 0.3
_SIZES = {"cpu": (192, 384, 768, 1536), "cuda": (8192,)}
_AT_ONCE = {"cpu": 1, "cuda": 16}  # at most; each waited for: 668 TFLOP/s on an H200, whose steps' reach 762


@functools.cache
def matmul_kernel(precision: Literal["bf16", "fp32"]) -> str:
    """For example `brg_matmul:avx512_core_bf16` or `brg_matmul:avx512_core_amx`; MKL where that is what torch takes.

    oneDNN reports on the C library's standard output, which for that moment is a file.
    """
    mkldnn, mkl = torch.backends.mkldnn, torch.backends.mkl
    if not mkldnn.is_available():  # type: ignore[no-untyped-call]
        return _NATIVE
    left = torch.ones(256, 256, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    saved = os.dup(1)
    try:
        with tempfile.TemporaryFile("w+", encoding="utf-8") as report:
            os.dup2(report.fileno(), 1)
            with mkldnn.verbose(mkldnn.VERBOSE_ON):  # type: ignore[no-untyped-call]
                torch.mm(left, left)
            libc.fflush(None)
            report.seek(0)
            found = _EXECUTED.search(report.read())
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    if found is not None:
        return found[1]
    return _MKL if mkl.is_available() else _NATIVE  # type: ignore[no-untyped-call]


def keeps_kernels(precision: Literal["bf16", "fp32"]) -> bool:
    """Whether products are oneDNN's, which keeps a kernel for each shape that it has met."""
    return matmul_kernel(precision) not in (_MKL, _NATIVE)


def keeps_large_kernels(device: str, precision: Literal["bf16", "fp32"]) -> bool:
    """Whether it keeps nearly a MiB for each shape: those for AMX. 1,080 products took 880 MiB, and 3,000 79 MiB with
    AVX-512, where it kept 1,024 of them (torch 2.13, oneDNN 3.12)."""
    return device == "cpu" and precision == "bf16" and "amx" in matmul_kernel("bf16")


def copies_transposed(device: str, dtype: torch.dtype) -> bool:
    """Whether a product with a transposed left side may be faster from a copy of that side: oneDNN's AMX kernels take
    up to 2.7 times as long for one as for a plain product (torch 2.13, oneDNN 3.12), those of AVX-512 as long."""
    return device == "cpu" and dtype == torch.bfloat16 and "amx" in matmul_kernel("bf16")


def copy_pays(rows: int, terms: int, columns: int) -> bool:
    """Whether that holds for this product, [rows, terms] @ [terms, columns] of which the left side is to be copied.

    What a copy costs grows with rows and terms, what it saves with columns, too, and with the length of a sum. The
    limits are where `benchmarks/parts.py` finds both equal, on two cores of an Intel Xeon with AMX.
    """
    return rows >= _FEWEST_ROWS and columns >= _FEWEST_COLUMNS and terms * columns >= _SMALLEST_RIGHT_SIDE


def matmul_rate(
    device: Literal["cpu", "cuda"], precision: Literal["bf16", "fp32"], barrier: Callable[[], None]
) -> float:
    """FLOP/s of this rank: the median over square products for about 0.3 s, which all ranks begin after `barrier`.

    Products are as large as lets several of them fit: a CPU without bf16 instructions takes 15 s for the largest.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def product(size: int) -> Callable[[int], float]:
        left, right, out = torch.randn(3, size, size, device=device, dtype=dtype)

        def seconds(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                torch.mm(left, right, out=out)
            if device == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - start) / count

        seconds(1)  # the first one chooses kernels and touches pages
        return seconds

    for size in _SIZES[device]:
        seconds = product(size)
        one = seconds(1)
        if 8 * one > _SECONDS / 3:  # the next size takes eight times as long
            break
    count = max(1, min(_AT_ONCE[device], int(_SECONDS / 3 / one)))
    barrier()
    times: list[float] = []
    while count * sum(times) < _SECONDS or len(times) < 3:
        times.append(seconds(count))
    return 2 * size**3 / statistics.median(times)
