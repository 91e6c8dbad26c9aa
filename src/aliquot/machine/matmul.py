"""What this rank's cores or GPU reach in a plain matrix product while all ranks compute at once: the ceiling of MFU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch

_SECONDS = 0.3
_SIZES = {"cpu": (192, 384, 768, 1536), "cuda": (8192,)}
_AT_ONCE = {"cpu": 1, "cuda": 16}  # at most; each waited for: 668 TFLOP/s on an H200, whose steps' reach 762


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
