"""Splitting and packing: every token is predicted exactly once, no sequence is overfull, epochs reshuffle.

The arrays are made some elements at a time: what comes out is what the plain formulas give, bit for bit. The formulas
are those by which runs were begun that go on today.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.core.errors import UserError
from aliquot.data.disk_arrays import NewArrays, ascending, cached_arrays, memory_arrays, shuffle
from aliquot.data.packing import Packing, Pieces, best_fit, fill_epoch, fill_packing, split
from aliquot.data.token_store import TokenStore
from tests.data.stores import memory_store, numbered

Arrays = dict[str, np.ndarray]
tiny = st.integers(1, 9)
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)
sequence_lengths = st.integers(2, 17)


def whole(store: TokenStore, length: int, at_once: int = 100) -> Pieces:
    parts = list(split(store, length, at_once))
    assert all(len(part.start) <= at_once for part in parts)
    names = {"start": np.int64, "length": np.int32, "predicted": np.int32}
    empty = Pieces(*(np.empty(0, dtype) for dtype in names.values()))
    return Pieces(*(np.concatenate([getattr(part, name) for part in (empty, *parts)]) for name in names))


@given(lengths, sequence_lengths)
def test_pieces_predict_all_tokens_but_the_first_once(sizes: list[int], length: int) -> None:
    store = numbered(sizes)
    pieces = whole(store, length)
    predicted = []
    for start, tokens, labels in zip(pieces.start, pieces.length, pieces.predicted, strict=True):
        assert 2 <= tokens <= length
        assert labels == tokens - 1
        predicted += range(start + 1, start + tokens)
    firsts = set(store.offsets[:-1].tolist())
    assert sorted(predicted) == [token for token in range(sum(sizes)) if token not in firsts]


@given(lengths, sequence_lengths, st.data())
def test_masked_pieces_count_labels_and_drop_useless_pieces(sizes: list[int], length: int, data: st.DataObject) -> None:
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)) for size in sizes]
    plain = whole(numbered(sizes), length)
    store = memory_store([[7] * size for size in sizes], masks)
    flat = [bit for mask in masks for bit in mask]
    expected = [
        (start, tokens, sum(flat[start + 1 : start + tokens]))
        for start, tokens in zip(plain.start.tolist(), plain.length.tolist(), strict=True)
        if any(flat[start + 1 : start + tokens])
    ]
    pieces = whole(store, length)
    assert list(zip(pieces.start.tolist(), pieces.length.tolist(), pieces.predicted.tolist(), strict=True)) == expected


def test_documents_are_split_in_parts_like_at_once() -> None:
    store = memory_store([[5] * n for n in (3, 1, 30, 9, 2)], [[1] * n for n in (3, 1, 30, 9, 2)])
    at_once, parts = whole(store, 8), whole(store, 8, at_once=2)
    assert np.array_equal(at_once.start, parts.start)
    assert np.array_equal(at_once.predicted, parts.predicted)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=200), st.integers(16, 40))
def test_best_fit_fills_sequences_and_never_overfills(sizes: list[int], length: int) -> None:
    placements = best_fit(np.bincount(sizes, minlength=length + 1), length)
    totals = np.zeros(max(placement.stop for placement in placements), int)
    for placement in placements:
        totals[placement.first : placement.stop] += placement.per_sequence * placement.length
    assert sum(totals) == sum(sizes)
    assert totals.min() > 0
    assert totals.max() <= length
    if len(totals) > 1:  # what any-fit promises: no two sequences would fit one
        assert sum(sorted(totals)[:2]) > length


@given(lengths, sequence_lengths, st.booleans(), st.integers(0, 3))
def test_epoch_holds_all_pieces_once(sizes: list[int], length: int, packing: bool, number: int) -> None:
    store = numbered(sizes)
    pieces = whole(store, length)
    if len(pieces.start) == 0:
        with pytest.raises(UserError, match="no usable document"):
            Packing.of(store, length, packing)
        return
    packed = Packing.of(store, length, packing)
    epoch = packed.epoch(seed=3, epoch=number)
    sequences = [epoch.sequence(index) for index in range(packed.sequences)]
    found = sorted(piece for sequence in sequences for piece in sequence)
    assert found == sorted(zip(pieces.start.tolist(), pieces.length.tolist(), strict=True))
    for index, sequence in enumerate(sequences):
        tokens = sum(size for _, size in sequence)
        assert tokens <= length
        assert epoch.counts(index, index + 1) == (tokens - len(sequence), tokens)
        assert packing or len(sequence) == 1


def test_epochs_and_seeds_shuffle_pieces_and_sequences() -> None:
    packed = Packing.of(numbered([5] * 64), 10, packing=True)

    def content(seed: int, number: int) -> list[list[tuple[int, int]]]:
        epoch = packed.epoch(seed, number)
        return [epoch.sequence(index) for index in range(packed.sequences)]

    assert content(1, 0) == content(1, 0)
    assert content(1, 0) != content(1, 1)
    assert content(1, 0) != content(2, 0)
    pairs = [{frozenset(start for start, _ in pair) for pair in content(1, number)} for number in range(2)]
    assert pairs[0] != pairs[1], "the same documents share a sequence in every epoch"


def test_unpacked_sequences_are_shuffled() -> None:
    packed = Packing.of(numbered(list(range(6, 11))), 10, packing=True)
    epochs = [packed.epoch(1, number) for number in range(4)]
    orders = {tuple(epoch.counts(index, index + 1)[1] for index in range(5)) for epoch in epochs}
    assert len(orders) > 1
    assert {tuple(sorted(order)) for order in orders} == {(6, 7, 8, 9, 10)}


def test_a_shuffle_is_the_same_on_every_machine_and_numpy() -> None:
    eight, thousand = np.empty(8, int), np.empty(1000, int)
    shuffle(eight, NewArrays(None), seed=42, stream=0)
    assert eight.tolist() == GOLDEN
    shuffle(thousand, NewArrays(None), seed=2**70, stream=5)
    assert sorted(thousand.tolist()) == list(range(1000))


GOLDEN = [7, 1, 6, 4, 3, 5, 0, 2]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(lambda sizes: max(sizes) > 1),
    st.integers(2, 17), st.booleans(), st.data(), tiny, st.integers(0, 3),
)  # fmt: skip
def test_packing_and_epochs_equal_the_formulas(
    sizes: list[int], length: int, packing: bool, data: st.DataObject, at_once: int, epoch: int
) -> None:
    masks = None
    if data.draw(st.booleans()):
        masks = [data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)) for size in sizes]
        masks[sizes.index(max(sizes))][1] = 1
    store = memory_store([[7] * size for size in sizes], masks)
    packed = dict(memory_arrays(lambda new: fill_packing(new, store, length, packing, at_once)))
    assert_packed_as(arrays(packed), formula_packing(store, length, packing))
    for shuffles, orders in (
        ([partial(shuffle, seed=5, stream=2 * epoch + n) for n in range(2)], partial(formula_shuffle, 5, epoch)),
        ([ascending, ascending], lambda pieces, sequences: (np.arange(pieces), np.arange(sequences))),
    ):
        filled = dict(memory_arrays(lambda new, of=shuffles: fill_epoch(new, arrays(packed), *of, at_once)))  # type: ignore[misc]
        assert_same(filled, formula_epoch(packed, *orders(len(packed["start"]), arrays(packed).sequences)))


def test_many_pieces_in_files_at_the_real_size_of_a_part(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(draw.integers(1, 60, 600_000))])
    store = TokenStore(tmp_path, np.empty(offsets[-1], np.uint16), offsets, None)
    packed = cached_arrays(tmp_path / "packed", lambda new: fill_packing(new, store, 64, True))
    assert_packed_as(arrays(dict(packed)), formula_packing(store, 64, True))
    shuffles = [partial(shuffle, seed=5, stream=n) for n in range(2)]
    filled = cached_arrays(tmp_path / "epoch", lambda new: fill_epoch(new, arrays(dict(packed)), *shuffles))  # type: ignore[misc]
    orders = formula_shuffle(5, 0, len(packed["start"]), arrays(dict(packed)).sequences)
    assert_same(dict(filled), formula_epoch(dict(packed), *orders))
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "packed", "epoch"}


def arrays(packed: Arrays) -> Packing:
    pieces = Pieces(packed["start"], packed["length"], packed["predicted"])
    return Packing(pieces, packed["placements"].reshape(4, -1), None)


def assert_packed_as(packed: Packing, expected: Arrays) -> None:
    assert_same(vars(packed.pieces), {name: expected[name] for name in vars(packed.pieces)})
    slots, edges = expected["slots"], expected["edges"]
    assert packed.sequences == len(edges) - 1
    for sequence in range(0, packed.sequences, 1 + packed.sequences // 500):
        assert packed.slots(sequence).tolist() == slots[edges[sequence] : edges[sequence + 1]].tolist()


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
    pieces = {"start": start, "length": length.astype(np.int32), "predicted": predicted.astype(np.int32)}
    return {**pieces, "slots": slots, "edges": edges}


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
    return {"piece": order[np.argsort(shortfall, kind="stable")].astype(np.int32), "order": sequences}
