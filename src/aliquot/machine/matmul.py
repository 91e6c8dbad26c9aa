"""What this rank's cores or GPU reach in a plain matrix product while all ranks compute at once: the ceiling of MFU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch

_SECONDS = 0.3
_SIZE = {"cpu": 1536, "cuda": 8192}


def matmul_rate(
    device: Literal["cpu", "cuda"], precision: Literal["bf16", "fp32"], barrier: Callable[[], None]
) -> float:
    """FLOP/s of this rank: the median over square products for about 0.3 s, which all ranks begin after `barrier`."""
    size = _SIZE[device]
    left, right, out = torch.randn(
        3, size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32
    )
    torch.mm(left, right, out=out)  # the first one chooses kernels and touches pages
    barrier()
    times: list[float] = []
    while sum(times) < _SECONDS or len(times) < 3:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times)
