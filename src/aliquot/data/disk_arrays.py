"""Arrays that the first process on a node fills in a file and all processes map, so that a node has one copy.

Arrays are filled where they will lie, AT_ONCE elements at a time, so that private memory does not grow with them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
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
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

AT_ONCE = 1 << 18  # elements in private memory at one time


class NewArrays:
    """Make flat arrays of zeros: in files of `directory`, or in private memory if `directory` is None.

    Files get their space on the disk at once: writing to a mapped page of a full disk would kill the process.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self.arrays: dict[str, Array] = {}

    def keep(self, name: str, count: int, dtype: npt.DTypeLike) -> Array:
        """Make an array [count] that stays in the cache."""
        if self._directory is None:
            array = np.zeros(count, dtype)
        else:
            path = self._directory / f"{name}.npy"
            check_space(self._directory, count * np.dtype(dtype).itemsize)
            mapped = np.lib.format.open_memmap(path, "w+", dtype, (count,))
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            array = np.asarray(mapped)
        self.arrays[name] = array
        return array

    def scratch(self, count: int, dtype: npt.DTypeLike) -> Array:
        """Make a temporary array [count], in a file without a name."""
        if self._directory is None:
            return np.zeros(count, dtype)
        check_space(self._directory, count * np.dtype(dtype).itemsize)
        with TemporaryFile(dir=self._directory) as file:
            os.posix_fallocate(file.fileno(), 0, count * np.dtype(dtype).itemsize)
            return np.asarray(np.memmap(file, dtype, "r+", shape=(count,)))


def cached_arrays(directory: Path, fill: Callable[[NewArrays], None], most: tuple[str, int] | None = None) -> Arrays:
    """Return the arrays that `fill` makes, from `directory` if it exists; in private memory if it cannot be written.

    `most` is (pattern, count): of the directories that match the pattern the newest `count` stay.
    """
    try:
        with _locked(directory.parent):
            if not directory.is_dir():
                with publishing(directory) as partial:
                    fill(NewArrays(partial))
                if most is not None:
                    _keep_newest(directory.parent, *most)
            return {path.stem: np.load(path, mmap_mode="r") for path in directory.glob("*.npy")}
    except (OSError, StorageError):
        return memory_arrays(fill)


def memory_arrays(fill: Callable[[NewArrays], None]) -> Arrays:
    """Return the arrays that `fill` makes, in private memory."""
    new = NewArrays(None)
    fill(new)
    return new.arrays


@contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """Let one process at a time fill arrays. Without locks of the file system, processes may repeat the work."""
    if not parent.is_dir():
        raise FileNotFoundError(parent)
    with ExitStack() as opened:
        with suppress(OSError):  # also of a read-only cache
            fcntl.flock(opened.enter_context((parent / ".lock").open("a")), fcntl.LOCK_EX)
        yield


def _keep_newest(parent: Path, pattern: str, count: int) -> None:
    """Remove all but the newest directories. A process that has mapped their files keeps the mapped data."""
    directories = sorted(parent.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
    for old in directories[:-count]:
        shutil.rmtree(old, ignore_errors=True)


class Cursors:
    """Places for elements that arrive in parts: elements of a group lie together, in their order of arrival."""

    def __init__(self, sizes: Ints) -> None:
        """`sizes` [groups]: elements of each group that will arrive."""
        self._next = np.cumsum(sizes) - sizes

    def places(self, groups: npt.NDArray[Any]) -> tuple[Ints, Ints]:
        """Return (places [n], order [n]) of the next elements, of groups [n]: places[k] is that of element order[k]."""
        order = np.argsort(groups, kind="stable")  # for 16 bits numpy uses a radix sort
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
    """Fill `out` [count] with a permutation that depends on (seed, stream) alone.

    The permutation is the stable order of random keys, whose stream numpy guarantees.
    """

    def keys() -> Iterator[Keys]:
        drawn = np.random.Philox(key=np.array([seed % 2**64, stream], np.uint64))
        for start in range(0, len(out), at_once):
            yield drawn.random_raw(min(at_once, len(out) - start))

    stable_order(keys, out, new, at_once)


def stable_order(keys: Callable[[], Iterable[Keys]], out: Array, new: NewArrays, at_once: int = AT_ONCE) -> None:
    """Fill `out` [count] with the stable order of `keys`, which arrive in parts and are read twice.

    Keys and their indices go to buckets by the highest bits of the key; then each bucket is sorted. Buckets have about
    `at_once` elements if keys are evenly spread.
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
    """Return the stable order of keys: an unstable sort is twice as fast, and random keys of 64 bits rarely tie."""
    order = np.argsort(keys)
    ascending_keys = keys[order]
    tied = (ascending_keys[1:] == ascending_keys[:-1]).any()
    return np.argsort(keys, kind="stable") if tied else order
