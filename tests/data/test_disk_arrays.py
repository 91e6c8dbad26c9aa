"""The index of many documents: in files that all processes map, made once, and the same as in memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aliquot.data.disk_arrays import NewArrays, cached_arrays
from aliquot.data.packing import Packing
from aliquot.data.token_store import TokenStore
from tests.data.stores import numbered


def stored(folder: Path) -> TokenStore:
    folder.mkdir()
    return replace(numbered([5, 1, 30, 9, 2, 2, 17]), path=folder)


def test_mapped_is_what_is_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(tmp_path / "store")
    held = Packing.of(store, 8, True)
    assert list(store.path.iterdir()) == []
    monkeypatch.setattr("aliquot.data.packing.MAPPED_PIECES", 3)
    for _ in ("made", "found"):
        mapped = Packing.of(store, 8, True)
        assert isinstance(mapped.pieces.start, np.memmap)
        for ours, theirs in ((held.epoch(3, 1), mapped.epoch(3, 1)), (held.in_order(), mapped.in_order())):
            assert [ours.sequence(i) for i in range(held.sequences)] == [
                theirs.sequence(i) for i in range(held.sequences)
            ]
            assert (ours.predicted == theirs.predicted).all() and (ours.tokens == theirs.tokens).all()
        assert isinstance(mapped.epoch(3, 1).piece, np.memmap)


def test_of_many_epochs_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aliquot.data.packing.MAPPED_PIECES", 3)
    packed = Packing.of(stored(tmp_path / "store"), 8, True)
    first = packed.epoch(1, 0)
    before = first.sequence(0)
    for number in range(1, 7):
        packed.epoch(1, number)
    kept = {path.name for path in (tmp_path / "store" / "packed-8").glob("epoch-*")}
    assert kept == {f"epoch-1-{number}" for number in range(3, 7)}
    assert first.sequence(0) == before  # whoever has it mapped keeps it


def test_processes_make_it_once(tmp_path: Path) -> None:
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


def test_where_nothing_can_be_written_it_is_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = cached_arrays(tmp_path / "file" / "index", lambda new: new.keep("numbers", 3, np.int64).fill(7))
    assert found["numbers"].tolist() == [7, 7, 7]
