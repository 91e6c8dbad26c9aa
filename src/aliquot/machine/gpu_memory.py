"""The memory of this process's GPU: tensors, torch's allocator, and everything outside of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU."""

    allocated_bytes: int  # live tensors
    reserved_bytes: int  # what torch's allocator has taken from the driver: live tensors and its cache
    beside_bytes: int  # all other use: the CUDA context, NCCL, other processes
    peak_bytes: int  # peak of `reserved_bytes` since `reset_peak`, plus the present `beside_bytes`

    @property
    def used_bytes(self) -> int:
        return self.reserved_bytes + self.beside_bytes


class Gpu:
    """The current CUDA device of this process; tests replace it by an object with recorded numbers."""

    def memory(self) -> GpuMemory:
        """Ask the allocator and the driver, without waiting for a kernel."""
        stats = torch.cuda.memory_stats()
        reserved = int(stats.get("reserved_bytes.all.current", 0))  # absent before the first allocation
        free, total = torch.cuda.mem_get_info()
        outside = max(0, total - free - reserved)
        return GpuMemory(
            allocated_bytes=int(stats.get("allocated_bytes.all.current", 0)),
            reserved_bytes=reserved,
            beside_bytes=outside,
            peak_bytes=int(stats.get("reserved_bytes.all.peak", 0)) + outside,
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def current_gpu(device: str) -> Gpu | None:
    """Return the GPU of a rank that computes on `device`, or None if that is the CPU."""
    return Gpu() if device == "cuda" else None
