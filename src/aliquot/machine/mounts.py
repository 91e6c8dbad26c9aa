"""The file system that a directory is on, and how it is mounted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_LOCAL_LOCKS = {"localflock", "nolock", "local_lock=flock", "local_lock=all"}  # of Lustre and of NFS


@dataclass(frozen=True)
class Mount:
    kind: str
    options: frozenset[str] = frozenset()

    @property
    def locks_are_local(self) -> bool:
        """Whether this machine alone sees a flock, although others have the file system, too."""
        return not self.options.isdisjoint(_LOCAL_LOCKS)


def mount_of(place: Path, root: Path = Path("/")) -> Mount:
    """By /proc/mounts. `place`: absolute."""
    best, found = "", Mount("unknown file system")
    mounts = root / "proc/mounts"
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, point, kind, options, *_ = line.split()
        point = point.replace("\\040", " ")
        if place.is_relative_to(point) and len(point) >= len(best):
            best, found = point, Mount(kind, frozenset(options.split(",")))
    return found
