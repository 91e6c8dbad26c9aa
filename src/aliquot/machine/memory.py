"""What this process holds in memory, and how much it can really have."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

from aliquot.machine.cgroup import groups, read

_SELF = Path("/proc/self")
_PAUSE = 100  # times what a reading took: it takes a hundredth of the time at most


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of this process. Shared pages count in full in RSS and divided by their users in PSS."""

    rss_bytes: int
    private_bytes: int
    shared_bytes: int
    pss_bytes: int


def memory_use(process: Path = _SELF) -> MemoryUse:
    if not (process / "smaps_rollup").exists():  # gVisor: only sums are told
        fields = _kib_fields(process / "status")
        rss_bytes, shared_bytes = fields["VmRSS"], fields.get("RssFile", 0) + fields.get("RssShmem", 0)
        return MemoryUse(rss_bytes, rss_bytes - shared_bytes, shared_bytes, rss_bytes)
    fields = _kib_fields(process / "smaps_rollup")
    return MemoryUse(
        rss_bytes=fields["Rss"],
        private_bytes=fields["Private_Clean"] + fields["Private_Dirty"] + fields.get("Private_Hugetlb", 0),
        shared_bytes=fields["Shared_Clean"] + fields["Shared_Dirty"] + fields.get("Shared_Hugetlb", 0),
        pss_bytes=fields["Pss"],
    )


def private_bytes(process: Path = _SELF) -> int:
    """What is resident and of no file or shared memory: in microseconds, from counters of the kernel."""
    _, resident, shared, *_ = (process / "statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * resource.getpagesize()


class SparingPss:
    """PSS of this process as often as it is cheap: for each reading the kernel walks all its pages."""

    def __init__(self) -> None:
        self._bytes = 0
        self._next = 0.0

    def bytes(self) -> int:
        """Now, or as it was at the last reading."""
        begun = time.monotonic()
        if begun >= self._next:
            self._bytes = memory_use().pss_bytes
            ended = time.monotonic()
            self._next = ended + _PAUSE * (ended - begun)
        return self._bytes


def peak_rss(process: Path = _SELF) -> int:
    """Bytes: the most that was resident at once since the process began, or since the last `reset_peak_rss`."""
    return _kib_fields(process / "status")["VmHWM"]


def peak_pss(now: MemoryUse, process: Path = _SELF) -> int:
    """The peak of PSS since the last `reset_peak_rss`. The kernel keeps that of RSS only, which counts shared pages in
    full; what that is too much is taken as it is `now`."""
    return max(now.pss_bytes, peak_rss(process) - (now.rss_bytes - now.pss_bytes))


def reset_peak_rss(process: Path = _SELF) -> bool:
    """Let the peak start again from what is resident now. False where the kernel does not permit it."""
    try:
        with (process / "clear_refs").open("w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def unwritten_bytes() -> int:
    """What this machine has been given to write to disks and has not written yet."""
    fields = _kib_fields(Path("/proc/meminfo"))
    return fields.get("Dirty", 0) + fields.get("Writeback", 0)


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process and its siblings in the container can have: the tightest group's limit, or all RAM."""
    limits = [_kib_fields(root / "proc/meminfo")["MemTotal"]]
    for group in groups("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read(group / name)
            if text is not None and text != "max":
                limits.append(int(text))  # version 1 writes "no limit" as a number near 2^63
    return min(limits)


def _kib_fields(file: Path) -> dict[str, int]:
    """`Name:   12 kB` lines as bytes."""
    fields = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            fields[words[0].rstrip(":")] = int(words[1]) * 1024
    return fields
