"""The memory allocator of a process: preload one that keeps freed memory, and return free memory to the kernel.

Every micro-batch frees tensors of megabytes and allocates the same sizes again. glibc returns freed tensors to the
kernel each time, and faulting in fresh pages costs a training step up to a fifth of its time. tcmalloc and jemalloc
keep freed memory, but the dynamic linker can only load them when a process starts. So aliquot's launcher starts its
ranks with an installed allocator, and a process that another program has started replaces itself once. Without an
installed allocator, `tune_glibc` raises the thresholds of glibc. `use_expandable_segments` sets torch's allocator of
GPU memory.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aliquot.core.python_command import become_python
from aliquot.machine.memory import private_bytes

# The value "none" leaves the allocator alone. Any other value is the allocator already chosen, so that no process of a
# run chooses again.
ALLOCATOR_VARIABLE = "ALIQUOT_ALLOCATOR"
_RESTARTED = " (restarted)"  # end of the variable's value in a process that has replaced itself
_LIBRARIES = ("libtcmalloc.so.4", "libtcmalloc_minimal.so.4", "libjemalloc.so.2")
_FOLDERS = ("usr/lib64", "usr/lib", "usr/local/lib", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")
# Limit of small free blocks in per-thread caches. After thousands of steps, tcmalloc's default limit keeps four times
# as many bytes.
_TCMALLOC_SETTINGS = {"TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES": str(8 << 20)}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_GLIBC_THRESHOLD_BYTES = 512 << 20
_GPU_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch also reads the older name
_RELEASE_STEPS, _RELEASE_S = 50, 120.0  # minimum between two releases, so that releases take at most 0.1 % of the time


def allocator_name() -> str:
    """Return the allocator that this process has loaded, for example `tcmalloc`."""
    return _known_allocator(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")) or "glibc"


def allocator_description() -> str:
    """Return the allocator's name, and whether this process had to restart to preload it."""
    restarted = os.environ.get(ALLOCATOR_VARIABLE, "").endswith(_RESTARTED)
    return f"{allocator_name()}, preloaded by one restart" if restarted else allocator_name()


def _known_allocator(text: str) -> str | None:
    """Return the allocator that `text`, the value of LD_PRELOAD or the memory mappings of a process, names."""
    return next((name for name in ("tcmalloc", "jemalloc", "mimalloc") if f"lib{name}" in text), None)


def allocator_environment(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Return `environ` for a training process, with an installed allocator preloaded unless one is chosen already."""
    if ALLOCATOR_VARIABLE in environ or _known_allocator(environ.get("LD_PRELOAD", "")):
        return dict(environ)
    candidates = (root / folder / name for name in _LIBRARIES for folder in _FOLDERS)
    library = next((file for file in candidates if file.is_file()), None)
    if library is None:
        return {**environ, ALLOCATOR_VARIABLE: "glibc"}
    preload = ":".join(filter(None, (str(library), environ.get("LD_PRELOAD"))))
    return {**_TCMALLOC_SETTINGS, **environ, "LD_PRELOAD": preload, ALLOCATOR_VARIABLE: library.name}


def training_allocator(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return the allocator that a training process started with `environ` will have, for example `tcmalloc`."""
    chosen = allocator_environment(environ, root)
    return _known_allocator(f"{chosen.get('LD_PRELOAD', '')} lib{chosen.get(ALLOCATOR_VARIABLE, '')}") or "glibc"


def restart_with_allocator() -> None:
    """Replace this process by itself with an allocator preloaded; return if there is nothing to preload."""
    environ = allocator_environment(os.environ)
    if environ.get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        environ[ALLOCATOR_VARIABLE] += _RESTARTED
        sys.stdout.flush()
        sys.stderr.flush()
        become_python(sys.orig_argv[1:], environ)


def tune_glibc() -> None:
    """Let glibc keep freed memory, if it is this process's allocator and ALIQUOT_ALLOCATOR is not `none`."""
    libc = ctypes.CDLL(None)
    if allocator_name() == "glibc" and os.environ.get(ALLOCATOR_VARIABLE) != "none" and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _GLIBC_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _GLIBC_THRESHOLD_BYTES)


def use_expandable_segments() -> None:
    """Let torch map GPU memory page by page, so that free memory between tensors does not stay unused.

    FSDP2 allocates many tensors of different sizes. A setting of the user stays. Under WSL, drivers before R615 fail to
    map such memory (pytorch#192330), so torch's default stays.
    """
    import torch

    if "microsoft" not in platform.release().lower() and not any(name in os.environ for name in _GPU_VARIABLES):
        # torch reads the environment variables only once, which may have happened already.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def release_free_memory() -> None:
    """Return free memory to the kernel. jemalloc needs no request; glibc keeps it and tcmalloc returns it slowly."""
    loaded = ctypes.CDLL(None)
    if hasattr(loaded, "MallocExtension_ReleaseFreeMemory"):
        loaded.MallocExtension_ReleaseFreeMemory()
    elif allocator_name() == "glibc" and hasattr(loaded, "malloc_trim"):
        loaded.malloc_trim(0)


class PeriodicRelease:
    """Every few minutes, return memory that optimizer steps have freed to the kernel.

    Every step needs blocks of other sizes, so the allocator accumulates free blocks over thousands of steps. After a
    release, the next step faults its pages in again, which takes some hundredths of a second.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._released_at = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether enough steps and time have passed since the last release. Each release makes all ranks wait."""
        return step - self._step >= _RELEASE_STEPS and time.monotonic() - self._released_at >= _RELEASE_S

    def release(self, step: int) -> None:
        release_free_memory()
        self._step, self._released_at = step, time.monotonic()


class _Mallinfo2(ctypes.Structure):
    """The result of `mallinfo2`, which glibc has from version 2.33 on."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class FreeMemoryLimit:
    """Bound the free memory that glibc keeps while a run trains a model that is larger than memory.

    Keeping all free memory is fastest. But glibc cannot fit the blocks of a layer between the saved blocks of earlier
    layers: a forward pass would take several times the memory that it uses. tcmalloc can, but with the same bound its
    peak was the same and steps were 4 % slower. Returning every large block at once costs a page fault for each 4 KiB,
    a third of the time of a step. So `check` runs between layers and releases memory only if much has accumulated.

    Allocators other than glibc are left alone, and so is glibc if ALIQUOT_ALLOCATOR is `none`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._libc = ctypes.CDLL(None)
        self._is_bounded = allocator_name() == "glibc" and os.environ.get(ALLOCATOR_VARIABLE) != "none"
        self._has_counts = hasattr(self._libc, "mallinfo2")
        if self._has_counts:
            self._libc.mallinfo2.restype = _Mallinfo2
        self._least = self._unused()

    def check(self, *_: Any) -> None:
        """Release free memory if it has grown by more than the limit. Usable as a module hook, in microseconds."""
        if not self._is_bounded:
            return
        unused = self._unused()
        if unused - self._least > self._limit:
            release_free_memory()
            self._least = self._unused()  # includes buffers mapped meanwhile, which cannot be released
        self._least = min(self._least, unused)

    def _unused(self) -> int:
        """Return the private bytes that no allocation uses; before glibc 2.33, which cannot tell, all private bytes."""
        if not self._has_counts:
            return private_bytes()
        counts = self._libc.mallinfo2()
        return private_bytes() - int(counts.uordblks + counts.hblkhd)
