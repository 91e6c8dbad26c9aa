"""The control groups that hold this process, innermost first: a container's CPU and memory limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the directories of the groups, versions 1 and 2, that may limit `controller` ("cpu", "memory").

    Directories that do not exist are left out: a container often sees its control group as the top of the mount,
    although /proc/self/cgroup shows the path on the host.
    """
    memberships = root / "proc/self/cgroup"
    if not memberships.is_file():
        return
    mount = root / "sys/fs/cgroup"
    for line in memberships.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = mount / "unified" if (mount / "unified").is_dir() else mount
        elif controller in controllers.split(","):
            top = mount / controllers if (mount / controllers).is_dir() else mount / controller
        else:
            continue
        directory = top / path.lstrip("/")
        yield from (group for group in (directory, *directory.parents) if group.is_relative_to(top) and group.is_dir())


def read_text(file: Path) -> str | None:
    """Return the file's text without its line end, or None if this version of the interface has no such file."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
