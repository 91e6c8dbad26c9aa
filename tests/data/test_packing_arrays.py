"""The index is made some elements at a time: what comes out is what the plain formulas give, bit for bit.

The formulas are those by which runs were begun that go on today.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.core.errors import UserError
from aliquot.data.disk_arrays import NewArrays, ascending, cached_arrays, memory_arrays, shuffle, stable_order
from aliquot.data.packing import Packing
from aliquot.data.packing_arrays import PackingArrays, Pieces, fill_epoch, fill_packing
from aliquot.data.token_store import TokenStore
from tests.data.stores import memory_store

Arrays = dict[str, np.ndarray]
tiny = st.integers(1, 9)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(lambda sizes: max(sizes) > 1),
    st.integers(2, 17), st.booleans(), st.data(), tiny, st.integers(0, 3),
)  # fmt: skip
def test_packing_and_epochs_are_what_the_formulas_say(
    sizes: list[int], length: int, packing: bool, data: st.DataObject, at_once: int, epoch: int
) -> None:
    masks = None
    if data.draw(st.booleans()):
        masks = [data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)) for size in sizes]
        masks[sizes.index(max(sizes))][1] = 1
    store = memory_store([[7] * size for size in sizes], masks)
    packed = dict(memory_arrays(lambda new: fill_packing(new, store, length, packing, at_once)))
    assert_same(packed, formula_packing(store, length, packing))
    for shuffles, orders in (
        ([partial(shuffle, seed=5, stream=2 * epoch + n) for n in range(2)], partial(formula_shuffle, 5, epoch)),
        ([ascending, ascending], lambda pieces, sequences: (np.arange(pieces), np.arange(sequences))),
    ):
        filled = dict(memory_arrays(lambda new, of=shuffles: fill_epoch(new, arrays(packed), *of, at_once)))  # type: ignore[misc]
        assert_same(filled, formula_epoch(packed, *orders(len(packed["slots"]), len(packed["tokens"]))))


def test_many_pieces_in_files_at_the_real_size_of_a_part(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(draw.integers(1, 60, 600_000))])
    store = TokenStore(tmp_path, np.empty(offsets[-1], np.uint16), offsets, None)
    packed = cached_arrays(tmp_path / "packed", lambda new: fill_packing(new, store, 64, True))
    assert_same(dict(packed), formula_packing(store, 64, True))
    shuffles = [partial(shuffle, seed=5, stream=n) for n in range(2)]
    filled = cached_arrays(tmp_path / "epoch", lambda new: fill_epoch(new, arrays(dict(packed)), *shuffles))  # type: ignore[misc]
    orders = formula_shuffle(5, 0, len(packed["slots"]), len(packed["tokens"]))
    assert_same(dict(filled), formula_epoch(dict(packed), *orders))
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "packed", "epoch"}


@given(st.lists(st.sampled_from([0, 1, 2**63, 2**63 + 1, 2**64 - 1]), min_size=1, max_size=60), tiny)
def test_of_equal_keys_the_first_comes_first(keys: list[int], at_once: int) -> None:
    whole = np.array(keys, np.uint64)

    def some() -> Iterator[np.ndarray]:
        yield from (whole[start : start + at_once] for start in range(0, len(whole), at_once))

    out = np.empty(len(whole), np.int32)
    stable_order(some, out, NewArrays(None), at_once)
    assert out.tolist() == np.argsort(whole, kind="stable").tolist()


def test_what_a_killed_process_leaves_goes_a_day_later(tmp_path: Path) -> None:
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:

        def fill(new: NewArrays) -> None:
            new.keep("numbers", 1000, np.int64)[:] = 1
            new.scratch(1000, np.int64)[:] = 2
            os.write(told, b"x")
            time.sleep(600)

        cached_arrays(tmp_path / "index", fill)
        os._exit(0)
    assert os.read(ready, 1) == b"x"
    (partial_directory,) = tmp_path.glob(".index.partial-*")
    assert [path.name for path in partial_directory.iterdir()] == ["numbers.npy"]  # scratch has no name
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # Not before: another host may be at work there, whose locks are not seen here.
    cached_arrays(tmp_path / "other", lambda new: new.keep("numbers", 3, np.int64).fill(4))
    assert partial_directory.is_dir()
    shutil.rmtree(tmp_path / "other")
    for path in (partial_directory, *partial_directory.iterdir()):
        os.utime(path, (time.time() - 90_000,) * 2)
    found = cached_arrays(tmp_path / "index", lambda new: new.keep("numbers", 3, np.int64).fill(4))
    assert found["numbers"].tolist() == [4, 4, 4]
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "index"}


def test_without_room_nothing_is_begun(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    too_many = free.f_blocks * free.f_frsize  # elements of 8 bytes
    for array in (NewArrays(tmp_path).scratch, partial(NewArrays(tmp_path).keep, "numbers")):
        with pytest.raises(UserError, match="are free"):
            array(too_many, np.int64)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        failed = 0
        for array in (NewArrays(tmp_path).scratch, partial(NewArrays(tmp_path).keep, "numbers")):
            try:
                array(1 << 18, np.int64)[:] = 1
            except OSError:
                failed += 1
        os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_an_index_that_was_made_before_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aliquot.data.packing.MAPPED_PIECES", 1)
    offsets = np.array([0, 5, 9, 30])
    store = TokenStore(tmp_path, np.empty(30, np.uint16), offsets, None)
    before = tmp_path / "packed-8"
    before.mkdir()
    for name, array in formula_packing(store, 8, True).items():
        np.save(before / f"{name}.npy", array)
    found = Packing.of(store, 8, True)
    assert found.epoch(1, 0).sequence(0) == Packing.of(memory_store([[1] * 5, [1] * 4, [1] * 21]), 8, True).epoch(
        1, 0
    ).sequence(0)


def arrays(packed: Arrays) -> PackingArrays:
    pieces = Pieces(packed["start"], packed["length"], packed["predicted"])
    return PackingArrays(pieces, packed["slots"], packed["edges"], packed["tokens"])


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert np.array_equal(found[name], array), name


def formula_packing(store: TokenStore, sequence_length: int, packing: bool) -> Arrays:
    offsets = store.offsets
    counts = -(-(np.diff(offsets) - 1) // (sequence_length - 1))
    document = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = offsets[document] + nth * (sequence_length - 1)
    length = np.minimum(sequence_length, offsets[document + 1] - start)
    predicted = length - 1
    if store.mask is not None:
        predicted = np.array([store.mask[a + 1 : a + n].sum() for a, n in zip(start, length, strict=True)], int)
        kept = predicted > 0
        start, length, predicted = start[kept], length[kept], predicted[kept]
    histogram = np.bincount(length, minlength=sequence_length + 1)
    sequence = formula_best_fit(histogram, sequence_length) if packing else np.arange(len(start))
    slots = np.argsort(sequence, kind="stable").astype(np.int32)
    edges = np.concatenate([[0], np.cumsum(np.bincount(sequence))])
    lengths = np.repeat(np.arange(sequence_length, -1, -1), histogram[::-1])
    tokens = np.add.reduceat(lengths[slots], edges[:-1])
    pieces = {"start": start, "length": length.astype(np.int32), "predicted": predicted.astype(np.int32)}
    return {**pieces, "slots": slots, "edges": edges, "tokens": tokens}


def formula_best_fit(histogram: np.ndarray, sequence_length: int) -> np.ndarray:
    """The sequence of each piece, pieces in descending order of length."""
    rooms: dict[int, list[tuple[int, int]]] = {sequence_length: [(0, int(histogram.sum()))]}
    placements = []
    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left:
            room = min(room for room, ranges in rooms.items() if ranges and room >= length)
            first, stop = rooms[room].pop()
            each = min(room // length, left)
            used = min(left // each, stop - first)
            placements.append((first, used, each))
            for rest, low, high in ((room - each * length, first, first + used), (room, first + used, stop)):
                if low < high:
                    rooms.setdefault(rest, []).append((low, high))
            left -= used * each
    return np.concatenate([first + np.arange(used * each) // each for first, used, each in placements])


def formula_shuffle(seed: int, epoch: int, pieces: int, sequences: int) -> tuple[np.ndarray, np.ndarray]:
    keys = [
        np.random.Philox(key=np.array([seed, 2 * epoch + n], np.uint64)).random_raw(count)
        for n, count in enumerate((pieces, sequences))
    ]
    return np.argsort(keys[0], kind="stable"), np.argsort(keys[1], kind="stable")


def formula_epoch(packed: Arrays, order: np.ndarray, sequences: np.ndarray) -> Arrays:
    shortfall = packed["length"].max() - packed["length"][order]
    by_slot = order[np.argsort(shortfall, kind="stable")]
    piece = by_slot[packed["slots"]].astype(np.int32)
    predicted = np.add.reduceat(packed["predicted"][piece], packed["edges"][:-1], dtype=np.int64)
    return {
        "piece": piece,
        "order": sequences,
        "predicted": predicted[sequences],
        "tokens": packed["tokens"][sequences],
    }
