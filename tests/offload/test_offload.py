"""What lies on disk while a model trains: every byte as it would be in memory, errors in one line, nothing left."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.core.errors import StorageError
from aliquot.offload.scratch_file import Move, ScratchFile, ScratchStream, disk_rate
from aliquot.offload.windows import PAGE_BYTES, record, windows
from aliquot.tensor_io.range_io import mapped_tensor
from tests.examples import examples

MIB = 1 << 20  # bytes


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[ScratchFile]:
    file = ScratchFile(tmp_path / "fast" / "disk", 16 * PAGE_BYTES)
    yield file
    file.close()


def pieces(scratch: ScratchFile, count: int, written_from: int | None = 0) -> ScratchStream:
    return ScratchStream(scratch, [Move(at * PAGE_BYTES, PAGE_BYTES, written_from) for at in range(count)])


def test_written_bytes_are_read_and_the_rest_is_zeros(scratch: ScratchFile) -> None:
    for number, piece in enumerate(pieces(scratch, 12)):
        assert not piece.any()
        piece.fill_(number + 1)
    for number, piece in enumerate(pieces(scratch, 12, written_from=PAGE_BYTES // 2)):
        assert piece.unique().tolist() == [number + 1]
        piece.fill_(99)
    for number, piece in enumerate(pieces(scratch, 12, written_from=None)):
        assert piece[: PAGE_BYTES // 2].unique().tolist() == [number + 1]
        assert piece[PAGE_BYTES // 2 :].unique().tolist() == [99]
        piece.fill_(7)
    assert all((piece[0], piece[-1]) == (number + 1, 99) for number, piece in enumerate(pieces(scratch, 12, None)))
    assert scratch.read_bytes == 4 * 12 * PAGE_BYTES and scratch.written_bytes == 12 * PAGE_BYTES * 3 // 2


def test_read_waits_for_a_write_to_the_same_bytes(scratch: ScratchFile, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, write = threading.Event(), os.pwritev

    def slow(*arguments: object) -> int:
        assert goes_on.wait(30)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", slow)
    buffer = mapped_tensor(2 * PAGE_BYTES, torch.uint8)
    other, same = mapped_tensor(PAGE_BYTES, torch.uint8), mapped_tensor(PAGE_BYTES, torch.uint8)
    written = scratch.write(3 * PAGE_BYTES, buffer.fill_(5))
    scratch.read(5 * PAGE_BYTES, other).result(30)
    read = scratch.read(4 * PAGE_BYTES, same)
    time.sleep(0.05)
    assert not read.done() and not written.done()
    goes_on.set()
    read.result(30)
    assert same.unique().tolist() == [5] and other.unique().tolist() == [0]


def test_scratch_file_has_no_name_and_reserves_its_space(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 64 * MIB)
    assert os.fstat(file._descriptor).st_blocks * 512 >= 64 * MIB
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_scratch_file_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"a rank needs 1073741824\.00 GiB here, and [0-9.]+ GiB are free .*: give"):
        ScratchFile(tmp_path, 1 << 60)
    (tmp_path / "taken").touch()
    with pytest.raises(StorageError, match=r"taken: shard\.offload_directory: cannot write here: "):
        ScratchFile(tmp_path / "taken", 1)


def test_scratch_file_without_tmpfile_support_is_unlinked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: object, flags: int, *more: int, **named: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no such thing")
        return real(path, flags, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    file = ScratchFile(tmp_path, 4 * PAGE_BYTES)
    assert list(tmp_path.iterdir()) == []
    for piece in pieces(file, 4):
        piece.fill_(3)
    assert all(piece.eq(3).all() for piece in pieces(file, 4))
    file.close()


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize("at", [0, 1, 5, 11])
def test_failing_disk_is_one_line_at_any_time(
    scratch: ScratchFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    real: Callable[[int, Sequence[memoryview], int], int] = getattr(os, name)

    def failing(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == at * PAGE_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, name, failing)
    doing = "read" if name == "preadv" else "write"
    with pytest.raises(StorageError) as caught:
        for piece in pieces(scratch, 12):
            piece.fill_(1)
    assert (
        caught.value.line == f"{tmp_path}/fast/disk: shard.offload: cannot {doing} here: Input/output error [storage]"
    )


def test_truncated_scratch_file_is_one_line(scratch: ScratchFile) -> None:
    os.ftruncate(scratch._descriptor, 3 * PAGE_BYTES)
    with pytest.raises(StorageError, match="was truncated during use"):
        list(pieces(scratch, 12))


def test_short_transfers_are_continued(scratch: ScratchFile, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "pwritev"):
        real: Callable[[int, Sequence[memoryview], int], int] = getattr(os, name)
        short = lambda descriptor, buffers, offset, real=real: real(descriptor, [buffers[0][:512]], offset)  # noqa: E731
        monkeypatch.setattr(os, name, short)
    for piece in pieces(scratch, 6):
        piece.copy_(torch.arange(PAGE_BYTES) % 251)
    assert all(piece.equal((torch.arange(PAGE_BYTES) % 251).byte()) for piece in pieces(scratch, 6, None))


def test_disk_rate_leaves_no_file(tmp_path: Path) -> None:
    assert disk_rate(tmp_path) > 1e6
    assert list(tmp_path.iterdir()) == []


@given(numel=st.integers(0, 10_000_000), states=st.sampled_from(["fp32", "bf16", "int8"]), row=st.integers(1, 5000))
@settings(max_examples=examples(60))
def test_windows_cover_a_range_and_cut_no_block_of_int8(numel: int, states: str, row: int) -> None:
    numel -= numel % row
    cut = windows(numel, states, row)  # type: ignore[arg-type]
    assert [start for start, _ in cut] == [0, *(stop for _, stop in cut)][: len(cut)]
    assert (cut[-1][1] if cut else 0) == numel
    placed = record(8 * PAGE_BYTES, {"a": 1, "b": PAGE_BYTES, "c": PAGE_BYTES + 1})
    assert placed.fields == {"a": (0, 1), "b": (PAGE_BYTES, PAGE_BYTES), "c": (2 * PAGE_BYTES, PAGE_BYTES + 1)}
    assert placed.size_bytes == 4 * PAGE_BYTES
