"""The index of many documents: in files that all processes map, made once, and the same as in memory."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.core.errors import UserError
from aliquot.data.disk_arrays import NewArrays, cached_arrays, stable_order
from aliquot.data.packing import Packing
from aliquot.data.token_store import TokenStore
from tests.data.stores import damage_every_file, numbered


def stored(folder: Path) -> TokenStore:
    folder.mkdir()
    return replace(numbered([5, 1, 30, 9, 2, 2, 17]), path=folder)


def test_mapped_packing_equals_in_memory_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(tmp_path / "store")
    held = Packing.of(store, 8, True)
    assert list(store.path.iterdir()) == []
    monkeypatch.setattr("aliquot.data.packing.MAPPED_PIECES", 3)
    for state in ("made", "found", "damaged"):
        if state == "damaged":
            assert len(damage_every_file(store.path)) > 8
        mapped = Packing.of(store, 8, True)
        assert isinstance(mapped.pieces.start, np.memmap)
        for ours, theirs in ((held.epoch(3, 1), mapped.epoch(3, 1)), (held.in_order(), mapped.in_order())):
            assert [ours.sequence(i) for i in range(held.sequences)] == [
                theirs.sequence(i) for i in range(held.sequences)
            ]
            assert [ours.counts(i) for i in range(held.sequences)] == [theirs.counts(i) for i in range(held.sequences)]
        assert isinstance(mapped.epoch(3, 1).piece, np.memmap)


def test_newest_epochs_are_retained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aliquot.data.packing.MAPPED_PIECES", 3)
    packed = Packing.of(stored(tmp_path / "store"), 8, True)
    first = packed.epoch(1, 0)
    before = first.sequence(0)
    for number in range(1, 7):
        packed.epoch(1, number)
    kept = {path.name for path in (tmp_path / "store" / "packed-8").glob("epoch-*")}
    assert kept == {f"epoch-1-{number}" for number in range(3, 7)}
    assert first.sequence(0) == before  # whoever has it mapped keeps it


def test_one_process_makes_the_arrays(tmp_path: Path) -> None:
    def fill(new: NewArrays) -> None:
        with (tmp_path / "built").open("a") as file:
            file.write("x")
        new.keep("numbers", 1000, np.int64)[:] = np.arange(1000)

    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            found = cached_arrays(tmp_path / "index", fill)
            os._exit(0 if found["numbers"].sum() == 499500 else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert (tmp_path / "built").read_text() == "x"


def test_unwritable_cache_falls_back_to_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = cached_arrays(tmp_path / "file" / "index", lambda new: new.keep("numbers", 3, np.int64).fill(7))
    assert found["numbers"].tolist() == [7, 7, 7]


@given(st.lists(st.sampled_from([0, 1, 2**63, 2**63 + 1, 2**64 - 1]), min_size=1, max_size=60), st.integers(1, 9))
def test_of_equal_keys_the_first_comes_first(keys: list[int], at_once: int) -> None:
    whole = np.array(keys, np.uint64)

    def some() -> Iterator[np.ndarray]:
        yield from (whole[start : start + at_once] for start in range(0, len(whole), at_once))

    out = np.empty(len(whole), np.int32)
    stable_order(some, out, NewArrays(None), at_once)
    assert out.tolist() == np.argsort(whole, kind="stable").tolist()


def test_remains_of_killed_processes_expire_in_a_day(tmp_path: Path) -> None:
    remains = tmp_path / ".index.partial-01234567"
    remains.mkdir()
    (remains / "numbers.npy").write_bytes(b"x")
    for age_s, left in ((0, {remains.name}), (90_000, set())):  # another host may be at work there
        for path in (remains, remains / "numbers.npy"):
            os.utime(path, (time.time() - age_s,) * 2)
        cached_arrays(tmp_path / f"index-{age_s}", lambda new: new.keep("numbers", 3, np.int64).fill(4))
        assert {path.name for path in tmp_path.glob(".index*")} == left


def test_without_room_nothing_is_begun(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    too_many = free.f_blocks * free.f_frsize  # elements of 8 bytes
    for array in (NewArrays(tmp_path).scratch, partial(NewArrays(tmp_path).keep, "numbers")):
        with pytest.raises(UserError, match="are free"):
            array(too_many, np.int64)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_an_error_not_a_signal(tmp_path: Path) -> None:
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
