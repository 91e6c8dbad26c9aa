"""torch.compile on this machine: a cache that no other user can write to, and options for this CPU.

torch's default cache is /tmp/torchinductor_USER. Any user may have created this directory, and torch runs code from it.
"""

from __future__ import annotations

import functools
import os
import shutil
import stat
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from aliquot.core.errors import StorageError
from aliquot.core.small_files import cache_root
from aliquot.machine.cpu import read_cpu

Function = TypeVar("Function", bound=Callable[..., Any])
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_COMPILERS = ("g++", "clang++", "c++")


def cpp_compiler(environ: Mapping[str, str]) -> str | None:
    """Return the C++ compiler that torch would use, or None."""
    names = (environ.get("CXX", ""), *_COMPILERS)
    return next((name for name in names if name and shutil.which(name, path=environ.get("PATH"))), None)


def can_compile(environ: Mapping[str, str]) -> bool:
    """Whether this machine has what torch.compile needs beside torch: a C++ compiler and the headers of Python."""
    return cpp_compiler(environ) is not None and (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def set_compile_cache() -> None:
    """Set TORCHINDUCTOR_CACHE_DIR unless it is set. Call this before importing torch, which also sets the variable.

    The directory is in aliquot's cache, or among temporary files if aliquot's cache is not writable.
    """
    if _VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = str(Path(tempfile.gettempdir()) / f"aliquot-inductor-{os.geteuid()}")
    with suppress(OSError, RuntimeError):  # RuntimeError if this user has no home directory
        directory = cache_root() / "inductor"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[_VARIABLE] = str(directory)


def compile_function(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Return `torch.compile(function, **settings)`. Raises StorageError if other users can write to the code cache."""
    import torch
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    shared = Path(default_cache_dir())
    if os.environ.get(_VARIABLE) == str(shared):  # torch was imported before aliquot
        del os.environ[_VARIABLE]
        set_compile_cache()
    directory = Path(os.environ[_VARIABLE]) if _VARIABLE in os.environ else shared
    if (reason := _insecurity(directory)) is not None:
        raise StorageError(
            f"torch.compile would run code from this directory, which {reason}: others could have put that code there."
            f" Remove it, or set {_VARIABLE} to a directory of your own",
            directory,
        )
    # torch keeps precompiled headers in its default directory, even if kernels are in another directory.
    if config.cpp_cache_precompile_headers and _insecurity(shared) is not None:
        config.cpp_cache_precompile_headers = False
    return torch.compile(function, **settings)


def compilation_failure(threads: int) -> str | None:
    """Compile and run a small function. Return the error, on one line, or None.

    `threads`: compiler processes that torch may start in this process, now and later.
    """
    import torch

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    try:
        compile_function(lambda values: torch.sin(values) + 1)(torch.ones(64))
    except Exception as error:  # whatever torch, the compiler or the cache directory raises
        return " ".join(str(error).split())[:300]
    return None


def outside_of_graphs(function: Function) -> Function:
    """Return `function` so that torch.compile does not trace it: a compiled caller calls it between two graphs."""
    import torch

    return cast("Function", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def _insecurity(directory: Path) -> str | None:
    """Create `directory` if absent. Return why other users can write to it, or None."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    if not stat.S_ISDIR(status.st_mode):
        return "is a link"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    return f"has mode {stat.S_IMODE(status.st_mode):04o}" if status.st_mode & 0o022 else None


@functools.cache
def inductor_options() -> dict[str, Any] | None:
    """Return `options` of torch.compile for this CPU, or None for torch's defaults.

    For Intel CPUs, C++ compilers prefer vectors half as long as the vectors for which Inductor generates code. To
    reinterpret a float vector as int, a compiler then stores two halves on the stack and loads the whole vector, which
    presumably stalls. Without this option, the optimizer step of optim/adamw.py takes 2.3 times as long. The
    intrinsics in the generated code do not depend on this option.
    """
    cpu = read_cpu()
    if not cpu.model.startswith("Intel") or "avx512f" not in cpu.isa:
        return None
    import torch._inductor as inductor
    from torch._inductor import config

    if "cpp.march" not in inductor.list_options() or config.cpp.march is not None:
        return None
    return {"cpp.march": "x86-64-v4"}
