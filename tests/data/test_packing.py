"""Splitting and packing: every token is predicted exactly once, no sequence is overfull, epochs reshuffle.

The sequences of a seed and an epoch never change, because runs that have begun go on with later versions.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.core.errors import UserError
from aliquot.data.disk_arrays import AT_ONCE, NewArrays, ascending, memory_arrays, shuffle
from aliquot.data.packing import Epoch, Packing, Pieces, best_fit, fill_epoch, fill_packing, split
from aliquot.data.token_store import TokenStore
from tests.data.stores import memory_store, numbered

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
        assert epoch.counts(index) == (tokens - len(sequence), tokens)
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
    orders = {tuple(epoch.counts(index)[1] for index in range(5)) for epoch in epochs}
    assert len(orders) > 1
    assert {tuple(sorted(order)) for order in orders} == {(6, 7, 8, 9, 10)}


def test_a_shuffle_is_the_same_on_every_machine_and_numpy() -> None:
    eight, thousand = np.empty(8, int), np.empty(1000, int)
    shuffle(eight, NewArrays(None), seed=42, stream=0)
    assert eight.tolist() == GOLDEN
    shuffle(thousand, NewArrays(None), seed=2**70, stream=5)
    assert sorted(thousand.tolist()) == list(range(1000))


GOLDEN = [7, 1, 6, 4, 3, 5, 0, 2]


@pytest.mark.parametrize(
    ("masked", "packing", "digest"),
    [
        (False, True, "15faf3bf9450f2b7"),
        (False, False, "3da0f285f592b7c0"),
        (True, True, "abe3a70da02b14c9"),
        (True, False, "e59a470dfefb8014"),
    ],
)
def test_sequences_are_those_of_runs_that_go_on_today(masked: bool, packing: bool, digest: str) -> None:
    """Of whatever size the parts are in which the arrays are filled."""
    draw = np.random.default_rng(0)
    offsets = np.cumsum([0, *draw.integers(1, 60, 400).tolist()])
    mask = draw.integers(0, 2, int(offsets[-1]), np.uint8) if masked else None
    store = TokenStore(Path(), np.empty(offsets[-1], np.uint16), offsets, mask)
    for at_once in (3, 64, AT_ONCE):
        arrays = memory_arrays(partial(fill_packing, store=store, sequence_length=16, packing=packing, at_once=at_once))
        pieces = Pieces(arrays["start"], arrays["length"], arrays["predicted"])
        packed, sequences = Packing(pieces, arrays["placements"].reshape(4, -1), None), []
        for orders in ([partial(shuffle, seed=5, stream=n) for n in (6, 7)], [ascending, ascending]):
            filled = memory_arrays(lambda new, of=orders: fill_epoch(new, packed, *of, at_once))  # type: ignore[misc]  # noqa: B023
            epoch = Epoch(packed, filled["piece"], filled["order"])
            sequences += [(epoch.sequence(at), epoch.counts(at)) for at in range(packed.sequences)]
        assert hashlib.sha256(repr(sequences).encode()).hexdigest()[:16] == digest
