"""Files as they lie on a disk: plain, or compressed as the end of their names says."""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from aliquot.errors import DataError

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_ALIASES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}
_LOOKED_AT = 4096  # bytes, for what says that it is UTF-16
_STARTS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}


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
            _refuse_utf16(file.peek(_LOOKED_AT)[:_LOOKED_AT], path)
            yield file, file.tell
        return
    import pyarrow

    with pyarrow.CompressedInputStream(pyarrow.OSFile(str(path), "rb"), codec) as stream:
        _refuse_utf16(stream.read(_LOOKED_AT), path)
    with pyarrow.OSFile(str(path), "rb") as packed:
        stream = pyarrow.CompressedInputStream(packed, codec)
        with io.BufferedReader(stream, 1 << 20) as unpacked:
            yield unpacked, packed.tell


def _refuse_utf16(start: bytes, path: Path) -> None:
    """Of a file's `start`: without a mark it may pass for UTF-8, half of it NULs."""
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


def not_text(data: bytes, error: UnicodeDecodeError, where: str, before: int = 0) -> DataError:
    """What to say of `data` that is not UTF-8; `before` bytes came before it."""
    packed = next((name for start, name in _STARTS.items() if data.startswith(start)), None)
    if packed in _CODECS.values():
        suffix = next(suffix for suffix, name in _CODECS.items() if name == packed)
        return DataError(f"a {packed} archive, not text: let its name end with {suffix}, or unpack it", where)
    if packed is not None:
        return DataError(f"a {packed} archive, not text: unpack it first", where)
    return DataError(f"not UTF-8 text ({error.reason} at byte {before + error.start})", where)
