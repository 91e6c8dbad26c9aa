"""What a measurement must be read beside: the machine and the versions it was taken with."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from aliquot.machine import allocator
from aliquot.machine.cpu import read_cpu
from aliquot.machine.memory import memory_limit


def machine_facts() -> dict[str, Any]:
    """JSON-able facts of this machine. Read before pinning: the cores are those this process may use."""
    import torch

    from aliquot.machine.kernels import matmul_kernel

    cpu = read_cpu()
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "cpu": cpu.model,
        "physical_cores": len(cpu.cores),
        "cpu_quota": cpu.quota,
        "numa_nodes": cpu.numa_nodes,
        "isa": list(cpu.isa),
        "matmul_kernels": {"bf16": matmul_kernel("bf16"), "fp32": matmul_kernel("fp32")},
        "allocator": allocator.described(),
        "memory_limit_bytes": memory_limit(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if torch.cuda.device_count() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
