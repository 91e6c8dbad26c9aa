"""Files as they lie on a disk: plain, or compressed as the end of their names says."""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from aliquot.core.errors import DataError
from aliquot.core.small_files import LFS_POINTER, is_lfs_pointer

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_ALIASES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}
_LOOKED_AT = 4096  # bytes, for what says that it is UTF-16
_ARCHIVES = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!\x1a\x07": "rar",
}  # fmt: skip
_OTHERS = {
    b"%PDF-": "PDF", b"PAR1": "parquet", b"ARROW1": "Arrow", b"Obj\x01": "Avro", b"\x89PNG": "PNG",
    b"\xff\xd8\xff": "JPEG", b"SQLite format 3\0": "SQLite", b"\x93NUMPY": "NumPy", b"\x89HDF": "HDF5",
}  # fmt: skip


def suffix_of(path: Path) -> str:
    """What is in a file, by its name: `.jsonl` of both `a.jsonl` and `a.jsonl.gz`."""
    suffix = (Path(path.stem) if path.suffix.lower() in _CODECS else path).suffix.lower()
    return _ALIASES.get(suffix, suffix)


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """(its content, unpacked as it is read; how many bytes of the file have been read). Raises OSError as it is read
    where an archive is damaged or cut short, UserError where it is UTF-16."""
    codec = _CODECS.get(path.suffix.lower())
    if codec is None:
        with path.open("rb") as file:
            _refuse_no_text(file.peek(_LOOKED_AT)[:_LOOKED_AT], path)
            yield file, file.tell
        return
    import pyarrow

    with pyarrow.CompressedInputStream(pyarrow.OSFile(str(path), "rb"), codec) as stream:
        _refuse_no_text(stream.read(_LOOKED_AT), path)
    with pyarrow.OSFile(str(path), "rb") as packed:
        stream = pyarrow.CompressedInputStream(packed, codec)
        with io.BufferedReader(stream, 1 << 20) as unpacked:
            yield unpacked, packed.tell


def refuse_pointer(path: Path) -> None:
    """Raises UserError for what git-lfs has left in the place of a file."""
    with path.open("rb") as file:
        if is_lfs_pointer(file.read(64)):
            raise DataError(LFS_POINTER, path)


def _refuse_no_text(start: bytes, path: Path) -> None:
    """By a file's `start`: UTF-16 without a mark may pass for UTF-8, half of it NULs, and so may other formats."""
    if is_lfs_pointer(start):
        raise DataError(LFS_POINTER, path)
    if (other := _other_format(start)) is not None:
        raise DataError(other, path)
    high, low = start[::2], start[1::2]
    coding = None
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        coding = "UTF-16"
    elif low and high.count(0) * 2 > len(high) and not low.count(0):
        coding = "UTF-16BE"
    elif low and low.count(0) * 2 > len(low) and not high.count(0):
        coding = "UTF-16LE"
    if coding is not None:
        raise DataError(f"{coding} text, not UTF-8: convert it first (iconv -f {coding} -t UTF-8)", path)


def _other_format(start: bytes) -> str | None:
    """What to say of a file that begins so; None: it may be text, also one that begins with the letters of a format."""
    if not start.startswith(b"%PDF-") and not _is_binary(start):
        return None
    packed = next((name for magic, name in _ARCHIVES.items() if start.startswith(magic)), None)
    if packed is None and start[257:262] == b"ustar":
        packed = "tar"
    if packed in _CODECS.values():
        suffix = next(suffix for suffix, name in _CODECS.items() if name == packed)
        return f"a {packed} archive, not text: let its name end with {suffix}, or unpack it"
    if packed is not None:
        return f"a {packed} archive, not text: unpack it first"
    other = next((name for magic, name in _OTHERS.items() if start.startswith(magic)), None)
    return None if other is None else f"a file of the format {other}, not text: convert it first, or leave it out"


def _is_binary(start: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # its end may be within a character
    except UnicodeDecodeError:
        return True
    return b"\0" in start


def not_text(error: UnicodeDecodeError, where: str, before: int = 0) -> DataError:
    """What to say of bytes that are not UTF-8; `before` bytes came before them."""
    return DataError(f"not UTF-8 text ({error.reason} at byte {before + error.start})", where)
