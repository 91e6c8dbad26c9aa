"""Which kernel a matrix product really runs on: what oneDNN reports of one, not what the CPU could do."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import tempfile
from typing import Literal

import torch

_FEWEST_ROWS, _FEWEST_COLUMNS, _SMALLEST_RIGHT_SIDE = 64, 512, 1 << 19
_MKL, _NATIVE = "MKL", "not oneDNN"
_EXECUTED = re.compile(r"onednn_verbose,.*exec,cpu,(?:matmul|inner_product),([^,]+),")


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
