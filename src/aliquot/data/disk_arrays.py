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


Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


class Cursors:
    """Where elements go that come some at a time, so that those of a group lie together, in the order they came in."""

    def __init__(self, sizes: Ints) -> None:
        """`sizes` [groups]: elements that will come of each, which lie in the order of the groups."""
        self._next = np.cumsum(sizes) - sizes

    def places(self, groups: npt.NDArray[Any]) -> tuple[Ints, Ints]:
        """The next elements, of the groups [n]: the k-th place [n] is that of the element `order[k]` [n] of them."""
        order = np.argsort(groups, kind="stable")  # of 16 bits: a radix sort
        sizes = np.bincount(groups, minlength=len(self._next))
        first = self._next - (np.cumsum(sizes) - sizes)
        self._next += sizes
        return np.arange(len(groups)) + np.repeat(first, sizes), order


def ascending(out: Array, _new: NewArrays, at_once: int = AT_ONCE) -> None:
    """Fill `out` [count] with 0, 1, 2 and so on."""
    for start in range(0, len(out), at_once):
        some = out[start : start + at_once]
        some[:] = np.arange(start, start + len(some))


def shuffle(out: Array, new: NewArrays, at_once: int = AT_ONCE, *, seed: int, stream: int) -> None:
    """Fill `out` [count] with a permutation that depends on (seed, stream) alone.

    It is the stable order of random keys, whose stream numpy promises never to change.
    """

    def keys() -> Iterator[Keys]:
        drawn = np.random.Philox(key=np.array([seed % 2**64, stream], np.uint64))
        for start in range(0, len(out), at_once):
            yield drawn.random_raw(min(at_once, len(out) - start))

    stable_order(keys, out, new, at_once)


def stable_order(keys: Callable[[], Iterable[Keys]], out: Array, new: NewArrays, at_once: int = AT_ONCE) -> None:
    """Fill `out` [count] with the stable order of `keys`, which come some at a time and are asked for twice.

    Keys and where they came from go to buckets by their highest bits, then each bucket is sorted. Buckets are about
    `at_once` long if keys are evenly spread.
    """
    bits = min(16, max(1, (len(out) // at_once).bit_length()))

    def buckets(some: Keys) -> npt.NDArray[np.uint16]:
        return (some >> np.uint64(64 - bits)).astype(np.uint16)

    sizes = np.zeros(1 << bits, np.int64)
    for some in keys():
        sizes += np.bincount(buckets(some), minlength=len(sizes))
    cursors, came = Cursors(sizes), 0
    key, index = new.scratch(len(out), np.uint64), new.scratch(len(out), out.dtype)
    for some in keys():
        places, each = cursors.places(buckets(some))
        key[places] = some[each]
        index[places] = came + each
        came += len(some)
    for start, stop in pairwise([0, *np.cumsum(sizes).tolist()]):
        out[start:stop] = index[start:stop][_stable_argsort(key[start:stop])]


def _stable_argsort(keys: Keys) -> Ints:
    """Unstable sorting takes less than half as long, and random keys of 64 bits hardly ever tie."""
    found = np.argsort(keys)
    ascending_keys = keys[found]
    tied = (ascending_keys[1:] == ascending_keys[:-1]).any()
    return np.argsort(keys, kind="stable") if tied else found
