"""Whether files should stay in the page cache: not where they would crowd out everything else that is of use there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from aliquot.tensor_io.header import TensorEntry


def too_large_to_keep(entries: Iterable[TensorEntry]) -> bool:
    """Whether the files of `entries` together would take more than half of the memory that is available."""
    sizes = {entry.file: entry.file_bytes for entry in entries}
    return sum(sizes.values()) > available_bytes() // 2


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that are free or can be freed, or what this container is limited to."""
    available = 1 << 62
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = root / "sys/fs/cgroup/memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text))
    return available
