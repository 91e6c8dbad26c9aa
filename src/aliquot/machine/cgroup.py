"""The control groups that hold this process, innermost first: where a container's real CPU and memory limits are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Directories of the groups, versions 1 and 2, that may limit `controller` ("cpu", "memory"), up to the top.

    A container often sees its own group as the top of the mount while /proc/self/cgroup still gives the host's path,
    so directories that do not exist are left out.
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
        while directory != top:
            if directory.is_dir():
                yield directory
            directory = directory.parent
        if top.is_dir():
            yield top


def read(file: Path) -> str | None:
    """The file's text without its line end, or None where this version of the interface has no such file."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
