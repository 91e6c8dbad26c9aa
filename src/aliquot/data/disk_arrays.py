"""Arrays in memory-mapped files: one process of a node fills the files, and all its processes share the memory.

Arrays are filled in place, AT_ONCE elements at a time, so that private memory does not grow with the arrays.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.core.errors import StorageError
from aliquot.data.cache import cached
from aliquot.tensor_io.publish import check_space

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

AT_ONCE = 1 << 18  # elements in private memory at one time


@dataclass
class NewArrays:
    """Allocate flat arrays of zeros: in files of `directory`, or in private memory if `directory` is None.

    Disk space is allocated up front, because writing to a mapped page while the disk is full would kill the process.
    """

    directory: Path | None
    arrays: dict[str, Array] = field(default_factory=dict)

    def keep(self, name: str, count: int, dtype: npt.DTypeLike) -> Array:
        """Allocate an array [count] that becomes part of the result."""
        if self.directory is None:
            array = np.zeros(count, dtype)
        else:
            path = self.directory / f"{name}.npy"
            check_space(self.directory, count * np.dtype(dtype).itemsize)
            mapped = np.lib.format.open_memmap(path, "w+", dtype, (count,))
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            array = np.asarray(mapped)
        self.arrays[name] = array
        return array

    def scratch(self, count: int, dtype: npt.DTypeLike) -> Array:
        """Allocate a temporary array [count], in an unnamed file."""
        if self.directory is None:
            return np.zeros(count, dtype)
        check_space(self.directory, count * np.dtype(dtype).itemsize)
        with TemporaryFile(dir=self.directory) as file:
            os.posix_fallocate(file.fileno(), 0, count * np.dtype(dtype).itemsize)
            return np.asarray(np.memmap(file, dtype, "r+", shape=(count,)))


def cached_arrays(
    directory: Path | None, fill: Callable[[NewArrays], None], most: tuple[str, int] | None = None
) -> Mapping[str, Array]:
    """Return the arrays in `directory`; if it is missing or damaged, let `fill` make the arrays and publish them.

    Without a directory, or if it cannot be written, the arrays are in private memory. `most` is (pattern, count): only
    the newest `count` of the directories that match the pattern are kept.
    """
    if directory is None:
        return memory_arrays(fill)
    try:
        with locked(directory.parent):
            cached(directory, lambda partial: fill(NewArrays(partial)))
            if most is not None:
                # A process that has mapped a removed file keeps the data.
                for old in sorted(directory.parent.glob(most[0]), key=lambda path: path.stat().st_mtime_ns)[: -most[1]]:
                    shutil.rmtree(old, ignore_errors=True)
            return {path.stem: np.load(path, mmap_mode="r") for path in directory.glob("*.npy")}
    except (OSError, StorageError):
        return memory_arrays(fill)


def memory_arrays(fill: Callable[[NewArrays], None]) -> Mapping[str, Array]:
    """Return the arrays that `fill` makes, in private memory."""
    new = NewArrays(None)
    fill(new)
    return new.arrays


@contextmanager
def locked(parent: Path) -> Iterator[None]:
    """Let one process at a time fill `parent`. On a file system without locks, processes may repeat the work."""
    if not parent.is_dir():
        raise FileNotFoundError(parent)
    with ExitStack() as opened:
        with suppress(OSError):  # no locks, or a read-only cache
            fcntl.flock(opened.enter_context((parent / ".lock").open("a")), fcntl.LOCK_EX)
        yield


class Cursors:
    """The write positions of a counting sort whose input arrives in parts.

    The sort puts the elements of a group next to each other, in the order of their arrival.
    """

    def __init__(self, sizes: Ints) -> None:
        """`sizes` [groups]: the total number of elements of each group."""
        self._next = np.cumsum(sizes) - sizes

    def places(self, groups: npt.NDArray[Any]) -> tuple[Ints, Ints]:
        """Return (places [n], order [n]) for the next n elements: element order[k] goes to output index places[k].

        `groups` [n]: the group of each element.
        """
        order = np.argsort(groups, kind="stable")  # numpy uses a radix sort for 16-bit integers
        sizes = np.bincount(groups, minlength=len(self._next))
        first = self._next - (np.cumsum(sizes) - sizes)
        self._next += sizes
        return np.arange(len(groups)) + np.repeat(first, sizes), order


def ascending(out: Array, _new: NewArrays, at_once: int = AT_ONCE) -> None:
    """Fill `out` [count] with 0, 1, 2, ..."""
    for start in range(0, len(out), at_once):
        part = out[start : start + at_once]
        part[:] = np.arange(start, start + len(part))


def shuffle(out: Array, new: NewArrays, at_once: int = AT_ONCE, *, seed: int, stream: int) -> None:
    """Fill `out` [count] with a permutation of 0 .. count - 1 that depends only on (seed, stream).

    The permutation is the stable order of random keys; numpy guarantees the same keys in all versions.
    """

    def keys() -> Iterator[Keys]:
        drawn = np.random.Philox(key=np.array([seed % 2**64, stream], np.uint64))
        for start in range(0, len(out), at_once):
            yield drawn.random_raw(min(at_once, len(out) - start))

    stable_order(keys, out, new, at_once)


def stable_order(keys: Callable[[], Iterable[Keys]], out: Array, new: NewArrays, at_once: int = AT_ONCE) -> None:
    """Fill `out` [count] with the indices that stably sort `keys`. `keys` yields the keys in parts and is called twice.

    The highest bits of a key choose a bucket for the key and its index; then each bucket is sorted. Buckets have about
    `at_once` elements if the keys are evenly distributed.
    """
    bits = min(16, max(1, (len(out) // at_once).bit_length()))

    def buckets(part: Keys) -> npt.NDArray[np.uint16]:
        return (part >> np.uint64(64 - bits)).astype(np.uint16)

    sizes = np.zeros(1 << bits, np.int64)
    for part in keys():
        sizes += np.bincount(buckets(part), minlength=len(sizes))
    cursors, seen_count = Cursors(sizes), 0
    key, index = new.scratch(len(out), np.uint64), new.scratch(len(out), out.dtype)
    for part in keys():
        places, order = cursors.places(buckets(part))
        key[places] = part[order]
        index[places] = seen_count + order
        seen_count += len(part)
    for start, stop in pairwise([0, *np.cumsum(sizes).tolist()]):
        out[start:stop] = index[start:stop][_stable_argsort(key[start:stop])]


def _stable_argsort(keys: Keys) -> Ints:
    """Return the indices that stably sort `keys`.

    The unstable sort is tried first: it is twice as fast, and random keys of 64 bits are rarely equal.
    """
    order = np.argsort(keys)
    ascending_keys = keys[order]
    tied = (ascending_keys[1:] == ascending_keys[:-1]).any()
    return np.argsort(keys, kind="stable") if tied else order
