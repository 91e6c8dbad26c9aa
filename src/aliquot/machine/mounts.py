"""The file system that a directory is on, and how it is mounted."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

# Of Lustre, of NFS, of OCFS2 and GFS2.
_LOCAL_LOCKS = {"localflock", "nolock", "local_lock=flock", "local_lock=all", "localflocks"}
_ESCAPED = re.compile(r"\\([0-7]{3})")


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
    # Names are bytes of any kind but space, tab, newline and backslash.
    for line in os.fsdecode(mounts.read_bytes()).split("\n") if mounts.exists() else ():
        words = line.split(" ")
        if len(words) < 4:
            continue
        _, point, kind, options, *_ = words
        point = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), point)
        if place.is_relative_to(point) and len(point) >= len(best):
            best, found = point, Mount(kind, frozenset(options.split(",")))
    return found
