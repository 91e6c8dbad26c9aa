"""Stable orders of more elements than fit into private memory: some at a time, into arrays that may be files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.data.kept_arrays import AT_ONCE, Array, NewArrays

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
