"""What torch.compile is to be told of this CPU."""

from __future__ import annotations

import functools
from typing import Any

from aliquot.machine.cpu import read_cpu


@functools.cache
def kernel_options() -> dict[str, Any] | None:
    """The `options` of torch.compile for kernels on this CPU; None: its own.

    For Intel's CPUs compilers prefer vectors of half the length that Inductor's code is written for. They then write
    what it reinterprets from float to int to the stack in two halves, which is read as one, and presumably waited for:
    the update of optim/adamw.py takes 2.3 times as long. The code's own instructions do not depend on this.
    """
    cpu = read_cpu()
    if not cpu.model.startswith("Intel") or "avx512f" not in cpu.isa:
        return None
    import torch._inductor as inductor
    from torch._inductor import config

    if "cpp.march" not in inductor.list_options() or config.cpp.march is not None:
        return None
    return {"cpp.march": "x86-64-v4"}
