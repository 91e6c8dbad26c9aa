"""A memory allocator that keeps what it was given: fresh pages cost a training step up to a fifth of its time.

Every micro-batch frees tensors of megabytes and asks for the same again; glibc hands them back to the kernel each time.
tcmalloc and jemalloc do not, but can only be loaded when a process starts: our ranks are started with one where it is
installed, and a process that was started by others replaces itself once. Else glibc is told to keep more.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from aliquot.core.interpreter import become_python
from aliquot.machine.allocator import BY_RESTART, VARIABLE, allocator_in, allocator_name

_NAMES = ("libtcmalloc.so.4", "libtcmalloc_minimal.so.4", "libjemalloc.so.2")
_FOLDERS = ("usr/lib64", "usr/lib", "usr/local/lib", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 512 << 20
# Of small blocks, which are not given back. It keeps four times as many by itself, once thousands of steps have passed.
_OF_TCMALLOC = {"TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES": str(8 << 20)}


def with_allocator(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """`environ` for a training process: with a preloaded allocator, if one is installed and none chosen yet."""
    if VARIABLE in environ or allocator_in(environ.get("LD_PRELOAD", "")):
        return dict(environ)
    places = (root / folder / name for name in _NAMES for folder in _FOLDERS)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        return {**environ, VARIABLE: "glibc"}
    preload = ":".join(filter(None, (str(found), environ.get("LD_PRELOAD"))))
    return {**_OF_TCMALLOC, **environ, "LD_PRELOAD": preload, VARIABLE: found.name}


def restart_with_allocator() -> None:
    """Replace this process by itself with an allocator preloaded; returns if there is nothing to gain."""
    environ = with_allocator(os.environ)
    if environ.get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        environ[VARIABLE] += BY_RESTART
        sys.stdout.flush()
        sys.stderr.flush()
        become_python(sys.orig_argv[1:], environ)


def tune() -> None:
    """Let glibc keep freed memory, if it is the allocator of this process and nobody said to leave it alone."""
    libc = ctypes.CDLL(None)
    if allocator_name() == "glibc" and os.environ.get(VARIABLE) != "none" and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
