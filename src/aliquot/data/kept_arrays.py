"""Arrays that grow with the data, made by the first process that needs them and mapped by all: one copy a host.

They are filled where they will lie, AT_ONCE elements after the other: private memory does not grow with them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.core.errors import StorageError
from aliquot.data.cache import publishing
from aliquot.tensor_io.publish import check_space

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

AT_ONCE = 1 << 18  # elements that are in private memory at a time, with what is computed from them


class NewArrays:
    """Flat arrays of zeros, to be filled: in files of `directory`, or in memory where that is None."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self.kept: dict[str, Array] = {}

    def keep(self, name: str, count: int, dtype: npt.DTypeLike) -> Array:
        """[count] of what is made. Raises OSError or UserError, as `scratch` does, where there is no room for it."""
        if self._directory is None:
            made = np.zeros(count, dtype)
        else:
            path = self._directory / f"{name}.npy"
            check_space(self._directory, count * np.dtype(dtype).itemsize)
            mapped = np.lib.format.open_memmap(path, "w+", dtype, (count,))
            with path.open("r+b") as file:
                _reserve(file.fileno(), path.stat().st_size)
            made = np.asarray(mapped)
        self.kept[name] = made
        return made

    def scratch(self, count: int, dtype: npt.DTypeLike) -> Array:
        """[count] that is not kept: of a file without a name, which does not outlive its process."""
        if self._directory is None:
            return np.zeros(count, dtype)
        check_space(self._directory, count * np.dtype(dtype).itemsize)
        with TemporaryFile(dir=self._directory) as file:
            _reserve(file.fileno(), count * np.dtype(dtype).itemsize)
            return np.asarray(np.memmap(file, dtype, "r+", shape=(count,)))


def _reserve(descriptor: int, size_bytes: int) -> None:
    """A disk that is full by now says so here: it would be a signal, and the end, when a mapped page is written."""
    os.posix_fallocate(descriptor, 0, size_bytes)


def kept_arrays(directory: Path, fill: Callable[[NewArrays], None], most: tuple[str, int] | None = None) -> Arrays:
    """What `fill` makes, from `directory` if it is there; private memory where that cannot be written.

    `most`: how many directories of a pattern are kept beside each other; the oldest go. Raises what `fill` raises.
    """
    try:
        with _locked(directory.parent):
            if not directory.is_dir():
                with publishing(directory) as beside:
                    fill(NewArrays(beside))
                if most is not None:
                    _keep_newest(directory.parent, *most)
            return {path.stem: np.load(path, mmap_mode="r") for path in directory.glob("*.npy")}
    except (OSError, StorageError):
        return held_arrays(fill)


def held_arrays(fill: Callable[[NewArrays], None]) -> Arrays:
    """What `fill` makes, in private memory."""
    new = NewArrays(None)
    fill(new)
    return new.kept


@contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """One process at a time; a file system without locks, or with those of one host, only loses that what is made is
    made once."""
    if not parent.is_dir():
        raise FileNotFoundError(parent)
    with ExitStack() as opened:
        with suppress(OSError):  # of a cache that can only be read, too
            fcntl.flock(opened.enter_context((parent / ".lock").open("a")), fcntl.LOCK_EX)
        yield


def _keep_newest(parent: Path, pattern: str, count: int) -> None:
    """Who has mapped the files of one that goes keeps them for as long as it wants."""
    found = sorted(parent.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
    for old in found[:-count]:
        shutil.rmtree(old, ignore_errors=True)
