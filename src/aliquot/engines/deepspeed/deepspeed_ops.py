"""The C++ ops that DeepSpeed compiles when they are first used: what they need, and what a killed build leaves."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from aliquot.core.errors import MissingToolError

_TOOLS = {"g++": "a C++ compiler (Debian: apt install g++)", "ninja": "pip install ninja"}
_YOUNG_S = 120.0  # a build on another host of a shared home directory may hold a lock that looks abandoned here
_log = logging.getLogger(__name__)


def prepare_ops() -> None:
    """Make sure that DeepSpeed can start on CPUs, where it compiles its shared-memory op whether it is used or not.

    Raises UserError where a tool is missing.
    """
    if missing := missing_tools():
        raise MissingToolError(
            f"DeepSpeed compiles C++ ops when it starts on CPUs and needs {' and '.join(missing)};"
            " the engines host and fsdp need no compiler"
        )
    for lock in locks():
        if _is_abandoned(lock):
            lock.unlink(missing_ok=True)
            _log.warning("removed %s, which a killed build had left: all later ones would wait for it forever", lock)


def missing_tools() -> list[str]:
    """How to get each tool that is not there."""
    # pip puts ninja beside Python, which need not be on the PATH of whoever starts that Python.
    beside = sysconfig.get_path("scripts")
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", ""), beside))
    return [advice for tool, advice in _TOOLS.items() if shutil.which(tool) is None]


def locks() -> list[Path]:
    """The locks of torch's builds of DeepSpeed's ops."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"]) if "TORCH_EXTENSIONS_DIR" in os.environ else cache
    return sorted(lock for depth in ("*/lock", "*/*/lock") for lock in root.glob(depth))


def _is_abandoned(lock: Path) -> bool:
    """Old, and open in no process of this host: whoever builds keeps it open."""
    with suppress(FileNotFoundError):
        return time.time() - lock.stat().st_mtime > _YOUNG_S and lock not in _open_files()
    return False


def _open_files() -> Iterator[Path]:
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it ended meanwhile, or is another user's
            yield descriptor.readlink()
