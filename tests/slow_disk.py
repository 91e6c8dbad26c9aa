"""A disk that takes its time over whatever lies below a directory of some name: for commands in other processes."""

from __future__ import annotations

import os
from pathlib import Path

_SITECUSTOMIZE = """
import os, pathlib, time
plain = os.fsync
def fsync(descriptor):
    if os.environ["SLOW_BELOW"] in os.readlink(f"/proc/self/fd/{descriptor}"):
        pathlib.Path(os.environ["SLOW_NOW"]).touch()
        time.sleep(float(os.environ["SLOW_S"]))
    plain(descriptor)
os.fsync = fsync
"""


def slow_disk(folder: Path, below: str, seconds: float, path: str = "") -> dict[str, str]:
    """The environment in which each fsync of what lies below `below` takes so long; `folder` gets `now` at the first.
    `path`: what PYTHONPATH was."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    slow = {"SLOW_BELOW": below, "SLOW_NOW": str(folder / "now"), "SLOW_S": str(seconds)}
    return {**os.environ, **slow, "PYTHONPATH": f"{folder}{os.pathsep}{path}"}
