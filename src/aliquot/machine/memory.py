"""The memory of this process and of its GPU, the limit that its container sets, and whether there are GPUs."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

from aliquot.machine.cgroup import control_groups, read_text

AMPERE = 8  # the first major compute capability of GPUs with bf16, and with kernels for attention
_SELF = Path("/proc/self")
_LEAST_LOCKABLE_BYTES = 1 << 30  # NCCL's and libfabric's buffers in host memory; systemd's default limit is 8 MiB
_PAUSE = 100  # pause between readings, in multiples of a reading's duration: readings take at most 1 % of the time


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one process. RSS counts shared pages in full, PSS divides them by their users."""

    rss_bytes: int
    private_bytes: int
    shared_bytes: int
    pss_bytes: int


def memory_use() -> MemoryUse:
    """Read the memory of this process."""
    if not (_SELF / "smaps_rollup").exists():  # gVisor exposes only sums
        fields = kib_fields(_SELF / "status")
        rss_bytes, shared_bytes = fields["VmRSS"], fields.get("RssFile", 0) + fields.get("RssShmem", 0)
        return MemoryUse(rss_bytes, rss_bytes - shared_bytes, shared_bytes, rss_bytes)
    fields = kib_fields(_SELF / "smaps_rollup")
    private = fields["Private_Clean"] + fields["Private_Dirty"] + fields.get("Private_Hugetlb", 0)
    shared = fields["Shared_Clean"] + fields["Shared_Dirty"] + fields.get("Shared_Hugetlb", 0)
    return MemoryUse(fields["Rss"], private, shared, fields["Pss"])


def private_bytes() -> int:
    """Return the resident bytes that are neither file nor shared memory; takes microseconds."""
    _, resident, shared, *_ = (_SELF / "statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * resource.getpagesize()


class PssSampler:
    """Read the PSS of this process rarely, because the kernel walks all pages of the process for a reading."""

    def __init__(self) -> None:
        self._bytes = 0
        self._next_reading = 0.0

    def bytes(self) -> int:
        """Return the present PSS, or the last reading if the next reading is not due."""
        start = time.monotonic()
        if start >= self._next_reading:
            self._bytes = memory_use().pss_bytes
            end = time.monotonic()
            self._next_reading = end + _PAUSE * (end - start)
        return self._bytes


def peak_rss() -> int:
    """Return the peak of resident bytes since the process started or since the last `reset_peak_rss`."""
    return kib_fields(_SELF / "status")["VmHWM"]


def peak_pss(now: MemoryUse) -> int:
    """Estimate the peak of PSS since the last `reset_peak_rss`.

    The kernel records only the peak of RSS, which counts shared pages in full. The estimate subtracts the present
    difference between RSS and PSS.
    """
    return max(now.pss_bytes, peak_rss() - (now.rss_bytes - now.pss_bytes))


def reset_peak_rss() -> bool:
    """Reset the recorded peak to the present resident bytes. Return False if the kernel does not permit that."""
    try:
        (_SELF / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def unwritten_bytes() -> int:
    """Return the bytes in this machine's page cache that are not on disk yet."""
    fields = kib_fields(Path("/proc/meminfo"))
    return fields.get("Dirty", 0) + fields.get("Writeback", 0)


def memory_limit(root: Path = Path("/")) -> int:
    """Return the bytes that all processes of the container can use: the tightest control group's limit, or all RAM."""
    limits = [kib_fields(root / "proc/meminfo")["MemTotal"]]
    for group in control_groups("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_text(group / name)
            if text is not None and text != "max":
                limits.append(int(text))  # version 1 writes "no limit" as a number near 2^63
    return min(limits)


def too_little_lockable(root: Path = Path("/")) -> int | None:
    """Return the limit of locked memory in bytes if it is too low for this machine's RDMA cards, such as EFA.

    None: the limit is high enough, or the container has no RDMA card. Each rank registers its network buffers with the
    card, and the kernel counts registered memory as locked.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_LOCKABLE_BYTES:
        return None
    return soft if any((root / "dev/infiniband").glob("uverbs*")) else None


def kib_fields(file: Path) -> dict[str, int]:
    """Parse lines like `Name:   12 kB` into bytes."""
    fields = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            fields[words[0].rstrip(":")] = int(words[1]) * 1024
    return fields


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU."""

    allocated_bytes: int  # live tensors
    reserved_bytes: int  # memory of torch's allocator: live tensors and cached blocks
    beside_bytes: int  # all other use: the CUDA context, NCCL, other processes
    peak_bytes: int  # peak of `reserved_bytes` since `reset_peak`, plus the present `beside_bytes`

    @property
    def used_bytes(self) -> int:
        return self.reserved_bytes + self.beside_bytes


class Gpu:
    """The current CUDA device of this process; tests replace this class by recorded numbers."""

    def memory(self) -> GpuMemory:
        """Read the memory use from torch's allocator and from the driver, without waiting for GPU kernels."""
        import torch

        stats = torch.cuda.memory_stats()
        reserved = int(stats.get("reserved_bytes.all.current", 0))  # absent before the first allocation
        free, total = torch.cuda.mem_get_info()
        outside = max(0, total - free - reserved)
        allocated = int(stats.get("allocated_bytes.all.current", 0))
        return GpuMemory(allocated, reserved, outside, int(stats.get("reserved_bytes.all.peak", 0)) + outside)

    def reset_peak(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()


def current_gpu(device: str) -> Gpu | None:
    """Return the GPU of a rank that computes on `device`, or None if `device` is the CPU."""
    return Gpu() if device == "cuda" else None


def has_gpus(root: Path = Path("/")) -> bool:
    """Whether this machine may have GPUs: torch, which is slow to import, knows their number. WSL has one device."""
    return any((root / "dev").glob("nvidia[0-9]*")) or (root / "dev/dxg").exists()
