"""Arrays that grow with the data, made by the first process that needs them and mapped by all: one copy a host."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.data.cache import publishing
from aliquot.errors import StorageError

Arrays = Mapping[str, npt.NDArray[Any]]


def kept_arrays(directory: Path, build: Callable[[], Arrays], most: tuple[str, int] | None = None) -> Arrays:
    """What `build` returns, from `directory` if it is there; private memory where that cannot be written.

    `most`: how many directories of a pattern are kept beside each other; the oldest go. Raises what `build` raises.
    """
    try:
        with _locked(directory.parent):
            if not directory.is_dir():
                with publishing(directory) as beside:
                    for name, array in build().items():
                        np.save(beside / f"{name}.npy", array)
                if most is not None:
                    _keep_newest(directory.parent, *most)
            return {path.stem: np.load(path, mmap_mode="r") for path in directory.glob("*.npy")}
    except (OSError, StorageError):
        return build()


@contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """One process at a time; a file system without locks only loses that what is made is made once."""
    with (parent / ".lock").open("a") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _keep_newest(parent: Path, pattern: str, count: int) -> None:
    """Who has mapped the files of one that goes keeps them for as long as it wants."""
    found = sorted(parent.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
    for old in found[:-count]:
        shutil.rmtree(old, ignore_errors=True)
