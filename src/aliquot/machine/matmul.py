"""Matrix products on this machine: the kernel that computes them, and their measured rate, the ceiling of MFU."""

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

from aliquot.machine.cpu import Precision, faster_precision, read_cpu
from aliquot.machine.memory import AMPERE

_FEWEST_ROWS, _FEWEST_COLUMNS, _SMALLEST_RIGHT_SIDE = 64, 512, 1 << 19
_MKL, _NATIVE = "MKL", "not oneDNN"
_VERBOSE_LINE = re.compile(r"onednn_verbose,.*exec,cpu,(?:matmul|inner_product),([^,]+),")
_SECONDS = 0.3
_SIZES = {"cpu": (192, 384, 768, 1536), "cuda": (8192,)}
# Largest number of products per timing. Timed one by one, products reach 668 TFLOP/s on an H200, whereas products in
# training steps reach 762 TFLOP/s.
_PRODUCTS = {"cpu": 1, "cuda": 16}


def faster_precision_here(device: str) -> Precision:
    """Return what `train.precision: auto` chooses on this machine: bf16 where it is faster than fp32."""
    if device == "cuda":
        return "bf16" if torch.cuda.get_device_capability()[0] >= AMPERE else "fp32"
    return faster_precision(read_cpu().isa)


@functools.cache
def matmul_kernel(precision: Literal["bf16", "fp32"]) -> str:
    """Return the kernel that computes a matrix product, as oneDNN reports it; the CPU's features do not imply it.

    Examples are `brg_matmul:avx512_core_bf16`, `brg_matmul:avx512_core_amx` and `MKL`. oneDNN reports on the standard
    output of the C library, which this function redirects into a file meanwhile.
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
            match = _VERBOSE_LINE.search(report.read())
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    if match is not None:
        return match[1]
    return _MKL if mkl.is_available() else _NATIVE  # type: ignore[no-untyped-call]


def caches_kernels(precision: Literal["bf16", "fp32"]) -> bool:
    """Whether oneDNN computes matrix products: oneDNN caches a kernel for every shape."""
    return matmul_kernel(precision) not in (_MKL, _NATIVE)


def multiplies_with_amx(device: str, precision: Precision) -> bool:
    """Whether oneDNN's AMX kernels compute matrix products. These kernels are special in two ways.

    They take nearly a MiB of memory per shape: the kernels of 1,080 shapes took 880 MiB. With AVX-512, the kernels of
    3,000 shapes, of which 1,024 were cached, took 79 MiB. With a transposed left operand, they take up to 2.7 times as
    long as without, so that copying the operand first may be faster. AVX-512 kernels take the same time with and
    without (torch 2.13, oneDNN 3.12).
    """
    return device == "cpu" and precision == "bf16" and "amx" in matmul_kernel("bf16")


def copy_pays(rows: int, terms: int, columns: int) -> bool:
    """Whether copying the left operand makes the product [rows, terms] @ [terms, columns] faster.

    The cost of the copy grows with rows and terms; the gain also grows with columns. At these limits,
    `benchmarks/parts.py` measures the cost equal to the gain, on two cores of an Intel Xeon with AMX.
    """
    return rows >= _FEWEST_ROWS and columns >= _FEWEST_COLUMNS and terms * columns >= _SMALLEST_RIGHT_SIDE


def matmul_rate(
    device: Literal["cpu", "cuda"], precision: Literal["bf16", "fp32"], barrier: Callable[[], None]
) -> float:
    """Measure the FLOP/s of this rank in square products while all ranks compute: the ceiling of MFU.

    The result is the median over about 0.3 s after `barrier`. The matrices have the largest size at which several
    products fit in that time: a CPU without bf16 instructions would take 15 s for one product of the largest size.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right, out=out)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    for size in _SIZES[device]:
        left, right, out = torch.randn(3, size, size, device=device, dtype=dtype)
        seconds(1)  # the first product chooses a kernel and touches pages
        single_s = seconds(1)
        if 8 * single_s > _SECONDS / 3:  # the next size takes eight times as long
            break
    count = max(1, min(_PRODUCTS[device], int(_SECONDS / 3 / single_s)))
    barrier()
    times: list[float] = []
    while count * sum(times) < _SECONDS or len(times) < 3:
        times.append(seconds(count))
    return 2 * size**3 / statistics.median(times)
