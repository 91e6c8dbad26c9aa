"""Where torch.compile keeps compiled code: a directory that no other user of this machine can write to.

torch's own is /tmp/torchinductor_USER, whoever made that directory, and torch runs what lies there.
"""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aliquot.core.errors import StorageError
from aliquot.core.paths import cache_root
from aliquot.machine.cpu import read_cpu

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def set_compile_cache() -> None:
    """Set TORCHINDUCTOR_CACHE_DIR, unless it is set: to be called before torch is imported, which sets it, too.

    It lies in aliquot's cache, or among temporary files where that cache cannot be written.
    """
    if _VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = str(Path(tempfile.gettempdir()) / f"aliquot-inductor-{os.geteuid()}")
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home directory
        directory = cache_root() / "inductor"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[_VARIABLE] = str(directory)


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """`torch.compile(function, **settings)`. Raises StorageError where others can write to the cache of its code."""
    import torch
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    shared = Path(default_cache_dir())
    if os.environ.get(_VARIABLE) == str(shared):  # torch was imported before aliquot
        del os.environ[_VARIABLE]
        set_compile_cache()
    directory = Path(os.environ[_VARIABLE]) if _VARIABLE in os.environ else shared
    if (reason := _fault(directory)) is not None:
        raise StorageError(
            f"torch.compile would run code from this directory, which {reason}: others could have put that code there."
            f" Remove it, or set {_VARIABLE} to a directory of your own",
            directory,
        )
    # Precompiled headers stay in torch's own directory, wherever the other kernels are.
    if config.cpp_cache_precompile_headers and _fault(shared) is not None:
        config.cpp_cache_precompile_headers = False
    compiled: Callable[..., Any] = torch.compile(function, **settings)
    return compiled


def _fault(directory: Path) -> str | None:
    """Make `directory` where it is absent. Return what lets others write to it; None: nothing."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return "is a link"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    return f"has mode {stat.S_IMODE(found.st_mode):04o}" if found.st_mode & 0o022 else None


@functools.cache
def kernel_options() -> dict[str, Any] | None:
    """The `options` of torch.compile for kernels on this CPU; None: its own.

    For Intel's CPUs compilers prefer vectors of half the length that Inductor's code is written for. They then write
    what it reinterprets from float to int to the stack in two halves, which is read as one, and presumably waited for:
    the update of optim/adamw.py takes 2.3 times as long. The code's own instructions do not depend on this.
    """
    cpu = read_cpu()
    if not cpu.model.startswith("Intel") or "avx512f" not in cpu.isa:
        return None
    import torch._inductor as inductor
    from torch._inductor import config

    if "cpp.march" not in inductor.list_options() or config.cpp.march is not None:
        return None
    return {"cpp.march": "x86-64-v4"}
