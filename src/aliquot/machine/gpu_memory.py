"""What this process, and what is beside it, holds of its GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU."""

    allocated_bytes: int  # of tensors that live
    reserved_bytes: int  # what torch's allocator has of the driver: those, and what it keeps for the next
    beside_bytes: int  # whatever else is used: this process' context, NCCL; other processes, where there are any
    peak_bytes: int  # the most that was reserved since `reset_peak`, and what is beside it now

    @property
    def used_bytes(self) -> int:
        return self.reserved_bytes + self.beside_bytes


class Gpu:
    """The current device of this process. What asks it can be given another of these methods, with recorded numbers."""

    def memory(self) -> GpuMemory:
        """Asks the allocator and the driver; waits for no kernel."""
        stats = torch.cuda.memory_stats()
        reserved = int(stats.get("reserved_bytes.all.current", 0))  # nothing is told before the first allocation
        free, total = torch.cuda.mem_get_info()
        beside = max(0, total - free - reserved)
        return GpuMemory(
            allocated_bytes=int(stats.get("allocated_bytes.all.current", 0)),
            reserved_bytes=reserved,
            beside_bytes=beside,
            peak_bytes=int(stats.get("reserved_bytes.all.peak", 0)) + beside,
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def gpu_of(device: str) -> Gpu | None:
    """Of a rank that computes on `device`; None: it computes on CPUs."""
    return Gpu() if device == "cuda" else None
