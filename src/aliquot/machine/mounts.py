"""The file system that a directory is on, and how it is mounted."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

# Options of Lustre, NFS, OCFS2 and GFS2 by which a flock stays on one machine.
_LOCAL_LOCKS = {"localflock", "nolock", "local_lock=flock", "local_lock=all", "localflocks"}
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """The type and the options of a mounted file system."""

    kind: str
    options: frozenset[str] = frozenset()

    @property
    def locks_are_local(self) -> bool:
        """Whether a flock is visible on this machine only, although other machines share the file system."""
        return not self.options.isdisjoint(_LOCAL_LOCKS)


def mount_of(path: Path, root: Path = Path("/")) -> Mount:
    """Return the mount that holds the absolute `path`, from /proc/mounts."""
    longest, mount = "", Mount("unknown file system")
    mounts = root / "proc/mounts"
    # Names may hold any byte; space, tab, newline and backslash are escaped.
    for line in os.fsdecode(mounts.read_bytes()).split("\n") if mounts.exists() else ():
        words = line.split(" ")
        if len(words) < 4:
            continue
        _, point, kind, options, *_ = words
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), point)
        if path.is_relative_to(point) and len(point) >= len(longest):
            longest, mount = point, Mount(kind, frozenset(options.split(",")))
    return mount
